// The page of a SpecEditor: where the next edit goes, and the list of edits.

import { alertLine, h } from "./dom.js";
import { hookName } from "./store.js";
import { mount as mountSpec } from "./spec.js";
import { textField } from "./tokens.js";
import { view } from "./views.js";

const START = "choose a hook, then press Add edit, or take a preset.";
let lists = 0;

function mountPlace(el, store) {
  const list = h("datalist", { id: `axp-hooks-${++lists}` });
  const input = h("input", { type: "text", class: "hookin", list: list.id, "aria-label": "Hook", title: "The hook of the next edit, such as blocks.0.hook_out", autocomplete: "off", spellcheck: "false" });
  el.append(h("label", {}, "Hook ", input), list, h("label", { class: "from" }, "Source ", textField(store, "source", "Source", "A second prompt to patch from (optional)")));
  const fail = alertLine(el);
  let names = [];
  function commit() {
    if (input.value === store.state.hook) return fail(null);
    if (!names.includes(input.value)) return fail(`There is no hook \u201c${input.value}\u201d in this model to edit: take one of the list that opens here.`);
    fail(null);
    store.set({ hook: input.value, heads: [] });
  }
  input.addEventListener("change", commit);
  store.watch(
    (s) => [s.about],
    (about) => {
      names = about.columns
        .filter((column) => column.editable)
        .flatMap((column) => (column.name.includes("{i}") ? Array.from({ length: about.layers }, (_, layer) => layer).filter((layer) => !(layer in column.missing)).map((layer) => hookName(column, layer)) : column.missing.null ? [] : [column.name]));
      list.replaceChildren(...names.map((name) => h("option", { value: name })));
    },
  );
  store.watch(
    (s) => [s.state.hook],
    (hook) => {
      input.value = hook;
      fail(null);
    },
  );
}

export default view({
  name: "edits",
  label: "Edits",
  traits: ["edits", "hook", "heads", "positions", "source"],
  meant: true,
  mount: (el, store) => {
    const place = h("div", { class: "place" });
    el.append(place);
    mountPlace(place, store);
    mountSpec(el, store, START);
  },
});
