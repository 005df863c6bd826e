// The edits, which are the spec: the list of them, the form that adds one at the chosen hook and tokens, and presets.

import { alertLine, h } from "./dom.js";
import { mountForm } from "./editform.js";
import { one } from "./editfields.js";
import { addEdits } from "./edits.js";
import { createRow } from "./editrow.js";
import { mountPresets } from "./presets.js";

const START = "choose tokens and a hook above, then press Add edit, or take a preset. The patched run appears beside the clean one.";

export function mount(el, store, start = START) {
  const list = h("div", { class: "list", role: "list" });
  const empty = h("div", { class: "empty" }, `No edits yet: ${start}`);
  const spoken = h("div", { class: "sr", "aria-live": "polite" });
  const copy = h("button", { type: "button", onclick: () => copyText(JSON.stringify(specOf(store.state.edits), null, 1), copy) }, "Copy as JSON");
  el.append(h("div", { class: "head" }, h("b", {}, "Edits"), h("small", {}, "the spec: applied in order, on the patched run only"), h("span", { class: "sp" }), copy), empty, list);
  const form = mountForm(el, store, add, (message) => failForm(message));
  mountPresets(form, store, add, (message) => failForm(message));
  const failForm = alertLine(el);
  const fail = alertLine(el);
  el.append(spoken);

  const rows = []; // by place; each shows the edit that is there now
  const acts = { change, move, duplicate, remove };
  store.watch(
    (s) => [s.state.edits, s.tokens(), s.tokens("source"), s.state.source, s.result.error, s.about],
    (edits, tokens, sourceTokens, source, error) => {
      const held = list.contains(document.activeElement);
      copy.hidden = list.hidden = !edits.length;
      empty.hidden = Boolean(edits.length);
      const more = edits.length > rows.length;
      while (rows.length > edits.length) rows.pop().remove();
      while (rows.length < edits.length) {
        rows.push(createRow(store, rows.length, acts));
        list.append(rows.at(-1).el);
      }
      const mine = error?.where === "edit";
      rows.forEach((row, i) => row.show(edits[i], edits.length, mine && error.index === i ? error.message : ""));
      fail((mine && error.index === null) || error?.where === "run" ? error.message : null);
      if (more) list.scrollTop = list.scrollHeight; // what is added comes last
      if (held && !list.contains(document.activeElement)) focus(rows.length - 1, "remove");
    },
  );
  // A refusal is over once a second prompt or another hook is there.
  store.watch(
    (s) => [s.state.source, s.state.hook],
    () => failForm(null),
  );

  function say(text) {
    spoken.replaceChildren(h("span", {}, text));
  }

  function add(edits) {
    failForm(null);
    say(addEdits(store, edits));
  }

  function change(i, edit) {
    const kept = Object.fromEntries(Object.entries(edit).filter(([, value]) => value !== null && value !== undefined));
    store.set({ edits: store.state.edits.map((old, other) => (other === i ? kept : old)) });
  }

  // The list in another order or length: what was typed in a row does not pass to the edit that comes there.
  function rearrange(change, text) {
    for (const row of rows) row.forget();
    const edits = [...store.state.edits];
    change(edits);
    store.set({ edits });
    say(text);
  }

  function move(i, step, key) {
    const to = i + step;
    if (to < 0 || to >= rows.length) {
      say(`edit ${i + 1} is ${step < 0 ? "the first" : "the last"} already`);
      return;
    }
    rearrange((edits) => edits.splice(to, 0, ...edits.splice(i, 1)), `edit ${i + 1} moved ${step < 0 ? "up" : "down"}: now edit ${to + 1}`);
    focus(to, key);
  }

  function duplicate(i) {
    rearrange((edits) => edits.splice(i + 1, 0, edits[i]), `edit ${i + 1} duplicated: edit ${i + 2} is its copy`);
    reveal(rows[i + 1].el);
  }

  function remove(i) {
    rearrange((edits) => edits.splice(i, 1), `edit ${i + 1} removed`);
  }

  // In the list's own scroll; the notebook stays where it is.
  function focus(i, key) {
    const to = rows[i]?.el.querySelector(`[data-key="${key}"]`) ?? form.querySelector("select");
    to.focus({ preventScroll: true });
    if (rows[i]) reveal(rows[i].el);
  }

  function reveal(row) {
    const top = row.offsetTop - list.offsetTop;
    const over = top + row.offsetHeight - list.clientHeight;
    list.scrollTop = Math.min(top, Math.max(list.scrollTop, over));
  }
}

// The edits that are switched on, as session.run takes them.
export function specOf(edits) {
  const spec = {};
  for (const { hook, enabled, ...edit } of edits) if (enabled !== false) (spec[hook] ??= []).push(edit);
  return Object.fromEntries(Object.entries(spec).map(([hook, list]) => [hook, one(list)]));
}

async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // No clipboard on an insecure page: show the text to copy by hand.
    window.prompt("The spec as JSON:", text);
  }
  setTimeout(() => (button.textContent = label), 1500);
}
