// The heatmap pane: norms of the stream, one hook, or attention; of the clean run, the patched run, or the change.

import { asLines, attentionHook, attentionPlot, createLines, mountHeads, shownHead } from "./attention.js";
import { alertLine, h, segment, visible } from "./dom.js";
import { createMap } from "./map.js";
import { findHook, hookName } from "./store.js";

const TABS = [["norms", "Norms"], ["hook", "One hook"], ["attention", "Attention"]];
const WAYS = [["map", "Map"], ["lines", "Lines"]];
const RUNS = [["clean", "Clean"], ["patched", "Patched"], ["change", "Change"]];

export function mount(el, store) {
  const tabs = segment("What the map shows", TABS, (tab) => store.set({ tab }));
  const runs = segment("Which run", RUNS, (of) => store.set({ of }));
  const ways = segment("How attention is shown", WAYS, (way) => store.set({ lines: way === "lines" }));
  const about = h("small", {});
  const wait = h("div", { class: "empty", hidden: true });
  el.append(h("div", { class: "head" }, tabs.el, ways.el, about, h("span", { class: "sp" }), runs.el));
  const unthemed = mountHeads(el, store);
  const fail = alertLine(el);
  const map = createMap(el, { onPick: (cell) => pick(store, cell) });
  const lines = createLines(el.querySelector(".mapbox"), store);
  el.querySelector(".mapbox").append(wait);

  store.watch(
    (s) => [s.state.tab, shownRun(s), s.state.hook, shownHead(s), s.result, s.data(asked(s)), s.tokens(), s.state.positions, s.state.heads, s.state.edits, asLines(s)],
    (tab, of, hook, head, result, array) => {
      tabs.select(tab);
      runs.select(of);
      runs.el.hidden = !result.edited;
      ways.el.hidden = tab !== "attention";
      ways.select(asLines(store) ? "lines" : "map");
      about.replaceChildren(...caption(store));
      fail(array?.error);
      wait.hidden = Boolean(array);
      wait.textContent = !result.error ? "\u2026" : result.error.where === "run" ? "Nothing to show: there was no run." : "Nothing to show until the error is mended.";
      el.classList.toggle("lined", asLines(store));
      if (!array || array.error) {
        map.clear();
        lines.clear();
        return;
      }
      const shown = plot(store, array);
      if (asLines(store)) lines.show(shown);
      else map.show({ ...shown, key: [tab, of, hook, head, String(store.state.heads), ...Object.values(result.keys)].join() });
    },
  );
  return () => {
    unthemed();
    map.dispose();
  };
}

// Without an edit there is one run.
function shownRun(store) {
  return store.result.edited ? store.state.of : "clean";
}

function asked(store) {
  const { tab, hook } = store.state;
  const of = shownRun(store);
  if (tab === "norms") return { view: "norms", of };
  if (tab === "hook") return { view: "hook", of, hook };
  return { view: "attention", of, hook: attentionHook(store), head: shownHead(store) };
}

function caption(store) {
  const { tab, hook } = store.state;
  if (tab === "attention") return asLines(store) ? [`layer ${findHook(store.about, attentionHook(store)).layer}, head ${shownHead(store)}`] : []; // a map says it below
  return [h("code", {}, tab === "hook" ? hook : "blocks.*.hook_out")];
}

function plot(store, array) {
  const { tab } = store.state;
  return tab === "norms" ? normsPlot(store, array) : tab === "hook" ? hookPlot(store, array) : attentionPlot(store, array);
}

function normsPlot(store, array) {
  const tokens = store.tokens();
  const change = shownRun(store) === "change";
  const layer = findHook(store.about, store.state.hook)?.layer;
  return {
    ...array,
    positions: "cols",
    flag: change ? false : "line",
    diverging: false,
    tokens,
    unit: change ? "how far the edits moved the stream" : "norm of the stream after each layer",
    label: change ? "Change of the residual stream, layer by token" : "Norm of the residual stream, layer by token",
    corner: "layer",
    rowLabel: String,
    colLabel: (p) => visible(tokens[p]?.[1] ?? ""),
    selected: layer === null || layer === undefined ? [] : store.selection().map((col) => ({ row: layer, col })),
    edited: store.state.edits.filter((edit) => edit.enabled !== false).flatMap((edit) => editedCells(store, edit)),
    say: (row, col) => `layer ${row}, token ${col} ${visible(tokens[col]?.[1] ?? "")}`,
  };
}

function editedCells(store, edit) {
  const row = findHook(store.about, edit.hook)?.layer;
  const positions = [edit.pos].flat().filter(Number.isInteger);
  return row === null || row === undefined ? [] : positions.map((col) => ({ row, col }));
}

function hookPlot(store, array) {
  const tokens = store.tokens();
  const change = shownRun(store) === "change";
  const found = findHook(store.about, store.state.hook);
  const chosen = found?.column.heads && !found.column.derived && store.state.heads.length === 1 ? store.state.heads[0] : null;
  const width = found?.column.heads ? array.cols / found.column.heads : array.cols;
  const cells = chosen === null ? array : slice(array, chosen * width, width);
  const unit = `${change ? "change of the " : ""}activation${chosen === null ? "" : ` of head ${chosen}`}, dimension across`;
  return {
    ...cells,
    positions: "rows",
    flag: change ? false : "vector",
    diverging: true,
    tokens,
    unit,
    label: `Activations at ${store.state.hook}, token by dimension`,
    corner: "token",
    rowLabel: (p) => visible(tokens[p]?.[1] ?? ""),
    colLabel: String,
    selected: store.selection().map((row) => ({ row })),
    say: (row, col) => `token ${row} ${visible(tokens[row]?.[1] ?? "")}, dimension ${found?.column.heads && chosen === null ? `${col % width} of head ${Math.floor(col / width)}` : col}`,
  };
}

function slice(array, from, width) {
  const values = new Float32Array(array.rows * width);
  for (let row = 0; row < array.rows; row++) values.set(array.values.subarray(row * array.cols + from, row * array.cols + from + width), row * width);
  return { values, rows: array.rows, cols: width };
}

function pick(store, { row, col }) {
  if (store.state.tab !== "norms") {
    store.set({ positions: [row] });
    return;
  }
  const stream = store.about.columns.find((column) => column.component === "resid_post");
  store.set({ hook: hookName(stream, row), positions: [col], heads: [] });
}
