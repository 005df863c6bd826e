// A map's numbers as a real table: the cells that are shown, at most 50 by 50 of them, around the current one.

import { h, number } from "./dom.js";

const MOST = 50;

export function fillTable(table, plot, shown, current) {
  const [top, rows] = part(shown.row, shown.rows, current?.row);
  const [left, cols] = part(shown.col, shown.cols, current?.col);
  const down = Array.from({ length: rows }, (_, i) => top + i);
  const across = Array.from({ length: cols }, (_, i) => left + i);
  const rest = rows < plot.rows || cols < plot.cols ? `: ${of("rows", top, rows, plot.rows)}, ${of("columns", left, cols, plot.cols)}. For others zoom, or choose another cell of the map` : "";
  table.replaceChildren(
    h("caption", {}, `${plot.label}${rest}.`),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, plot.corner), ...across.map((c) => h("th", { scope: "col" }, named(plot.colLabel(c), c))))),
    h(
      "tbody",
      {},
      ...down.map((r) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, named(plot.rowLabel(r), r)),
          ...across.map((c) => {
            const value = plot.values[r * plot.cols + c];
            const masked = plot.masked && value === -Infinity;
            return h("td", { class: masked ? "dim" : "" }, masked ? "masked" : number(value));
          }),
        ),
      ),
    ),
  );
}

// A row or column by its number, and by its name if it has one: "3 Mary", but "layer 3".
export function named(label, i) {
  return label === String(i) || label.endsWith(` ${i}`) ? label : `${i} ${label}`;
}

// "rows 3 to 14 of 30"
export function of(name, from, count, all) {
  return `${name} ${count === 1 ? from : `${from} to ${from + count - 1}`} of ${all}`;
}

function part(start, count, around) {
  const few = Math.min(MOST, count);
  return [around === undefined ? start : Math.max(start, Math.min(start + count - few, around - (few >> 1))), few];
}
