// A button that opens a menu: by mouse, touch and keys, and closed by whatever leads away from it.

import { h } from "./dom.js";

// `items` returns, at each opening, what the menu holds: {name, about, off, take}; `off`: about says why it cannot be taken.
export function createMenu(text, items) {
  const menu = h("div", { class: "menu", role: "menu", "aria-label": text, hidden: true });
  const button = h("button", { type: "button", "aria-haspopup": "menu", "aria-expanded": "false", onclick: () => (menu.hidden ? open() : shut()) }, text);
  const box = h("span", { class: "menubox" }, button, menu);

  function open() {
    menu.replaceChildren(
      ...items().map(({ name, about, off, take }) =>
        h("div", { role: "menuitem", tabindex: "-1", "aria-disabled": off ? "true" : null, onclick: () => off || close(take) }, h("b", {}, name), h("small", {}, about)),
      ),
    );
    menu.hidden = false;
    button.setAttribute("aria-expanded", "true");
    menu.style.left = `${Math.max(0, Math.min(box.offsetLeft, menu.offsetParent.clientWidth - menu.offsetWidth))}px`;
    menu.firstChild.focus({ preventScroll: true });
  }

  function shut() {
    menu.hidden = true;
    button.setAttribute("aria-expanded", "false");
  }

  function close(then) {
    button.focus({ preventScroll: true });
    shut();
    then?.();
  }

  menu.addEventListener("mousedown", (event) => event.preventDefault()); // the focus stays until the click
  box.addEventListener("focusout", (event) => {
    if (!box.contains(event.relatedTarget)) shut();
  });
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (menu.hidden) {
      if (event.key !== "ArrowDown") return;
      open();
    } else if (event.key === "Escape") {
      event.stopPropagation(); // it closes the menu, and nothing of the notebook's
      close();
    } else {
      const all = [...menu.children];
      const now = all.indexOf(document.activeElement);
      const to = { ArrowDown: now + 1, ArrowUp: now - 1, Home: 0, End: -1 }[event.key];
      if (to !== undefined) all.at(to % all.length).focus({ preventScroll: true });
      else if (now >= 0 && (event.key === "Enter" || event.key === " ")) all[now].click();
      else return;
    }
    event.preventDefault();
  });
  return box;
}
