// The attention view: a head's pattern or scores, query by key, and the row of heads to choose from.

import { h, visible } from "./dom.js";
import { findHook, hookName } from "./store.js";

// The hook whose heads are shown: the chosen one if it is a pattern or scores, else the pattern of the chosen layer.
export function attentionHook(store) {
  const found = findHook(store.about, store.state.hook);
  if (found && ["pattern", "scores"].includes(found.column.component)) return store.state.hook;
  const pattern = store.about.columns.find((column) => column.component === "pattern");
  return pattern ? hookName(pattern, found?.layer ?? 0) : null;
}

export function shownHead(store) {
  const pattern = store.about.columns.find((column) => column.component === "pattern");
  return Math.min(store.state.head, (pattern?.heads ?? 1) - 1);
}

export function attentionPlot(store, array) {
  const hook = attentionHook(store);
  const { layer, column } = findHook(store.about, hook);
  const head = shownHead(store);
  const tokens = store.tokens();
  const values = Float32Array.from(array.values);
  // What lies in the future of a token is masked: apart from a zero.
  for (let q = 0; q < array.rows; q++) for (let k = q + 1; k < array.cols; k++) values[q * array.cols + k] = -Infinity;
  const scores = column.component === "scores";
  const change = store.result.edited && store.state.of === "change"; // without an edit there is one run
  return {
    values,
    rows: array.rows,
    cols: array.cols,
    masked: true,
    positions: "both",
    flag: false,
    diverging: scores || change,
    tokens,
    unit: `${change ? "change of the " : ""}attention ${scores ? "score" : "weight"}, layer ${layer}, head ${head}: rows look at columns`,
    label: `Attention of head ${head} in layer ${layer}`,
    rowLabel: (q) => `${visible(tokens[q]?.[1] ?? "")} ${q}`,
    colLabel: (k) => visible(tokens[k]?.[1] ?? ""),
    selected: store.selection().map((row) => ({ row })),
    say: (q, k) => `${q} ${visible(tokens[q]?.[1] ?? "")} looks at ${k} ${visible(tokens[k]?.[1] ?? "")}`,
  };
}

export function mountHeads(el, store) {
  const row = h("span", { class: "heads", role: "group", "aria-label": "Attention head" });
  el.append(row);
  store.watch(
    (s) => [s.about, s.state.tab === "attention", s.state.head],
    (about, shown) => {
      row.hidden = !shown;
      const count = about.columns.find((column) => column.component === "pattern")?.heads ?? 0;
      if (row.childElementCount !== count + 1)
        row.replaceChildren(
          h("span", {}, "head"),
          ...Array.from({ length: count }, (_, head) => h("button", { type: "button", "aria-label": `head ${head}`, onclick: () => store.set({ head }) }, String(head))),
        );
      [...row.querySelectorAll("button")].forEach((button, head) => button.setAttribute("aria-pressed", String(head === shownHead(store))));
    },
  );
}
