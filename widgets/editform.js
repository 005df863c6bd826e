// The form that adds an edit at the chosen hook and tokens.

import { h } from "./dom.js";
import { AMOUNT, amountOf, NO_SOURCE, one, OPS, positionsOf, Refused } from "./editfields.js";
import { written } from "./positions.js";
import { findHook } from "./store.js";

// Why nothing can be edited at a hook; empty where it can.
export function closed(about, name) {
  const { column, layer } = findHook(about, name) ?? {};
  return column ? column.missing[String(layer)] ?? (column.editable ? "" : "can be read, not edited") : "there is no such hook";
}

// An edit at the chosen hook, tokens and heads, without what its operation needs.
export function editHere(store, op, pos = store.selection()) {
  const { hook, heads } = store.state;
  const { column } = findHook(store.about, hook);
  const edit = { hook, op, pos: one(pos), enabled: true };
  if (column.heads && heads.length) edit.head = one(heads);
  return edit;
}

// A patch from the source: from the tokens chosen there, if they are chosen apart, else from the same positions.
export function patchHere(store, pos, sources = store.state.source_positions.length ? store.selection("source") : null) {
  const edit = editHere(store, "patch", pos);
  if (!store.state.source) throw new Refused(NO_SOURCE);
  edit.source = { prompt: store.state.source };
  if (sources !== null && JSON.stringify(one(sources)) !== JSON.stringify(edit.pos)) edit.source_pos = one(sources);
  return edit;
}

export function mountForm(el, store, add, fail) {
  const hook = h("code", {});
  const op = h("select", { "aria-label": "Operation", onchange: (event) => draft({ op: event.target.value }) }, ...OPS.map(([name, hint]) => h("option", { value: name, title: hint }, name)));
  const field = (key, label, size, hint) => h("input", { type: "text", size, "aria-label": label, title: hint, autocomplete: "off", spellcheck: "false", oninput: (event) => draft({ [key]: event.target.value }) });
  const amount = field("amount", "Factor or value", 6, "a number, or numbers separated by commas");
  const tokens = field("tokens", "Tokens", 8, "9, or 1, 4, or 3:7, or last, or all; empty: the chosen tokens");
  const source = field("source_tokens", "Source tokens", 8, "positions in the source; empty: those chosen there, else the same");
  const fields = { amount, tokens, source_tokens: source };
  const from = h("label", {}, "from source tokens ", source);
  const heads = h("span", {});
  const submit = h("button", { type: "submit", class: "go" }, "Add edit");
  const why = h("span", { class: "dim" });
  const form = h("form", { class: "add" }, h("span", {}, "Add at"), hook, op, amount, h("label", {}, "at tokens ", tokens), heads, from, submit, why);
  el.append(form);
  const draft = (patch) => {
    fail(null);
    store.set({ form: { ...store.state.form, ...patch } });
  };
  for (const input of Object.values(fields))
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });

  store.watch(
    (s) => [s.state.form, s.state.hook, s.state.heads, s.selection(), s.selection("source"), s.about],
    (values, name, chosen, positions, sources) => {
      const { column } = findHook(store.about, name) ?? {};
      hook.textContent = name;
      op.value = values.op;
      for (const [key, input] of Object.entries(fields)) if (input !== document.activeElement) input.value = values[key];
      amount.hidden = !AMOUNT[values.op];
      amount.placeholder = AMOUNT[values.op] ?? "";
      from.hidden = values.op !== "patch";
      tokens.placeholder = written(positions);
      source.placeholder = written(sources);
      heads.textContent = column?.heads ? (chosen.length ? `in head ${written(chosen)}` : "in all heads") : "";
      const reason = closed(store.about, name);
      submit.disabled = Boolean(reason);
      why.textContent = reason;
    },
  );

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (submit.disabled) return;
    try {
      add(build());
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      fail(error.message);
    }
  });

  function build() {
    const values = store.state.form;
    const pos = positionsOf(values.tokens, "Tokens") ?? undefined;
    if (values.op === "patch") return patchHere(store, pos, positionsOf(values.source_tokens, "Source tokens") ?? undefined);
    const edit = editHere(store, values.op, pos);
    if (AMOUNT[values.op]) edit[AMOUNT[values.op]] = amountOf(values.amount, AMOUNT[values.op]);
    return edit;
  }
  return form;
}
