// Tooltips: shown on hover, keyboard focus and touch, one at a time; Escape, a click or a look elsewhere closes them.

import { h } from "./dom.js";
import { zoomOf } from "./screen.js";

const WAIT = 450; // ms before a tip comes up under a resting pointer
const STAY = 150; // ms it stays, for the way from the element to the tip
const GAP = 8;

let shown = null; // {anchor, beside, box, close}
let timer = null;
let count = 0;

// Gives `element` a tip, or with `of`, a selector, each element inside it that matches. `content` is text, a node or a
// list of them, or a function of the element that returns it; nothing: no tip. With `beside` the tip stands beside that
// larger element rather than over the neighbours of the small one.
export function tip(element, content, { of = null, beside = null } = {}) {
  const at = (event) => (of ? event.target.closest(of) : element);
  const show = (anchor) => open(anchor, typeof content === "function" ? content(anchor) : content, beside ?? anchor);
  const later = (wait, what) => {
    clearTimeout(timer);
    timer = setTimeout(what, wait);
  };
  element.addEventListener("pointerover", (event) => {
    const anchor = at(event);
    if (event.pointerType === "touch" || !anchor) return;
    if (anchor === shown?.anchor) clearTimeout(timer);
    else later(shown ? STAY : WAIT, () => anchor.isConnected && show(anchor));
  });
  element.addEventListener("pointerout", (event) => {
    const anchor = at(event);
    if (anchor && !anchor.contains(event.relatedTarget) && event.pointerType !== "touch") later(STAY, close);
  });
  element.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && at(event) && show(at(event)));
  element.addEventListener("focusout", close);
  element.addEventListener("pointerup", (event) => event.pointerType === "touch" && at(event) && show(at(event)));
  element.addEventListener("pointerdown", close); // what is being used need not be explained
  element.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === " ") && close());
}

// A word that has a tip, in the tab order so that keys reach it.
export function term(text, content) {
  const el = h("button", { type: "button", class: "term" }, text);
  tip(el, content);
  return el;
}

// What a table of words says: a name, one sentence, then shape, formula and place; `more` lines follow.
export function explained(name, { about, shape, formula, place }, ...more) {
  const rows = [["shape", shape], ["formula", formula], ["where", place]].filter(([, text]) => text);
  return [
    h("b", {}, name),
    h("div", {}, about),
    h("dl", {}, ...rows.flatMap(([label, text]) => [h("dt", {}, label), h("dd", { class: label }, text)])),
    ...more.filter(Boolean).map((text) => h("div", { class: "more" }, text)),
  ];
}

function open(anchor, content, beside) {
  close();
  const root = anchor.closest(".axp");
  if (!content || !root) return;
  const id = `axp-tip-${++count}`;
  // A popover stands above everything, outside the page's own scrolling and clipping.
  const box = h("div", { class: "tip", role: "tooltip", id, popover: "manual" }, ...[content].flat());
  root.append(box);
  box.showPopover?.();
  const listeners = [
    ["keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation(); // this Escape is ours
      event.preventDefault();
      close();
    }],
    ["scroll", place],
    ["pointerover", (event) => {
      if (box.contains(event.target)) clearTimeout(timer);
      else if (!anchor.isConnected) close();
    }],
    ["pointerout", (event) => {
      if (!box.contains(event.target) || box.contains(event.relatedTarget) || anchor.contains(event.relatedTarget)) return;
      clearTimeout(timer);
      timer = setTimeout(close, STAY);
    }],
    ["pointerdown", (event) => !box.contains(event.target) && close()],
  ];
  for (const [name, heard] of listeners) document.addEventListener(name, heard, true);
  if (!anchor.hasAttribute("aria-describedby")) anchor.setAttribute("aria-describedby", id);
  shown = { anchor, beside, box, close() {
    for (const [name, heard] of listeners) document.removeEventListener(name, heard, true);
    if (anchor.getAttribute("aria-describedby") === id) anchor.removeAttribute("aria-describedby");
    box.remove();
  } };
  place();
}

function close() {
  clearTimeout(timer);
  shown?.close();
  shown = null;
}

// The place that covers least: never the element itself or what has the focus, then as little as may be of the rest.
function place() {
  if (!shown) return;
  const { anchor, beside, box } = shown;
  const root = anchor.closest(".axp")?.getBoundingClientRect();
  const own = anchor.getBoundingClientRect();
  if (!root || !own.width || own.bottom < 0 || own.top > innerHeight) return close();
  const wide = beside.getBoundingClientRect();
  const active = document.activeElement;
  const focus = active && active !== document.body && !active.contains(anchor) ? active.getBoundingClientRect() : own;
  const { width, height } = box.getBoundingClientRect();
  const left = Math.max(root.left, 0);
  const right = Math.min(root.right, innerWidth) - width;
  const spot = (x, y) => [Math.max(left, Math.min(right, x)), Math.max(4, Math.min(innerHeight - height - 4, y))];
  const covers = ([x, y], rect) => Math.max(0, Math.min(x + width, rect.right) - Math.max(x, rect.left)) * Math.max(0, Math.min(y + height, rect.bottom) - Math.max(y, rect.top));
  const around = (rect) => [[own.left, rect.bottom + GAP], [own.left, rect.top - GAP - height], [rect.right + GAP, own.top], [rect.left - GAP - width, own.top]];
  const sides = around(wide);
  const spots = [...(beside === anchor ? [] : sides.slice(2)), ...(beside === anchor ? [] : sides.slice(0, 2)), ...around(own)].map((xy) => spot(...xy));
  const cost = (xy) => 1e6 * covers(xy, own) + 1e3 * covers(xy, focus) + covers(xy, wide);
  const [x, y] = spots.reduce((best, xy) => (cost(xy) < cost(best) ? xy : best));
  box.style.left = `${x / zoomOf(box)}px`;
  box.style.top = `${y / zoomOf(box)}px`;
}
