// The page of a Heatmap: any numbers in rows and columns.

import { visible } from "./dom.js";
import { mount } from "./heatmap.js";
import { named } from "./table.js";
import { view } from "./views.js";

const plain = {
  name: "Values",
  ask: () => ({ view: "plain" }),
  plot,
  pick: (store, { row, col }) => store.set({ selected_rows: [row], selected_columns: [col] }),
  caption: ({ state: { title } }) => (title ? [label(title)] : []),
  also: ({ state }) => [state.rows, state.columns, state.title, state.unit, state.selected_rows, state.selected_columns],
};

function plot({ state }, array) {
  const row = (r) => (state.rows ? label(state.rows[r] ?? "") : String(r));
  const col = (c) => (state.columns ? label(state.columns[c] ?? "") : String(c));
  const place = (word, i, label) => (label.endsWith(` ${i}`) ? label : `${word} ${named(label, i)}`);
  return {
    ...array,
    positions: !state.columns ? "rows" : state.rows ? "both" : "cols",
    flag: false,
    diverging: array.values.some((value) => value < 0 && value !== -Infinity),
    tokens: [],
    unit: label(state.unit),
    label: label(state.title || "Heatmap"),
    corner: "row",
    rowLabel: row,
    colLabel: col,
    selected: chosen(state, array),
    say: (r, c) => `${place("row", r, row(r))}, ${place("column", c, col(c))}`,
  };
}

// Chosen rows cross chosen columns; without the one or the other they are whole lines.
function chosen({ selected_rows: rows, selected_columns: cols }, array) {
  const lines = [...rows.map((row) => ({ row })), ...cols.map((col) => ({ col }))].filter(({ row = 0, col = 0 }) => row < array.rows && col < array.cols);
  if (!rows.length || !cols.length || rows.length * cols.length > 400) return lines;
  return rows.flatMap((row) => cols.map((col) => ({ row, col })));
}

// Text as it is, but that no sign in it is lost: spaces are marked at its ends only.
function label(text) {
  return visible(text).replace(/(?<=[^\u2423])\u2423+(?=[^\u2423])/gu, (spaces) => " ".repeat(spaces.length));
}

export default view({
  name: "heat",
  label: "Heatmap",
  traits: ["rows", "columns", "title", "unit", "selected_rows", "selected_columns"],
  mount: (el, store) => {
    store.watch(
      (s) => [s.about.rows],
      (rows) => el.style.setProperty("--rows", String(rows)),
    );
    return mount(el, store, { plain });
  },
});
