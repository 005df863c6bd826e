// The attention view: a head's pattern or scores, query by key; the heads to choose from; lines from one token.

import { h, number, visible } from "./dom.js";
import { ramp } from "./scale.js";
import { watchTheme } from "./screen.js";
import { findHook, hookName } from "./store.js";

// The hook whose heads are shown: the chosen one if it is a pattern or scores, else the pattern of the chosen layer.
export function attentionHook(store) {
  const found = findHook(store.about, store.state.hook);
  if (found && ["pattern", "scores"].includes(found.column.component)) return store.state.hook;
  const pattern = store.about.columns.find((column) => column.component === "pattern");
  return pattern ? hookName(pattern, found?.layer ?? 0) : null;
}

export function shownHead(store) {
  return Math.min(store.state.head, headCount(store) - 1);
}

function headCount(store) {
  return store.about.columns.find((column) => column.component === "pattern")?.heads ?? 1;
}

export function asLines(store) {
  return store.state.tab === "attention" && store.state.lines;
}

export function attentionPlot(store, array) {
  const hook = attentionHook(store);
  const { layer, column } = findHook(store.about, hook);
  const head = shownHead(store);
  const tokens = store.tokens();
  const scores = column.component === "scores";
  const change = store.result.edited && store.state.of === "change"; // without an edit there is one run
  const name = (p) => visible(tokens[p]?.[1] ?? "");
  const place = layer === null ? "" : `, layer ${layer}`;
  return {
    values: causal(store) ? masked(array) : array.values,
    rows: array.rows,
    cols: array.cols,
    masked: causal(store),
    positions: "both",
    flag: false,
    diverging: scores || change,
    tokens,
    unit: `${change ? "change of the " : ""}attention ${scores ? "score" : "weight"}${place}, head ${head}: rows look at columns`,
    label: `Attention of head ${head}${place.replace(",", " in")}`,
    corner: "looks at",
    rowLabel: name,
    colLabel: name,
    selected: store.selection().map((row) => ({ row })),
    say: (q, k) => `${q} ${name(q)} looks at ${k} ${name(k)}`,
  };
}

// Whether no token looks at later ones: so in every model that is served here, but not in any pattern from elsewhere.
function causal(store) {
  return store.about.causal ?? true;
}

// What lies in the future of a token is masked: apart from a zero. (What lies outside a layer's window comes masked, as
// -Infinity: only the kernel knows it.) Kept with its array, so that it is made once.
const maskedOf = new WeakMap();

function masked(array) {
  if (!maskedOf.has(array)) {
    const values = Float32Array.from(array.values);
    for (let q = 0; q < array.rows; q++) values.fill(-Infinity, q * array.cols + q + 1, (q + 1) * array.cols);
    maskedOf.set(array, values);
  }
  return maskedOf.get(array);
}

// All heads of the layer, small: click one, or choose with the arrows.
export function mountHeads(el, store) {
  const row = h("div", { class: "heads", role: "group", "aria-label": "Attention head" });
  el.append(row);
  let buttons = [];
  let drawn = null; // the numbers of the small ones
  let waiting = false; // they have come before the page
  function draw() {
    waiting = Boolean(drawn) && !row.isConnected; // without a page there are no colours
    if (drawn && !waiting) drawHeads(row, buttons, drawn, causal(store));
  }
  const sized = new ResizeObserver(() => waiting && draw());
  sized.observe(row);
  const choose = (head) => store.set({ head });
  row.addEventListener("keydown", (event) => {
    const at = buttons.indexOf(event.target);
    const last = buttons.length - 1;
    const to = { ArrowLeft: at - 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowDown: at + 1, Home: 0, End: last }[event.key];
    if (at < 0 || to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(last, to));
    choose(next);
    buttons[next].focus({ preventScroll: true });
  });
  const ask = (s) => ({ view: "attention", of: s.result.edited ? s.state.of : "clean", hook: attentionHook(s) });
  store.watch(
    // The small ones come from the capture that the large one made: asked for once that is there.
    (s) => [s.about, s.state.tab === "attention", shownHead(s), s.state.tab === "attention" && s.data({ ...ask(s), head: shownHead(s) })?.rows ? s.data({ ...ask(s), head: -1 }) : null],
    (about, shown, chosen, small) => {
      row.hidden = !shown;
      const count = headCount(store);
      if (buttons.length !== count) {
        buttons = Array.from({ length: count }, (_, head) => h("button", { type: "button", "aria-label": `head ${head}`, onclick: () => choose(head) }, h("canvas", { "aria-hidden": "true" }), h("span", {}, String(head))));
        row.classList.toggle("many", count > 16);
        row.replaceChildren(...buttons);
      }
      buttons.forEach((button, head) => {
        button.setAttribute("aria-pressed", String(head === chosen));
        button.setAttribute("tabindex", head === chosen ? "0" : "-1");
      });
      drawn = shown && small?.values ? small : null;
      draw();
    },
  );
  const unthemed = watchTheme(draw);
  return () => {
    sized.disconnect();
    unthemed();
  };
}

// `small`: the heads below each other, each a square.
function drawHeads(row, buttons, small, causal) {
  const size = small.cols;
  const css = (name) => getComputedStyle(row).getPropertyValue(name).trim();
  let [low, high] = [0, 0];
  for (const value of small.values) {
    if (value < low && value !== -Infinity) low = value;
    if (value > high) high = value;
  }
  const top = Math.max(high, -low) || 1;
  const colours = ramp(low < 0 ? [css("--neg"), css("--mid"), css("--pos")] : [css("--mid"), css("--seq1"), css("--seq2")]);
  buttons.forEach((button, head) => {
    const canvas = button.firstChild;
    canvas.width = canvas.height = size;
    const image = new ImageData(size, size);
    for (let q = 0; q < size; q++)
      for (let k = 0; k < (causal ? q + 1 : size); k++) {
        const value = small.values[(head * size + q) * size + k];
        if (value === -Infinity) continue;
        const share = low < 0 ? (value / top + 1) / 2 : value / top;
        const colour = 4 * Math.max(0, Math.min(255, Math.round(share * 255)));
        image.data.set(colours.subarray(colour, colour + 4), 4 * (q * size + k));
      }
    canvas.getContext("2d").putImageData(image, 0, 0);
  });
}

const ROW = 19; // pixels a token takes in the two lists
const SVG = "http://www.w3.org/2000/svg";

// Which tokens one token looks at: a list of tokens to choose from, a list of what it sees with the weights, and lines.
export function createLines(el, store) {
  const from = h("ul", { role: "listbox", "aria-label": "The token that looks" });
  const to = h("ul", { class: "seen", "aria-label": "What it looks at" });
  const web = document.createElementNS(SVG, "svg");
  web.setAttribute("aria-hidden", "true");
  web.setAttribute("preserveAspectRatio", "none");
  const scroller = h("div", { class: "lines" }, from, web, to);
  el.append(scroller);
  let names = "";
  let chosen = 0;

  function choose(position) {
    store.set({ positions: [position] });
  }
  from.addEventListener("click", (event) => {
    const item = event.target.closest("li");
    if (item) choose([...from.children].indexOf(item));
  });
  from.addEventListener("keydown", (event) => {
    const last = from.childElementCount - 1;
    const next = { ArrowUp: chosen - 1, ArrowDown: chosen + 1, Home: 0, End: last, PageUp: chosen - 10, PageDown: chosen + 10 }[event.key];
    if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(last, next)));
    from.children[chosen].focus({ preventScroll: true });
  });

  function build(plot) {
    const line = (p, props, ...more) => h("li", props, h("code", {}, plot.rowLabel(p)), h("span", { class: "dim" }, String(p)), ...more);
    const all = Array.from({ length: plot.rows }, (_, p) => p);
    from.replaceChildren(...all.map((p) => line(p, { role: "option", tabindex: "-1" })));
    to.replaceChildren(...all.map((p) => line(p, {}, h("b", { class: "num" }))));
    web.setAttribute("viewBox", `0 0 100 ${plot.rows * ROW}`);
    web.style.height = `${plot.rows * ROW}px`;
  }

  function show(plot) {
    const now = JSON.stringify([plot.rows, plot.tokens]); // the tokens of a new prompt come before its numbers
    if (now !== names) build(plot);
    names = now;
    from.children[chosen]?.setAttribute("tabindex", "-1");
    chosen = Math.min(store.selection().at(-1) ?? 0, plot.rows - 1);
    const weights = plot.values.subarray(chosen * plot.cols, (chosen + 1) * plot.cols);
    const top = weights.reduce((most, w) => (Number.isFinite(w) ? Math.max(most, Math.abs(w)) : most), 0) || 1;
    [...from.children].forEach((item, p) => {
      item.setAttribute("aria-selected", String(p === chosen));
      item.removeAttribute("aria-label");
    });
    from.children[chosen].setAttribute("tabindex", "0");
    const seen = [...weights.keys()].filter((k) => weights[k] !== -Infinity);
    const best = [...seen].sort((a, b) => Math.abs(weights[b]) - Math.abs(weights[a])).slice(0, 3);
    from.children[chosen].setAttribute("aria-label", `${chosen} ${plot.rowLabel(chosen)} looks most at ${best.map((k) => `${k} ${plot.colLabel(k)} ${number(weights[k])}`).join(", ")}`);
    [...to.children].forEach((item, k) => {
      const hidden = weights[k] === -Infinity;
      item.classList.toggle("masked", hidden);
      item.lastChild.textContent = hidden ? "masked" : short(weights[k]);
      item.style.setProperty("--share", hidden ? "0%" : `${(100 * Math.abs(weights[k])) / top}%`);
    });
    web.replaceChildren(
      ...seen
        .filter((k) => Math.abs(weights[k]) >= 0.005 * top)
        .map((k) => {
          const line = document.createElementNS(SVG, "path");
          const share = Math.abs(weights[k]) / top;
          const [a, b] = [(chosen + 0.5) * ROW, (k + 0.5) * ROW];
          line.setAttribute("d", `M0 ${a} C50 ${a} 50 ${b} 100 ${b}`);
          line.setAttribute("stroke-width", String(0.7 + 6 * share));
          line.setAttribute("opacity", String(0.25 + 0.7 * share));
          if (weights[k] < 0) line.setAttribute("class", "below");
          return line;
        }),
    );
    const y = chosen * ROW;
    if (scroller.clientHeight && (y < scroller.scrollTop || y + ROW > scroller.scrollTop + scroller.clientHeight)) scroller.scrollTop = y - scroller.clientHeight / 2;
  }

  return {
    show,
    clear() {
      names = "";
      for (const part of [from, to, web]) part.replaceChildren();
    },
  };
}

// Weights line up: three places, and a sign only where there is one.
function short(value) {
  return Number.isFinite(value) ? value.toFixed(3).replace("-", "\u2212") : number(value);
}
