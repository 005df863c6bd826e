// The hook grid: layers down, components across; choose a hook, see where it is edited and how large it is.

import { h, number } from "./dom.js";
import { findHook, hookName } from "./store.js";

const GROUPS = ["residual", "attention", "mlp"];
const SHORT = {
  resid_pre: "pre", resid_mid: "mid", resid_post: "post",
  q: "q", k: "k", v: "v", rot_q: "q\u21bb", rot_k: "k\u21bb", scores: "scores", pattern: "pattern", z: "z", attn_out: "out", attn_added: "added",
  post: "neurons", mlp_out: "out", mlp_added: "added", embed: "embed", ln_final: "final norm", logits: "logits",
};
// Widths in proportion to the names: every name is a whole word in a grid that fits beside the heatmap.
const WIDTH = { q: 20, k: 20, v: 20, z: 20, rot_q: 21, rot_k: 21, resid_post: 26, scores: 35, pattern: 40, post: 44 };
const ORDER = Object.keys(SHORT);

export function mount(el, store) {
  const table = h("table", { role: "grid", "aria-label": "Hook points, layers by components" });
  const scroller = h("div", { class: "grid" }, table);
  const ends = h("div", { class: "ends" });
  const readout = h("span", { class: "readout" });
  el.append(
    h("div", { class: "head" }, h("b", {}, "Hooks"), h("small", {}, "tinted by norm at the chosen tokens")),
    scroller,
    h("div", { class: "legend" }, h("span", { class: "key ed" }), "edited", h("span", { class: "key on" }), "chosen", h("span", { class: "sp" }), ends),
    h("div", { class: "legend" }, readout),
  );
  let columns = [];
  let focus = { row: 0, col: 0 };
  const heads = h("tr", { class: "headrow" });

  const cell = (row, col) => table.querySelector(`td[data-row="${row}"][data-col="${col}"]`);
  const choose = (name) => {
    const { column } = findHook(store.about, name);
    const map = ["pattern", "scores"].includes(column.component) ? "attention" : "hook";
    store.set({ hook: name, heads: [], tab: map });
  };

  function build(about) {
    const rank = (column) => (ORDER.includes(column.component) ? ORDER.indexOf(column.component) : 99);
    const layered = about.columns.filter((column) => column.name.includes("{i}"));
    columns = GROUPS.flatMap((group) => layered.filter((column) => column.group === group).sort((a, b) => rank(a) - rank(b)));
    const first = new Set(GROUPS.map((group) => columns.findIndex((column) => column.group === group)));
    const spans = GROUPS.map((group) => [group, columns.filter((column) => column.group === group).length]).filter(([, count]) => count);
    const thead = h(
      "thead",
      {},
      h("tr", { "aria-hidden": "true" }, h("th", {}), ...spans.map(([group, count]) => h("th", { class: "g", colspan: count }, group))),
      h("tr", {}, h("th", { "aria-label": "layer" }), ...columns.map((column) => h("th", { scope: "col", title: column.about }, SHORT[column.component] ?? column.component))),
    );
    const body = h("tbody");
    for (let layer = 0; layer < about.layers; layer++) {
      const row = h("tr", {}, h("th", { scope: "row", class: "l" }, String(layer)));
      columns.forEach((column, col) => {
        const reason = column.missing[String(layer)] ?? column.missing.null;
        const name = hookName(column, layer);
        row.append(
          h(
            "td",
            {
              role: "gridcell",
              tabindex: "-1",
              class: `c${first.has(col) && col ? " sep" : ""}${reason ? " na" : ""}`,
              "data-row": layer,
              "data-col": col,
              "data-hook": name,
              "aria-label": name,
              "aria-disabled": reason ? "true" : null,
              title: reason ? `${name} is not available: ${reason}` : null,
            },
            h("div", {}),
          ),
        );
      });
      body.append(row);
    }
    const widths = columns.map((column) => WIDTH[column.component] ?? 24);
    const total = widths.reduce((sum, width) => sum + width, 24);
    const cols = [24, ...widths].map((width) => h("col", { style: `width: ${((100 * width) / total).toFixed(2)}%` }));
    table.replaceChildren(h("colgroup", {}, ...cols), thead, body);
    ends.replaceChildren(
      ...about.columns
        .filter((column) => !column.name.includes("{i}"))
        .map((column) => {
          const reason = column.component === "logits" ? "The logits are shown above as predictions." : column.missing.null;
          return h("button", { type: "button", class: "chip", "data-hook": column.name, disabled: Boolean(reason), title: reason ?? `${column.name}: ${column.about}`, onclick: () => choose(column.name) }, SHORT[column.component] ?? column.component);
        }),
    );
  }

  function move(row, col) {
    cell(focus.row, focus.col)?.setAttribute("tabindex", "-1");
    focus = { row: Math.max(0, Math.min(store.about.layers - 1, row)), col: Math.max(0, Math.min(columns.length - 1, col)) };
    const to = cell(focus.row, focus.col);
    to?.setAttribute("tabindex", "0");
    return to;
  }

  // Into sight within the grid's own scroll; the notebook stays where it is.
  function reveal(td, middle = false) {
    const top = td.offsetTop - table.tHead.offsetHeight;
    const room = scroller.clientHeight - table.tHead.offsetHeight;
    if (!room || (top >= scroller.scrollTop && top + td.offsetHeight + (heads.isConnected ? 26 : 0) <= scroller.scrollTop + room)) return;
    scroller.scrollTop = middle ? top - room / 3 : top < scroller.scrollTop ? top : top + td.offsetHeight + 26 - room;
  }

  function describe(name) {
    const found = findHook(store.about, name);
    if (!found) return;
    const { column, layer } = found;
    const shape = column.derived && column.heads ? "heads \u00d7 query \u00d7 key" : column.shape.join(" \u00d7 ");
    const size = sizes.get(name);
    const reason = column.missing[String(layer)];
    readout.replaceChildren(h("code", {}, name), ` ${shape}${size === undefined ? "" : `, norm ${number(size)}`}${reason ? `, not available: ${reason}` : column.editable ? "" : ", read only"}`);
    readout.title = column.about;
  }

  let sizes = new Map();
  const hookAt = (event) => event.target.closest("[data-hook]")?.dataset.hook;
  el.addEventListener("click", (event) => {
    const td = event.target.closest("td[data-hook]");
    if (!td) return;
    move(Number(td.dataset.row), Number(td.dataset.col)).focus({ preventScroll: true });
    if (!td.classList.contains("na")) choose(td.dataset.hook);
  });
  el.addEventListener("mouseover", (event) => describe(hookAt(event) ?? store.state.hook));
  el.addEventListener("focusin", (event) => describe(hookAt(event) ?? store.state.hook));
  el.addEventListener("mouseleave", () => describe(store.state.hook));
  table.addEventListener("keydown", (event) => {
    const td = event.target.closest("td[data-hook]");
    if (!td || event.ctrlKey || event.metaKey || event.altKey) return;
    const [row, col] = [Number(td.dataset.row), Number(td.dataset.col)];
    const to = { ArrowUp: [row - 1, col], ArrowDown: [row + 1, col], ArrowLeft: [row, col - 1], ArrowRight: [row, col + 1], Home: [row, 0], End: [row, 1e9], PageUp: [row - 8, col], PageDown: [row + 8, col] }[event.key];
    if (to) {
      const next = move(...to);
      next.focus({ preventScroll: true });
      reveal(next);
    } else if (event.key === "Enter" || event.key === " ") td.click();
    else return;
    event.preventDefault();
  });

  store.watch((s) => [s.about], build);
  store.watch(
    (s) => [s.state.hook, s.state.heads, s.state.head, s.state.edits, s.about],
    (hook, chosenHeads, head, edits) => {
      const found = findHook(store.about, hook);
      const edited = new Set(edits.filter((edit) => edit.enabled !== false).map((edit) => edit.hook));
      for (const item of el.querySelectorAll("[data-hook]")) {
        item.classList.toggle("on", item.dataset.hook === hook);
        item.classList.toggle("ed", edited.has(item.dataset.hook));
        item.setAttribute(item.tagName === "TD" ? "aria-selected" : "aria-pressed", String(item.dataset.hook === hook));
      }
      showHeads(found, chosenHeads, head);
      if (!found) return;
      const col = columns.indexOf(found.column);
      if (col >= 0) {
        const td = move(found.layer, col);
        if (!scroller.contains(document.activeElement)) requestAnimationFrame(() => reveal(td, true));
      }
      describe(hook);
    },
  );

  // The heads of the chosen hook, in a row of their own below its layer. For an edit they are the heads to change, for
  // a pattern the head to show.
  function showHeads(found, chosenHeads, head) {
    if (!found?.column.heads || found.layer === null) {
      heads.remove();
      return;
    }
    const reads = found.column.derived;
    const count = found.column.heads;
    const held = heads.contains(document.activeElement) ? document.activeElement.textContent : null;
    const toggle = (i) => {
      if (reads) store.set({ head: i, tab: "attention" });
      else store.set({ heads: chosenHeads.includes(i) ? chosenHeads.filter((other) => other !== i) : [...chosenHeads, i].sort((a, b) => a - b) });
    };
    const button = (text, pressed, onclick) => h("button", { type: "button", "aria-pressed": String(pressed), "aria-label": text === "all" ? "all heads" : `head ${text}`, onclick }, text);
    heads.replaceChildren(
      h("th", {}),
      h(
        "td",
        { colspan: columns.length, role: "gridcell" },
        h("span", { class: "heads" }, h("span", {}, ["k", "v", "rot_k"].includes(found.column.component) ? "key-value heads" : "heads"),
          ...Array.from({ length: count }, (_, i) => button(String(i), reads ? head === i : chosenHeads.includes(i), () => toggle(i))),
          reads ? null : button("all", chosenHeads.length === 0, () => store.set({ heads: [] }))),
      ),
    );
    table.tBodies[0].querySelector(`td[data-row="${found.layer}"]`)?.parentElement.after(heads);
    if (held) [...heads.querySelectorAll("button")].find((item) => item.textContent === held)?.focus({ preventScroll: true });
  }

  store.watch(
    (s) => [s.data({ view: "grid" }), s.selection(), s.about],
    (array, positions, about) => {
      sizes = new Map();
      const small = el.querySelector("small");
      small.textContent = array?.error ?? "tinted by norm at the chosen tokens";
      if (array && !array.error)
        about.grid.forEach((name, row) => {
          const values = positions.map((p) => array.values[row * array.cols + p]);
          sizes.set(name, values.reduce((sum, value) => sum + value, 0) / values.length);
        });
      // Each component by its own largest layer: their sizes differ too much for one scale.
      columns.forEach((column, col) => {
        const norms = Array.from({ length: about.layers }, (_, layer) => sizes.get(hookName(column, layer)));
        const largest = Math.max(...norms.filter(Number.isFinite), 0);
        norms.forEach((size, layer) => {
          const share = Number.isFinite(size) && largest ? Math.round((size / largest) * 62) : 0;
          cell(layer, col).firstChild.style.setProperty("--tint", `${share}%`);
        });
      });
      describe(store.state.hook);
    },
  );
}
