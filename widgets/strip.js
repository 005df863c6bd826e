// One strip of tokens: a list to choose from by mouse, touch and keys. It makes its nodes once and lays them out in lines
// of its own, so that thousands of tokens cost what the lines in sight cost; later only nodes whose marks change are touched.

import { h, tokenNodes, visible } from "./dom.js";
import { spoken } from "./positions.js";

const KINDS = { bos: "beginning of sequence", special: "special token" };
const PAGE = 4; // lines in sight
const GAP = 2;
const AROUND = 12; // padding and border of a token

// onChoose(positions) is asked for another choice; onMove(position) follows each gesture, chosen or not.
export function createStrip(label, onChoose, onMove) {
  const el = h("div", { class: "strip", role: "listbox", "aria-multiselectable": "true", "aria-label": label, "aria-orientation": "horizontal" });
  const ruler = h("div", {}); // as wide as the strip, and its height never changes
  let tokens = [];
  let nodes = [];
  let beside = []; // the tokens of the other prompt
  let lines = []; // the elements
  let place = []; // of each token: its line, and its middle
  let laid = 0; // the width that the lines were made for
  let chosen = new Set();
  let marked = [];
  let current = 0; // the strip's one tab stop
  let anchor = 0; // where Shift extends from
  let aim = null; // {move, choose}: while something is carried to a token, gestures go there
  const flags = {}; // class -> the one token that has it

  function show(now) {
    tokens = now;
    nodes = tokens.map(([, text, kind], p) =>
      h(
        "button",
        { type: "button", role: "option", tabindex: "-1", "aria-selected": "false", "data-p": p, class: `tok ${kind}` },
        h("sup", {}, number(p, kind)),
        h("bdi", {}, ...tokenNodes(text)),
      ),
    );
    chosen = new Set();
    marked = [];
    anchor = Math.min(anchor, Math.max(0, nodes.length - 1));
    move(Math.min(current, Math.max(0, nodes.length - 1)));
    laid = 0;
  }

  // Each token beside the one of the other prompt: marked where they differ.
  function compare(others, other) {
    beside = others;
    let count = 0;
    nodes.forEach((node, p) => {
      const [id, text, kind] = tokens[p];
      const there = others[p];
      const differs = others.length > 0 && there?.[0] !== id;
      if (differs) count++;
      const name = [`token ${p}`, KINDS[kind], differs && (there ? `the ${other} has ${visible(there[1])} here` : `the ${other} ends before`)].filter(Boolean).join(", ");
      node.classList.toggle("diff", differs);
      node.title = typeof id === "number" ? `${name}, id ${id}` : name; // a token given as text has no number
      node.setAttribute("aria-label", `${spoken(text)}, ${name}`);
    });
    laid = 0;
    lay();
    return count;
  }

  // Each token is as wide as the wider of the two prompts' there, so that columns stand under each other on every line.
  function lay() {
    const room = ruler.offsetWidth - 18; // a scroll bar, whether there is one or not: both strips break alike
    if (room <= 0 || room === laid) return; // a notebook may draw it detached first, without a size
    laid = room;
    const { fontFamily, fontSize } = getComputedStyle(el);
    const width = ([, text, kind] = [], p) => (kind === undefined ? 0 : Math.max(measure(fontFamily, fontSize, visible(text)), measure("system-ui, sans-serif", `${parseFloat(fontSize) * 0.7}px`, number(p, kind))));
    const rows = [];
    let x = Infinity;
    place = nodes.map((node, p) => {
      const full = Math.ceil(Math.max(width(tokens[p], p), width(beside[p], p))) + AROUND;
      const wide = Math.min(room, Math.max(24, full));
      node.classList.toggle("cut", full > room);
      if (x + wide > room) {
        rows.push([]);
        x = 0;
      }
      rows.at(-1).push(node);
      node.style.width = `${wide}px`;
      x += wide + GAP;
      return { line: rows.length - 1, middle: x - GAP - wide / 2 };
    });
    const held = el.contains(document.activeElement);
    lines = rows.map((row) => h("div", { class: "ln", role: "presentation" }, ...row));
    el.replaceChildren(...lines);
    el.hidden = !nodes.length;
    if (held) nodes[current]?.focus({ preventScroll: true });
    reveal(seen());
  }
  new ResizeObserver(lay).observe(ruler);

  function select(positions) {
    const next = new Set(positions);
    for (const p of chosen) if (!next.has(p)) set(p, false);
    for (const p of next) if (!chosen.has(p)) set(p, true);
    chosen = next;
    if (positions.length && !next.has(current) && !el.contains(document.activeElement)) {
      anchor = positions[0];
      move(positions.at(-1));
    }
    reveal(seen());
  }

  // What stays in view: the token of the last gesture, else the first chosen one.
  const seen = () => (chosen.has(current) || !chosen.size ? current : Math.min(...chosen));

  function set(p, on) {
    nodes[p].setAttribute("aria-selected", String(on));
    nodes[p].classList.toggle("sel", on);
  }

  // What was found: [from, to] each, the one stepped to apart.
  function mark(places, at) {
    for (const node of marked) node.classList.remove("hit", "now");
    marked = [];
    places.forEach(([from, to], i) => {
      for (const node of nodes.slice(from, to + 1)) {
        node.classList.add("hit");
        if (i === at) node.classList.add("now");
        marked.push(node);
      }
    });
    if (places[at]) {
      move(places[at][0]);
      reveal(current);
    }
  }

  function flag(name, p) {
    nodes[flags[name]]?.classList.remove(name);
    flags[name] = p;
    nodes[p]?.classList.add(name);
  }

  function move(p) {
    nodes[current]?.setAttribute("tabindex", "-1");
    current = p;
    nodes[current]?.setAttribute("tabindex", "0");
  }

  // Scrolls within the strip only: the notebook must not move.
  function reveal(p) {
    const line = lines[place[p]?.line];
    if (!line || lines.length <= PAGE) return;
    const [top, end] = [line.offsetTop, line.offsetTop + line.offsetHeight];
    if (top < el.scrollTop) el.scrollTop = top;
    else if (end > el.scrollTop + el.clientHeight) el.scrollTop = end - el.clientHeight;
  }

  function focus(p) {
    move(p);
    nodes[p].focus({ preventScroll: true });
    reveal(p);
    nodes[p].scrollIntoView({ block: "nearest" }); // the page too, where the strip is partly out of sight
  }

  function choose(p, { shiftKey = false, toggle = false } = {}) {
    if (aim) {
      move(p);
      aim.choose(p);
      return;
    }
    let next = [p];
    if (shiftKey) {
      const from = Math.min(anchor, p);
      next = Array.from({ length: Math.abs(p - anchor) + 1 }, (_, i) => from + i);
    } else {
      anchor = p;
      if (toggle) next = (chosen.has(p) ? [...chosen].filter((q) => q !== p) : [...chosen, p]).sort((a, b) => a - b);
    }
    move(p);
    onChoose(next);
    onMove(p);
  }

  // The token nearest to the same column, some lines further; the first or last one where there are no more lines.
  function across(by) {
    const { line, middle } = place[current];
    if (!lines[line + by]) return by > 0 ? nodes.length - 1 : 0;
    const off = (p) => Math.abs(place[p].middle - middle);
    const there = place.flatMap((at, p) => (at.line === line + by ? [p] : []));
    return there.reduce((best, p) => (off(p) < off(best) ? p : best));
  }

  const WAYS = {
    ArrowLeft: () => Math.max(0, current - 1),
    ArrowRight: () => Math.min(nodes.length - 1, current + 1),
    ArrowUp: () => across(-1),
    ArrowDown: () => across(1),
    PageUp: () => across(-PAGE),
    PageDown: () => across(PAGE),
    Home: () => 0,
    End: () => nodes.length - 1,
  };

  el.addEventListener("click", (event) => {
    const node = event.target.closest(".tok");
    if (node) choose(Number(node.dataset.p), { shiftKey: event.shiftKey, toggle: event.ctrlKey || event.metaKey });
  });
  el.addEventListener("keydown", (event) => {
    const { key, shiftKey } = event;
    const free = event.ctrlKey || event.metaKey; // moves without choosing
    if (event.altKey || !nodes.length) return;
    if (WAYS[key]) {
      const to = WAYS[key]();
      if (free || aim) {
        move(to);
        (aim?.move ?? onMove)(to);
      } else choose(to, { shiftKey });
      focus(to);
    } else if (key === " ") choose(current, { toggle: true });
    else if (key === "Enter" && !free) choose(current);
    else if (key === "a" && free) {
      onChoose(nodes.map((_, p) => p));
      onMove(current);
    } else return;
    event.preventDefault();
    event.stopPropagation(); // with Ctrl they are the notebook's too
  });

  return {
    el: h("div", {}, ruler, el),
    list: el,
    show,
    compare,
    select,
    mark,
    flag,
    focus,
    aim: (taker) => (aim = taker),
    get current() {
      return current;
    },
    name: (p) => nodes[p]?.getAttribute("aria-label") ?? "",
  };
}

const number = (p, kind) => (kind ? `${p} ${kind}` : String(p));

const widths = new Map(); // of texts by font: asking the page for thousands of them would lay it out
let pen;

function measure(family, size, text) {
  const key = `${size} ${family} ${text}`;
  if (!widths.has(key)) {
    pen ??= document.createElement("canvas").getContext("2d");
    pen.font = `${size} ${family}`;
    if (widths.size > 20000) widths.clear();
    widths.set(key, pen.measureText(text).width);
  }
  return widths.get(key);
}

// Two strips with the same lines scroll as one.
export function scrollTogether(one, two) {
  const set = new Map(); // where this put a strip: its event is no gesture
  for (const [from, to] of [[one, two], [two, one]])
    from.addEventListener("scroll", () => {
      if (set.get(from) === from.scrollTop) return;
      set.delete(from);
      to.scrollTop = from.scrollTop;
      set.set(to, to.scrollTop);
    });
}
