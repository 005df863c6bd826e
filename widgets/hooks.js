// The hook grid: layers down; across the components, or the heads of one of them. Choose a hook, a whole layer or
// component; see where it is edited and how large it is.

import { h, number, segment } from "./dom.js";
import { chosenHooks } from "./edits.js";
import { findHook, hookName } from "./store.js";
import { explained, term, tip } from "./tip.js";

const GROUPS = ["residual", "attention", "mlp"];
const SHORT = {
  resid_pre: "pre", resid_mid: "mid", resid_post: "post",
  q: "q", k: "k", v: "v", rot_q: "q\u21bb", rot_k: "k\u21bb", scores: "scores", pattern: "pattern", z: "z", attn_out: "out", attn_added: "added",
  post: "neurons", mlp_out: "out", mlp_added: "added", embed: "embed", ln_final: "final norm", logits: "logits",
};
// Widths in proportion to the names: every name is a whole word in a grid that fits beside the heatmap.
const WIDTH = { q: 20, k: 20, v: 20, z: 20, rot_q: 21, rot_k: 21, resid_post: 26, scores: 35, pattern: 40, post: 44 };
const ORDER = Object.keys(SHORT);
const KEY_VALUE = ["k", "v", "rot_k"];
const TINTED = 2 ** 24; // numbers that the norms of all heads may be read from

// The stream between two layers is one place with two names; the other name of a hook, if it has one.
function sameAs(about, name) {
  const { column, layer } = findHook(about, name) ?? {};
  const named = (component, at) => {
    const other = about.columns.find((each) => each.component === component);
    return other && at >= 0 && at < about.layers ? hookName(other, at) : null;
  };
  if (column?.component === "resid_pre") return named("resid_post", layer - 1);
  return column?.component === "resid_post" ? named("resid_pre", layer + 1) : null;
}

// Why this model cannot serve a hook; undefined if it can.
const missing = (column, layer) => column.missing[String(layer)] ?? column.missing.null;

// "9 heads \u00d7 64 (d_head) for each token".
function sizeOf({ axes, shape, derived, heads }) {
  const named = (axis, i) => (!shape[i] ? axis : axis.startsWith("d_") ? `${shape[i]} (${axis})` : `${shape[i]} ${axis}`);
  return axes.split(" \u00d7 ").map(named).join(" \u00d7 ") + (derived && heads ? "" : " for each token");
}

// What is said of a hook, for a tip.
function explainHook(about, name, ...more) {
  const { column, layer } = findHook(about, name) ?? {};
  if (!column) return null;
  const twin = sameAs(about, name);
  const reason = missing(column, layer);
  return explained(
    name,
    { ...column, shape: sizeOf(column) },
    twin && `The same place as ${twin}.`,
    reason ? `Not in this model: ${reason}` : column.editable ? null : "Can be read, not edited.",
    ...more,
  );
}

export function mount(el, store) {
  const table = h("table", { role: "grid", "aria-label": "Hook points, layers by components", "aria-multiselectable": "true" });
  const scroller = h("div", { class: "grid" }, table);
  const ends = h("div", { class: "ends" });
  const readout = h("span", { class: "readout" });
  const spoken = h("div", { class: "sr", "aria-live": "polite" });
  const tinted = h("small", {}, "tinted by ", term("norm", () => explained("norm", about().words.metrics.norm)));
  const note = h("small", {});
  const across = segment("What the grid has across", [["components", "Components"], ["heads", "Heads"]], (grid) => store.set({ grid }));
  const which = h("select", { "aria-label": "Heads of", onchange: () => choose(hookName(about().columns.find((column) => column.component === which.value), layerNow())) });
  el.append(
    h("div", { class: "head" }, h("b", {}, "Hooks"), across.el, which, tinted, note),
    scroller,
    h("div", { class: "legend" }, h("span", { class: "key ed" }), "edited", h("span", { class: "key on" }), "chosen", h("span", { class: "key same" }), "same place", h("span", { class: "sp" }), ends),
    h("div", { class: "legend" }, readout),
    spoken,
  );
  const about = () => store.about;
  let lines = []; // what stands across: {text, column, head}; head: null for all of the component
  let rows = []; // one a layer: {th, cells}
  let tops = []; // the headers across
  let sizes = new Map(); // hook, or hook and head -> norm
  const opened = h("tr", { class: "headrow" }); // the heads of the chosen hook, below its layer

  const layerNow = () => findHook(about(), store.state.hook)?.layer ?? 0;
  const key = (name, head) => (head === null ? name : `${name} ${head}`);

  // Choosing ---------------------------------------------------------------------------------------------------------

  function choose(name, head = null) {
    const { column } = findHook(about(), name);
    const heads = head === null || column.derived ? {} : { heads: [head] };
    store.set({ hook: name, hooks: [], heads: [], tab: column.derived && column.heads ? "attention" : "hook", ...heads, ...(head !== null && column.derived ? { head } : {}) });
  }

  // A header: all of its hooks, or if they are chosen already, one again.
  function chooseAll(names, head = null) {
    const { column, layer } = findHook(about(), store.state.hook) ?? {};
    const hook = names.find((name) => name === store.state.hook)
      ?? names.find((name) => findHook(about(), name).layer === layer)
      ?? names.find((name) => findHook(about(), name).column === column)
      ?? names.at(-1);
    if (!hook) return;
    const heads = head === null ? [] : [head];
    const again = JSON.stringify([chosenHooks(store.state), store.state.heads]) === JSON.stringify([names, heads]);
    store.set({ hook, hooks: again ? [] : names, heads });
  }

  const served = (column) => rows.map((_, layer) => layer).filter((layer) => !missing(column, layer)).map((layer) => hookName(column, layer));
  const ofLayer = (layer) => [...new Set(lines.filter((line) => !missing(line.column, layer)).map((line) => hookName(line.column, layer)))];

  function press(target) {
    const { row, col } = placeOf(target);
    if (row < 0) chooseAll(served(lines[col].column), lines[col].column.derived ? null : lines[col].head);
    else if (col < 0) chooseAll(ofLayer(row));
    else if (!target.classList.contains("na")) choose(target.dataset.hook, lines[col].head);
  }

  // Building ---------------------------------------------------------------------------------------------------------

  // The components whose heads can be laid out; the one shown is the chosen hook's, else what the heads write.
  const headed = () => about().columns.filter((column) => column.heads && column.name.includes("{i}"));
  function shownColumn(s) {
    const chosen = findHook(s.about, s.state.hook)?.column;
    return chosen?.heads ? chosen : headed().find((column) => column.component === "z") ?? headed()[0];
  }
  const byHeads = (s) => s.state.grid === "heads" && headed().length > 0;

  function build(grid) {
    const rank = (column) => (ORDER.includes(column.component) ? ORDER.indexOf(column.component) : 99);
    const layered = about().columns.filter((column) => column.name.includes("{i}"));
    const shown = byHeads(store) ? shownColumn(store) : null;
    lines = shown
      ? Array.from({ length: shown.heads }, (_, head) => ({ text: String(head), column: shown, head, width: 20, group: KEY_VALUE.includes(shown.component) ? "key-value heads" : "heads" }))
      : GROUPS.flatMap((group) => layered.filter((column) => column.group === group).sort((a, b) => rank(a) - rank(b))).map((column) => ({
          text: SHORT[column.component] ?? column.component, column, head: null, width: WIDTH[column.component] ?? 24, group: column.group }));
    const groups = [...new Set(lines.map((line) => line.group))];
    const first = new Set(groups.map((group) => lines.findIndex((line) => line.group === group)));
    tops = lines.map((line, col) => h("th", { scope: "col", class: "pick", tabindex: "-1", "data-row": "-1", "data-col": col, "aria-label": line.head === null ? `${line.column.component} of every layer` : `head ${line.text} of every layer` }, line.text));
    rows = Array.from({ length: about().layers }, (_, layer) => ({
      th: h("th", { scope: "row", class: "l pick", tabindex: "-1", "data-row": layer, "data-col": "-1", "aria-label": `layer ${layer}` }, String(layer)),
      cells: lines.map((line, col) => {
        const name = hookName(line.column, layer);
        const reason = missing(line.column, layer);
        return h(
          "td",
          {
            role: "gridcell",
            tabindex: "-1",
            class: `c${first.has(col) && col ? " sep" : ""}${reason ? " na" : ""}`,
            "data-row": layer,
            "data-col": col,
            "data-hook": name,
            "data-twin": sameAs(about(), name),
            "aria-label": line.head === null ? name : `${name} head ${line.head}`,
            "aria-disabled": reason ? "true" : null,
          },
          h("div", {}),
        );
      }),
    }));
    const held = table.contains(document.activeElement) ? document.activeElement.dataset : null;
    const total = lines.reduce((sum, line) => sum + line.width, 24);
    table.style.minWidth = shown ? `${24 + 17 * lines.length}px` : "";
    table.replaceChildren(
      shown
        ? h("colgroup", {}, h("col", { style: "width: 24px" }))
        : h("colgroup", {}, ...[24, ...lines.map((line) => line.width)].map((width) => h("col", { style: `width: ${((100 * width) / total).toFixed(2)}%` }))),
      h(
        "thead",
        {},
        h("tr", { "aria-hidden": "true" }, h("th", {}), ...groups.map((group) => h("th", { class: "g", colspan: lines.filter((line) => line.group === group).length }, group))),
        h("tr", {}, h("th", {}, h("span", { class: "sr" }, "layer")), ...tops),
      ),
      h("tbody", {}, ...rows.map(({ th, cells }) => h("tr", {}, th, ...cells))),
    );
    if (held) go(at(Number(held.row ?? layerNow()), within(Number(held.col ?? 0), 0, lines.length)));
    across.select(grid);
    across.el.hidden = !headed().length;
    which.hidden = !shown;
    which.replaceChildren(...headed().map((column) => h("option", { value: column.component }, SHORT[column.component] ?? column.component)));
    if (shown) which.value = shown.component;
    ends.replaceChildren(
      ...about().columns
        .filter((column) => !column.name.includes("{i}"))
        .map((column) => {
          const off = column.component === "logits" || missing(column, null);
          return h("button", { type: "button", class: "chip", "data-hook": column.name, "aria-disabled": off ? "true" : null, onclick: () => off || choose(column.name) }, SHORT[column.component] ?? column.component);
        }),
    );
  }

  // One tab stop, moved by the arrows --------------------------------------------------------------------------------

  const placeOf = (target) => ({ row: Number(target.dataset.row), col: Number(target.dataset.col) });
  const at = (row, col) => (row < 0 ? tops[col] : col < 0 ? rows[row].th : rows[row].cells[col]);
  const within = (value, low, count) => Math.max(low, Math.min(count - 1, value));

  function stop(target) {
    for (const old of table.querySelectorAll('[tabindex="0"]')) if (old !== target) old.setAttribute("tabindex", "-1");
    target?.setAttribute("tabindex", "0");
  }

  function go(target) {
    if (!target) return;
    stop(target);
    if (target.matches("td, th.l")) reveal(target);
    else if (target.matches("button")) reveal(opened.firstChild);
    target.scrollIntoView({ block: "nearest", inline: "nearest" }); // the page follows the keys
    target.focus({ preventScroll: true });
  }

  // Into sight within the grid's own scroll; the notebook stays where it is.
  function reveal(cell, middle = false) {
    const head = table.tHead.offsetHeight;
    const [top, end] = [cell.offsetTop, cell.offsetTop + cell.offsetHeight + (opened.isConnected && opened !== cell.parentElement ? opened.offsetHeight : 0)];
    const room = scroller.clientHeight - head;
    if (room > 0 && (top - head < scroller.scrollTop || end > scroller.scrollTop + scroller.clientHeight))
      scroller.scrollTop = middle ? top - head - room / 3 : top - head < scroller.scrollTop ? top - head : end - scroller.clientHeight;
    if (cell.matches("td.c") && scroller.scrollWidth > scroller.clientWidth) {
      const edge = rows[0].th.offsetWidth;
      if (cell.offsetLeft - edge < scroller.scrollLeft) scroller.scrollLeft = cell.offsetLeft - edge;
      else scroller.scrollLeft = Math.max(scroller.scrollLeft, cell.offsetLeft + cell.offsetWidth - scroller.clientWidth);
    }
  }

  let digits = "";
  let typed = 0;
  // "1 2" goes to layer 12: the digits of a second belong together while there is such a layer.
  function jump(digit, col) {
    const now = performance.now();
    digits = now - typed < 1000 && Number(digits + digit) < rows.length ? digits + digit : digit;
    typed = now;
    if (Number(digits) < rows.length) go(at(Number(digits), col));
  }

  function onKey(event) {
    const target = event.target.closest("[data-row]");
    const button = event.target.closest(".headrow button");
    const control = event.ctrlKey || event.metaKey;
    if ((!target && !button) || event.altKey || (control && !["Home", "End"].includes(event.key))) return;
    const last = lines.length - 1;
    if (button) {
      const all = [...opened.querySelectorAll("button")];
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -99999, End: 99999 }[event.key];
      const { layer, column } = findHook(about(), store.state.hook);
      const col = lines.findIndex((line) => line.column === column);
      if (control) go(event.key === "Home" ? at(0, 0) : at(rows.length - 1, last));
      else if (step) go(all[within(all.indexOf(button) + step, 0, all.length)]);
      else if (event.key === "ArrowUp" || event.key === "PageUp") go(at(layer, col));
      else if (event.key === "ArrowDown" || event.key === "PageDown") go(at(within(layer + 1, 0, rows.length), col));
      else if (/^\d$/.test(event.key)) jump(event.key, col);
      else return;
    } else {
      const { row, col } = placeOf(target);
      const page = Math.max(1, Math.floor((scroller.clientHeight - table.tHead.offsetHeight) / rows[0].th.offsetHeight) - 1);
      const to = { ArrowUp: [row - 1, col], ArrowDown: [row + 1, col], ArrowLeft: [row, col - 1], ArrowRight: [row, col + 1], Home: [row, control ? 0 : Math.min(0, col)], End: [row, last], PageUp: [Math.max(0, row - page), col], PageDown: [row + page, col] }[event.key];
      if (control) go(event.key === "Home" ? at(0, 0) : at(rows.length - 1, last));
      else if ((event.key === "ArrowDown" && opened.previousSibling === target.parentElement) || (event.key === "ArrowUp" && opened.isConnected && opened.nextSibling === target.parentElement))
        go(opened.querySelector('button[aria-pressed="true"]') ?? opened.querySelector("button"));
      else if (to) {
        const [down, right] = [within(to[0], -1, rows.length), within(to[1], -1, lines.length)];
        if (down >= 0 || right >= 0) go(at(down, right));
      } else if (event.key === "Enter" || event.key === " ") press(target);
      else if (/^\d$/.test(event.key)) jump(event.key, col);
      else return;
    }
    event.preventDefault();
    event.stopPropagation();
  }
  table.addEventListener("keydown", onKey);
  table.addEventListener("click", (event) => {
    const target = event.target.closest("[data-row]");
    if (!target) return;
    stop(target);
    target.focus({ preventScroll: true });
    press(target);
  });
  table.addEventListener("focusin", (event) => event.target.matches("[data-row], .headrow button") && stop(event.target));

  // Saying what is pointed at ----------------------------------------------------------------------------------------

  // A hook in a line: its name, shape and norm.
  function line(name, head = null) {
    const { column, layer } = findHook(about(), name);
    const size = sizes.get(key(name, head));
    const reason = missing(column, layer);
    const shape = head !== null && column.shape[1] ? `${column.shape[1]}` : column.derived && column.heads ? "heads \u00d7 query \u00d7 key" : column.shape.join(" \u00d7 ");
    return [
      `${head === null ? "" : ` head ${head}`} ${shape}`,
      size === undefined ? "" : `, norm ${number(size)}`,
      reason ? `, not available: ${reason}` : column.editable ? "" : ", read only",
    ].join("");
  }

  function describe(target = null) {
    const { hook, hooks, heads } = store.state;
    const name = target?.dataset.hook ?? hook;
    readout.replaceChildren();
    if (!findHook(about(), name)) return;
    const many = chosenHooks({ hook, hooks }).length;
    const only = byHeads(store) && findHook(about(), name).column.derived ? store.state.head : byHeads(store) && heads.length === 1 ? heads[0] : null;
    const head = target ? (lines[target.dataset.col]?.head ?? null) : only;
    readout.append(h("code", {}, name), line(name, head), !target && many > 1 ? `; ${many} hooks chosen` : "");
  }

  const pointed = (event) => event.target.closest("[data-hook]");
  el.addEventListener("mouseover", (event) => describe(pointed(event)));
  el.addEventListener("mouseleave", () => describe());
  el.addEventListener("focusin", (event) => {
    const target = pointed(event);
    describe(target);
    spoken.textContent = target ? readout.textContent : event.target.closest(".pick")?.getAttribute("aria-label") ?? "";
  });
  el.addEventListener("focusout", () => describe());
  const beside = { beside: scroller };
  tip(table, (td) => explainHook(about(), td.dataset.hook), { of: "td.c", ...beside });
  tip(table, headerTip, { of: "th.pick", ...beside });
  tip(ends, (chip) => explainHook(about(), chip.dataset.hook, chip.textContent === SHORT.logits && "Shown above as predictions."), { of: ".chip" });

  function headerTip(th) {
    const { row, col } = placeOf(th);
    if (row >= 0) return [h("b", {}, `Layer ${row}`), h("div", {}, byHeads(store) ? "Chooses all heads of this layer." : "Chooses every hook of this layer.")];
    const { column, head } = lines[col];
    const all = head === null ? "Chooses it in every layer." : column.derived ? "Chooses the hook in every layer." : `Chooses head ${head} in every layer.`;
    return explained(column.name.replace("{i}", "*"), { ...column, shape: sizeOf(column) }, all);
  }

  // Marks: chosen, edited, the same place ----------------------------------------------------------------------------

  store.watch(
    (s) => [s.state.grid, byHeads(s) ? shownColumn(s).component : "", s.about],
    (grid) => build(grid),
  );
  store.watch(
    (s) => [s.state.hook, s.state.hooks, s.state.heads, s.state.head, s.state.edits, s.state.grid, s.about],
    (hook, _, heads, head, edits) => {
      const chosen = new Set(chosenHooks(store.state));
      const active = edits.filter((edit) => edit.enabled !== false);
      const edited = (name, head = null) => active.some((edit) => edit.hook === name && (head === null || (edit.head ?? null) === null || [edit.head].flat().includes(head)));
      const ofHead = (line) => line.head === null || (line.column.derived ? line.head === head : !heads.length || heads.includes(line.head));
      for (const item of el.querySelectorAll("[data-hook]")) {
        const name = item.dataset.hook;
        const twin = item.dataset.twin;
        const place = lines[item.dataset.col] ?? { head: null };
        const mine = chosen.has(name) && ofHead(place);
        item.classList.toggle("on", mine && name === hook);
        item.classList.toggle("also", mine && name !== hook);
        item.classList.toggle("ed", edited(name, place.head));
        item.classList.toggle("same", !mine && chosen.has(twin));
        item.classList.toggle("edsame", twin !== undefined && edited(twin));
        item.setAttribute(item.tagName === "TD" ? "aria-selected" : "aria-pressed", String(mine));
      }
      const found = findHook(about(), hook);
      showHeads(found, heads, head, edited);
      if (found && found.layer !== null && rows[found.layer] && !table.contains(document.activeElement)) {
        const col = Math.max(0, lines.findIndex((line) => line.column === found.column && (line.head === null || ofHead(line))));
        stop(at(found.layer, col));
        requestAnimationFrame(() => at(found.layer, col)?.isConnected && reveal(at(found.layer, col), true));
      } else if (!table.querySelector('[tabindex="0"]')) stop(at(0, 0));
      describe();
    },
  );

  // The heads of the chosen hook, in a row of their own below its layer. For an edit they are the heads to change, for
  // a pattern the head to show.
  function showHeads(found, chosen, head, edited) {
    const { column, layer } = found ?? {};
    if (!column?.heads || layer === null || byHeads(store)) {
      const held = opened.contains(document.activeElement);
      opened.remove();
      if (held) go(at(Math.max(0, layer ?? 0), 0)); // a focus that is lost is the notebook's
      return;
    }
    const reads = column.derived;
    if (opened.dataset.heads !== `${column.component} ${column.heads}` || !opened.firstChild) {
      const button = (value, text, label) => h("button", { type: "button", tabindex: "-1", "data-head": value, "aria-label": label }, text);
      opened.dataset.heads = `${column.component} ${column.heads}`;
      opened.replaceChildren(
        h("td", { role: "gridcell" }),
        h(
          "td",
          { colspan: lines.length, role: "gridcell" },
          h("span", { class: "heads" }, h("span", {}, KEY_VALUE.includes(column.component) ? "key-value heads" : "heads"),
            reads ? null : button("all", "all", "all heads"),
            ...Array.from({ length: column.heads }, (_, i) => button(String(i), String(i), `head ${i}`))),
        ),
      );
    }
    for (const item of opened.querySelectorAll("button")) {
      const i = item.dataset.head === "all" ? null : Number(item.dataset.head);
      item.setAttribute("aria-pressed", String(i === null ? chosen.length === 0 : reads ? head === i : chosen.includes(i)));
      item.classList.toggle("ed", i !== null && edited(store.state.hook, i));
    }
    const tr = rows[layer].th.parentElement;
    if (opened.previousSibling !== tr) {
      const held = opened.contains(document.activeElement) ? document.activeElement : null;
      tr.after(opened);
      held?.focus({ preventScroll: true });
    }
  }

  opened.addEventListener("click", (event) => {
    const which = event.target.closest("button")?.dataset.head;
    if (which === undefined) return;
    const i = Number(which);
    const { heads } = store.state;
    if (which === "all") store.set({ heads: [] });
    else if (findHook(about(), store.state.hook).column.derived) store.set({ head: i, tab: "attention" });
    else store.set({ heads: heads.includes(i) ? heads.filter((other) => other !== i) : [...heads, i].sort((a, b) => a - b) });
  });

  // Tints: each component by its own largest layer, as their sizes differ too much for one scale; heads by one. -------

  // The norms of every head of every layer, in the order of the layers that have them.
  function headNorms(s) {
    const column = shownColumn(s);
    const layers = Array.from({ length: s.about.layers }, (_, layer) => layer).filter((layer) => !missing(column, layer));
    if (column.derived) return { error: `heads of ${SHORT[column.component]} are not tinted` };
    if (layers.length * column.heads * column.shape[1] * s.tokens().length > TINTED) return { error: "not tinted: the prompt is long" };
    return layers.length ? s.data({ view: "heads", hook: hookName(column, layers[0]) }) : { error: "this model has none" };
  }

  store.watch(
    (s) => [byHeads(s) ? headNorms(s) : s.data({ view: "grid" }), s.selection(), s.state.grid, byHeads(s) ? shownColumn(s).component : "", s.about],
    (array, positions) => {
      sizes = new Map();
      const many = byHeads(store);
      tinted.hidden = array === null || Boolean(array?.error); // null: there is no run to tint by
      note.textContent = array?.error ?? (many ? "" : "type 12 to jump");
      if (array && !array.error) {
        const names = many ? served(lines[0].column).flatMap((name) => lines.map((line) => key(name, line.head))) : about().grid;
        names.forEach((name, row) => {
          const values = positions.map((p) => array.values[row * array.cols + p]);
          sizes.set(name, values.reduce((sum, value) => sum + value, 0) / values.length);
        });
      }
      const norms = lines.map((line) => rows.map((_, layer) => sizes.get(key(hookName(line.column, layer), line.head))));
      const largest = (values) => Math.max(...values.filter(Number.isFinite), 0);
      const whole = largest(norms.flat());
      lines.forEach((_, col) => {
        const most = many ? whole : largest(norms[col]);
        norms[col].forEach((size, layer) => {
          const share = Number.isFinite(size) && most ? Math.round((size / most) * 62) : 0;
          rows[layer].cells[col].firstChild.style.setProperty("--tint", `${share}%`);
        });
      });
      describe();
    },
  );
}
