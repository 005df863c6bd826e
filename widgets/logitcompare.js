// The page of a LogitCompare: the likeliest next tokens of one run or two, and the logit difference of two tokens.

import { mount } from "./logits.js";
import { view } from "./views.js";

export default view({ name: "pred", label: "Predictions", traits: ["compare"], mount });
