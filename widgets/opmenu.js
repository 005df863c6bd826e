// The choice of an operation, with a tip that says what the chosen one does.

import { h } from "./dom.js";
import { OPS } from "./editfields.js";
import { explained, tip } from "./tip.js";

export function createOps(store, attributes) {
  const words = h("div", {});
  const op = h("select", attributes, ...OPS.map((name) => h("option", { value: name }, name)));
  const fill = () => {
    const found = store.about.words?.ops[op.value];
    words.replaceChildren(...(found ? explained(op.value, found) : []));
    return found && words;
  };
  op.addEventListener("change", fill); // the keys change it under an open tip
  tip(op, fill);
  return op;
}
