// The page of a TokenPicker: the tokens of one prompt, to choose from.

import { mountPicker } from "./tokens.js";
import { view } from "./views.js";

export default view({ name: "tokens", label: "Tokens", traits: ["positions"], mount: mountPicker });
