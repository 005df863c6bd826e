// The page on its screen: large for a projector, over the whole window; and what drawings have to know of their screen.

import { h } from "./dom.js";

// Two buttons. Large is kept in the state; the whole window is this view's alone, for a window can hold one.
export function mountScreen(el, store, root) {
  const button = (text, title, onclick) => h("button", { type: "button", "aria-pressed": "false", title, onclick }, text);
  const large = button("Projector", "Text and marks one and a half times as large", () => store.set({ projector: !store.state.projector }));
  const wide = button("Full width", "The workbench over the whole window; Escape leaves", () => fill(!root.classList.contains("wide")));
  el.append(h("span", { class: "steps" }, large, wide));

  // As a popover it lies above everything, whatever the notebook's cells clip; the cell keeps its height meanwhile.
  function fill(on) {
    root.parentElement.style.minHeight = on ? `${root.parentElement.getBoundingClientRect().height}px` : "";
    if (on) root.setAttribute("popover", "manual");
    root.classList.toggle("wide", on);
    if (on) root.showPopover?.();
    else root.removeAttribute("popover");
    wide.setAttribute("aria-pressed", String(on));
    wide.focus({ preventScroll: true });
  }
  root.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || !root.classList.contains("wide")) return;
    event.stopPropagation(); // it has closed something, and shall not also leave the cell
    fill(false);
  });
  store.watch(
    (s) => [s.state.projector],
    (on) => {
      root.classList.toggle("projector", on);
      large.setAttribute("aria-pressed", String(on));
    },
  );
}

// Pixels of the page for one of an element's own: not 1 in a page made large.
export function zoomOf(el) {
  return el.currentCSSZoom ?? 1;
}

// Calls draw() when the front end's theme has changed, in the next frame: until then the inherited colours may still be
// the old ones. Returns what ends it.
export function watchTheme(draw) {
  const observer = new MutationObserver(() => requestAnimationFrame(draw));
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"] });
  return () => observer.disconnect();
}
