// The menu of presets: edits that are asked for again and again, at the chosen hook and tokens.

import { h } from "./dom.js";
import { NO_SOURCE, one } from "./editfields.js";
import { closed, editsHere, patchesHere, placeWords, refusal } from "./edits.js";
import { createMenu } from "./menu.js";
import { Refused, written } from "./positions.js";
import { findHook, hookName } from "./store.js";

const MEAN = "Mean over positions";

// Each with what it would do now, or why it cannot.
const PRESETS = [
  ["Zero this", (s) => `suppress ${placeWords(s)} at ${at(s)}`, refusal, (s) => editsHere(s, "suppress")],
  [MEAN, (s) => `set ${meanEdit(s).hook} at ${at(s)} to the mean of the clean run`, (s) => refusalOfOne(s) || noRun(s)],
  ["Patch from the second prompt", (s) => `patch ${placeWords(s)} at ${at(s)}`, (s) => refusal(s) || (s.state.source ? "" : NO_SOURCE), (s) => patchesHere(s)],
  ["One head", (s) => `suppress head ${oneHead(s).head} of layer ${oneHead(s).layer} at ${at(s)}`, (s) => (oneHead(s) ? "" : "Choose a hook of a layer with heads first."), suppressHead],
];

// The mean is one hook's own, also where more are chosen.
function refusalOfOne({ about, state: { hook } }) {
  const reason = closed(about, hook);
  return reason && `${hook}: ${reason}`;
}

function meanEdit(store) {
  return editsHere(store, "set").find((edit) => edit.hook === store.state.hook);
}

function noRun(store) {
  return store.result.keys?.clean ? "" : "There is no run yet to take the mean of.";
}

function at(store) {
  const positions = store.selection();
  if (!positions.length) return "all tokens";
  return `token${positions.length === 1 ? "" : "s"} ${written(positions)}`;
}

// The head to suppress: of the chosen hook, where that has the query heads; else the one whose attention is shown.
function oneHead(store) {
  const z = store.about.columns.find((column) => column.component === "z");
  const { column, layer } = findHook(store.about, store.state.hook) ?? {};
  const hook = z && Number.isInteger(layer) ? hookName(z, layer) : null;
  if (!hook || closed(store.about, hook)) return null;
  const chosen = column.heads === z.heads && !column.derived ? store.state.heads : [];
  return { hook, layer, head: chosen[0] ?? Math.min(store.state.head, z.heads - 1) };
}

function suppressHead(store) {
  const { hook, head } = oneHead(store);
  const pos = store.selection();
  return [{ hook, op: "suppress", ...(pos.length ? { pos: one(pos) } : {}), enabled: true, head }];
}

// The mean of the rows, in the shape that `value` has at this hook: heads apart, the chosen ones alone.
function meanOf({ values, rows, cols }, heads, head) {
  const mean = Array.from({ length: cols }, (_, col) => {
    let sum = 0;
    for (let row = 0; row < rows; row++) sum += values[row * cols + col];
    return Number((sum / rows).toPrecision(7));
  });
  if (!mean.every(Number.isFinite)) throw new Refused("The mean over positions is not finite at this hook: there is nothing to set.");
  if (!heads) return mean;
  const width = cols / heads;
  const each = Array.from({ length: heads }, (_, i) => mean.slice(i * width, (i + 1) * width));
  return head === undefined ? each : Array.isArray(head) ? head.map((i) => each[i]) : each[head];
}

export function mountPresets(form, store, add, fail) {
  const items = () =>
    PRESETS.map(([name, does, refuse, build]) => {
      const off = refuse(store);
      return { name, about: off || does(store), off, take: () => take(name, build) };
    });
  form.append(h("span", { class: "sp" }), createMenu("Presets", items));

  function take(name, build) {
    fail(null);
    if (name !== MEAN) return add(build(store));
    wish = { edit: meanEdit(store), run: store.result.keys.clean };
    grant();
  }

  // The mean waits for the clean run's activations, if they are not in the page yet; another prompt ends the wait.
  let wish = null;
  const wanted = () => wish && store.data({ view: "hook", hook: wish.edit.hook });
  function grant() {
    if (wish && store.result.keys?.clean !== wish.run) wish = null;
    const array = wanted();
    if (!array) return;
    const { edit } = wish;
    wish = null;
    try {
      if (array.error) throw new Refused(array.error);
      add([{ ...edit, value: meanOf(array, findHook(store.about, edit.hook).column.heads, edit.head) }]);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      fail(error.message);
    }
  }
  store.watch((s) => [wanted(), s.result.keys?.clean], grant);
}
