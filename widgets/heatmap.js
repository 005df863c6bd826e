// The heatmap pane: norms of the stream, one hook, or attention; of the clean run, the patched run, or the change.

import { asLines, attentionHook, attentionPlot, createLines, mountHeads, shownHead } from "./attention.js";
import { alertLine, h, segment, visible } from "./dom.js";
import { createMap } from "./map.js";
import { findHook, hookName } from "./store.js";

const WAYS = [["map", "Map"], ["lines", "Lines"]];
const RUNS = [["clean", "Clean"], ["patched", "Patched"], ["change", "Change"]];

// What a map may show: what it asks for, how that becomes a plot, what a click chooses; a line about it beside the tabs.
export const KINDS = {
  norms: { name: "Norms", ask: () => ({ view: "norms" }), plot: normsPlot, pick: pickNorm, caption: () => [h("code", {}, "blocks.*.hook_out")] },
  hook: { name: "One hook", ask: (s) => ({ view: "hook", hook: s.state.hook }), plot: hookPlot, pick: pickToken, caption: (s) => [h("code", {}, s.state.hook)] },
  attention: { name: "Attention", ask: (s) => ({ view: "attention", hook: attentionHook(s), head: shownHead(s) }), plot: attentionPlot, pick: pickToken, caption: attentionCaption },
};

export function mount(el, store, kinds = KINDS) {
  const kind = () => kinds[store.state.tab];
  const asked = (s) => ({ of: shownRun(s), ...kind().ask(s) });
  const tabs = segment("What the map shows", Object.entries(kinds).map(([tab, { name }]) => [tab, name]), (tab) => store.set({ tab }));
  tabs.el.hidden = Object.keys(kinds).length < 2;
  const runs = segment("Which run", RUNS, (of) => store.set({ of }));
  const ways = segment("How attention is shown", WAYS, (way) => store.set({ lines: way === "lines" }));
  const about = h("small", {});
  const wait = h("div", { class: "empty", hidden: true });
  el.append(h("div", { class: "head" }, tabs.el, ways.el, about, h("span", { class: "sp" }), runs.el));
  const unmountHeads = mountHeads(el, store);
  const fail = alertLine(el);
  const map = createMap(el, { onPick: (cell) => kind().pick(store, cell), onLook: (patch) => store.set(patch) });
  const lines = createLines(el.querySelector(".mapbox"), store);
  el.querySelector(".mapbox").append(wait);

  store.watch((s) => [s.state.zoom, s.state.table], map.follow);
  store.watch(
    (s) => [s.state.tab, shownRun(s), s.state.hook, shownHead(s), s.result, s.data(asked(s)), s.tokens(), s.state.positions, s.state.heads, s.state.edits, asLines(s), kind().also?.(s)],
    (tab, of, hook, head, result, array) => {
      tabs.select(tab);
      runs.select(of);
      runs.el.hidden = !result.edited;
      ways.el.hidden = tab !== "attention";
      ways.select(asLines(store) ? "lines" : "map");
      about.replaceChildren(...kind().caption(store));
      fail(array?.error);
      wait.hidden = Boolean(array);
      wait.textContent = !result.error ? "\u2026" : result.error.where === "run" ? "Nothing to show: there was no run." : "Nothing to show until the error is mended.";
      el.classList.toggle("lined", asLines(store));
      if (!array || array.error) {
        map.clear();
        lines.clear();
        return;
      }
      const shown = kind().plot(store, array);
      if (asLines(store)) lines.show(shown);
      else map.show({ ...shown, key: [tab, of, hook, head, String(store.state.heads), ...Object.values(result.keys)].join() });
    },
  );
  return () => {
    unmountHeads();
    map.dispose();
  };
}

// Without an edit there is one run.
function shownRun(store) {
  return store.result.edited ? store.state.of : "clean";
}

// A map says it below.
function attentionCaption(store) {
  if (!asLines(store)) return [];
  const { layer } = findHook(store.about, attentionHook(store));
  return [`${layer === null ? "" : `layer ${layer}, `}head ${shownHead(store)}`];
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

function pickToken(store, { row }) {
  store.set({ positions: [row] });
}

function pickNorm(store, { row, col }) {
  const stream = store.about.columns.find((column) => column.component === "resid_post");
  store.set({ hook: hookName(stream, row), positions: [col], heads: [] });
}
