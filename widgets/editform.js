// The form that adds an edit at the chosen hooks and tokens.

import { h } from "./dom.js";
import { AMOUNT, amountOf, NO_SOURCE } from "./editfields.js";
import { editsHere, patchesHere, refusal, targets } from "./edits.js";
import { createOps } from "./opmenu.js";
import { positionsOf, Refused, written } from "./positions.js";
import { findHook } from "./store.js";

export function mountForm(el, store, add, fail) {
  const hook = h("code", {});
  const op = createOps(store, { "aria-label": "Operation", onchange: (event) => draft({ op: event.target.value }) });
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
    (s) => [s.state.form, s.state.hook, s.state.hooks, s.state.heads, s.selection(), s.selection("source"), s.state.source, s.about],
    (values, name, _, chosen, positions, sources, text) => {
      const { column } = findHook(store.about, name) ?? {};
      const { open, skipped } = targets(store);
      const many = open.length + skipped.length > 1;
      hook.textContent = many ? `${open.length} hooks` : name;
      op.value = values.op;
      for (const [key, input] of Object.entries(fields)) if (input !== document.activeElement) input.value = values[key];
      amount.hidden = !AMOUNT[values.op];
      amount.placeholder = AMOUNT[values.op] ?? "";
      from.hidden = values.op !== "patch";
      tokens.placeholder = written(positions) || "all";
      source.placeholder = written(sources);
      heads.textContent = column?.heads ? (chosen.length ? `in head ${written(chosen)}` : "in all heads") : "";
      submit.disabled = !open.length;
      submit.textContent = open.length > 1 ? `Add to ${open.length} hooks` : "Add edit";
      if (!open.length) why.textContent = `${refusal(store)}; choose another hook above`;
      else if (values.op === "patch" && !text) why.textContent = NO_SOURCE;
      else why.textContent = skipped.length ? skippedWords(skipped) : "";
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
    const pos = positionsOf(values.tokens) ?? undefined;
    if (values.op === "patch") return patchesHere(store, pos, positionsOf(values.source_tokens) ?? undefined);
    const amount = AMOUNT[values.op];
    const more = amount ? { [amount]: amountOf(values.amount, amount) } : {};
    return editsHere(store, values.op, pos).map((edit) => ({ ...edit, ...more }));
  }
  return form;
}

// "2 skipped: blocks.3.attn.hook_pattern (can be read, not edited), ..."
function skippedWords(skipped) {
  const reasons = new Map();
  for (const [name, reason] of skipped) reasons.set(reason, [...(reasons.get(reason) ?? []), name]);
  const each = [...reasons].map(([reason, names]) => `${names.length > 2 ? `${names.length} hooks` : names.join(", ")} (${reason})`);
  return `${skipped.length} skipped: ${each.join("; ")}`;
}
