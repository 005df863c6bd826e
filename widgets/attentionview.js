// The page of an AttentionView: a head's pattern as a map or as lines, and all heads small.

import { KINDS, mount } from "./heatmap.js";
import { view } from "./views.js";

const { attention } = KINDS;

export default view({ name: "heat", label: "Attention", traits: ["head", "positions"], mount: (el, store) => mount(el, store, { attention }) });
