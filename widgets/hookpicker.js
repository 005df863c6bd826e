// The page of a HookPicker: the grid of a model's hooks.

import { mount } from "./hooks.js";
import { view } from "./views.js";

export default view({ name: "hooks", label: "Hooks", traits: ["hook", "hooks", "heads"], mount });
