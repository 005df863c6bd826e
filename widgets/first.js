// The first minute: a few steps to try, checked off as they are done, until they are dismissed for good.

import { h } from "./dom.js";

const KEY = "activation-explorer.first-steps";
const STEPS = [
  ["Click a token", (now, start) => String(now.state.positions) !== String(start.positions)],
  ["Choose a hook", (now, start) => now.state.hook !== start.hook],
  ["Presets, then Zero this", (now) => now.state.edits.length > 0],
  ["Undo", (now) => Boolean(now.steps.redo)],
];

export function mountFirst(el, store) {
  if (dismissed()) {
    el.hidden = true;
    return;
  }
  const start = store.state;
  const items = STEPS.map(([text], i) => h("li", {}, h("span", { class: "no", "aria-hidden": "true" }, String(i + 1)), text, h("span", { class: "sr" })));
  const close = h("button", { type: "button", title: "Hide these steps for good", onclick: dismiss }, "Dismiss");
  el.append(h("b", {}, "Try this"), h("ol", { role: "list", "aria-label": "Try this" }, ...items), h("span", { class: "sp" }), close);

  function dismiss() {
    remember();
    el.closest(".axp").focus({ preventScroll: true }); // a focus that is lost is the notebook's
    el.hidden = true;
  }

  const done = new Set(); // what was done stays so
  store.watch(
    (s) => [s.state.positions, s.state.hook, s.state.edits, s.steps.redo],
    () =>
      STEPS.forEach(([, is], i) => {
        if (done.has(i) || !is(store, start)) return;
        done.add(i);
        items[i].classList.add("done");
        items[i].firstChild.textContent = "\u2713";
        items[i].lastChild.textContent = ", done";
      }),
  );
}

// For good, as far as the browser keeps things; else for as long as its page is there, also for another run of the cell.
function dismissed() {
  try {
    return Boolean(window[KEY] || localStorage.getItem(KEY));
  } catch {
    return false;
  }
}

function remember() {
  window[KEY] = true;
  try {
    localStorage.setItem(KEY, "dismissed");
  } catch {
    // none here
  }
}
