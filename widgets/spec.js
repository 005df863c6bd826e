// The edits, which are the spec: the list of them, and the form that adds one at the chosen hook and tokens.

import { alertLine, h, ranges, token } from "./dom.js";
import { findHook } from "./store.js";

const OPS = [
  ["suppress", "set to zero"],
  ["scale", "multiply by a factor"],
  ["add", "add a value"],
  ["set", "overwrite with a value"],
  ["patch", "take the values of the source prompt"],
];
const AMOUNT = { scale: "factor", add: "value", set: "value" };

export function mount(el, store) {
  const list = h("div", { class: "list", role: "list" });
  const copy = h("button", { type: "button", onclick: () => copyText(JSON.stringify(specOf(store.state.edits), null, 1), copy) }, "Copy as JSON");
  el.append(h("div", { class: "head" }, h("b", {}, "Edits"), h("small", {}, "the spec: applied in order, on the patched run only"), h("span", { class: "sp" }), copy), list);
  mountForm(el, store);
  const fail = alertLine(el);

  let shape = null;
  store.watch(
    (s) => [s.state.edits, s.tokens(), s.tokens("source"), s.result.error],
    (edits, tokens, source, error) => {
      copy.hidden = !edits.length;
      const next = JSON.stringify([edits.map((edit) => ({ ...edit, value: typeof edit.value, factor: typeof edit.factor })), tokens, source]);
      if (next !== shape) rebuild(edits);
      shape = next;
      edits.forEach((edit, i) => {
        const row = list.children[i];
        const input = row.querySelector("input.amount");
        const amount = edit[AMOUNT[edit.op]];
        if (input && input !== document.activeElement) input.value = String(amount);
        const mine = error?.where === "edit" && error.index === i ? error.message : "";
        row.lastChild.hidden = !mine;
        if (row.lastChild.textContent !== mine) row.lastChild.textContent = mine;
      });
      fail(error?.where === "edit" && error.index === null ? error.message : error?.where === "run" ? error.message : null);
    },
  );

  function change(index, patch) {
    store.set({ edits: store.state.edits.map((edit, i) => (i === index ? { ...edit, ...patch } : edit)) });
  }

  function rebuild(edits) {
    const held = list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    list.replaceChildren(...edits.map((edit, i) => editRow(edit, i)));
    if (held) list.querySelector(`[data-key="${held}"]`)?.focus();
  }

  function editRow(edit, i) {
    const name = `edit ${i + 1}`;
    const amount = edit[AMOUNT[edit.op]];
    const row = h(
      "div",
      { class: edit.enabled === false ? "edit off" : "edit", role: "listitem" },
      h("input", { type: "checkbox", checked: edit.enabled !== false, "aria-label": `${name} enabled`, "data-key": `on${i}`, onchange: (event) => change(i, { enabled: event.target.checked }) }),
      h("code", {}, edit.hook),
      h("span", { class: "chip" }, edit.op),
    );
    if (typeof amount === "number")
      row.append(h("input", { class: "amount", type: "number", step: "any", value: String(amount), "aria-label": `${AMOUNT[edit.op]} of ${name}`, "data-key": `amount${i}`, oninput: live((value) => change(i, { [AMOUNT[edit.op]]: value })) }));
    else if (Array.isArray(amount)) row.append(h("span", { class: "dim" }, `${amount.length} numbers`));
    row.append(where("token", edit.pos, store.tokens()));
    if (edit.head !== null && edit.head !== undefined) row.append(h("span", {}, "head ", h("b", {}, ranges([edit.head].flat()))));
    if (edit.op === "patch") {
      const from = h("span", { class: "dim" }, "from source ", where("token", edit.source_pos ?? edit.pos, edit.source?.prompt === store.state.source ? store.tokens("source") : []));
      if (edit.source?.prompt !== store.state.source) from.append(` of \u201c${edit.source?.prompt ?? ""}\u201d`);
      row.append(from);
    }
    row.append(
      h("span", { class: "sp" }),
      h("button", { type: "button", "data-key": `remove${i}`, "aria-label": `Remove ${name}`, onclick: () => remove(i) }, "Remove"),
      h("div", { class: "error", role: "alert", hidden: true }),
    );
    return row;
  }

  function remove(i) {
    store.set({ edits: store.state.edits.filter((_, other) => other !== i) });
    const next = list.querySelector(`[data-key="remove${Math.min(i, store.state.edits.length - 1)}"]`) ?? el.querySelector("select");
    next.focus();
  }
}

// "token 9 Mary", "tokens 3 to 5", "tokens all".
function where(word, pos, tokens) {
  if (pos === null || pos === undefined || pos === "all") return h("span", {}, `all ${word}s`);
  if (typeof pos === "string") return h("span", {}, `${word}s `, h("b", {}, pos));
  const positions = [pos].flat();
  const names = positions.length <= 3 ? positions.filter((p) => tokens[p]).flatMap((p) => [" ", token(tokens[p][1])]) : [];
  return h("span", {}, positions.length === 1 ? `${word} ` : `${word}s `, h("b", {}, ranges(positions)), ...names);
}

function mountForm(el, store) {
  const hook = h("code", {});
  const op = h("select", { "aria-label": "Operation", onchange: (event) => draft({ op: event.target.value }) }, ...OPS.map(([name, hint]) => h("option", { value: name, title: hint }, name)));
  const field = (key, label, size, hint) => h("input", { type: "text", size, "aria-label": label, title: hint, autocomplete: "off", spellcheck: "false", oninput: (event) => draft({ [key]: event.target.value }) });
  const amount = field("amount", "Factor or value", 6, "a number, or numbers separated by commas");
  const tokens = field("tokens", "Tokens", 8, "9, or 3:7, or 1, 4, or last, or all; empty: the chosen tokens");
  const source = field("source_tokens", "Source tokens", 8, "positions in the source; empty: those chosen there, else the same");
  const fields = { amount, tokens, source_tokens: source };
  const from = h("label", {}, "from source tokens ", source);
  const heads = h("span", {});
  const add = h("button", { type: "submit", class: "go" }, "Add edit");
  const why = h("span", { class: "dim" });
  const form = h("form", { class: "add" }, h("span", {}, "Add at"), hook, op, amount, h("label", {}, "at tokens ", tokens), heads, from, add, why);
  el.append(form);
  const fail = alertLine(el);
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
      const found = findHook(store.about, name);
      const { column } = found ?? {};
      hook.textContent = name;
      op.value = values.op;
      for (const [key, input] of Object.entries(fields)) if (input !== document.activeElement) input.value = values[key];
      amount.hidden = !AMOUNT[values.op];
      amount.placeholder = AMOUNT[values.op] ?? "";
      from.hidden = values.op !== "patch";
      tokens.placeholder = ranges(positions);
      source.placeholder = ranges(sources);
      heads.textContent = column?.heads ? (chosen.length ? `in head ${ranges(chosen)}` : "in all heads") : "";
      const reason = !column ? "" : column.missing[String(found.layer)] ?? (column.editable ? "" : "can be read, not edited");
      add.disabled = Boolean(reason);
      why.textContent = reason;
    },
  );

  // A refusal is over once a second prompt or another hook is there.
  store.watch(
    (s) => [s.state.source, s.state.hook],
    () => fail(null),
  );

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (add.disabled) return;
    try {
      fail(null);
      store.set({ edits: [...store.state.edits, build()] });
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      fail(error.message);
    }
  });

  function build() {
    const { form: values, hook: name, heads: chosen, source: prompt } = store.state;
    const edit = { hook: name, op: values.op, pos: one(positionsOf(values.tokens, "Tokens") ?? store.selection()), enabled: true };
    const { column } = findHook(store.about, name);
    if (column.heads && chosen.length) edit.head = one(chosen);
    if (AMOUNT[values.op]) edit[AMOUNT[values.op]] = amountOf(values.amount, AMOUNT[values.op]);
    if (values.op === "patch") {
      if (!prompt) throw new Refused("There is nothing to patch from yet: type a second prompt as Source, above.");
      edit.source = { prompt };
      const sources = positionsOf(values.source_tokens, "Source tokens") ?? (store.state.source_positions.length ? store.selection("source") : null);
      if (sources !== null && JSON.stringify(one(sources)) !== JSON.stringify(edit.pos)) edit.source_pos = one(sources);
    }
    return edit;
  }
}

class Refused extends Error {}

function one(list) {
  return Array.isArray(list) && list.length === 1 ? list[0] : list;
}

function positionsOf(text, label) {
  const trimmed = text.trim();
  if (!trimmed) return null;
  if (trimmed === "last" || trimmed === "all" || /^-?\d*\s*:\s*-?\d*$/.test(trimmed)) return trimmed.replaceAll(" ", "");
  const parts = trimmed.split(/[\s,]+/).filter(Boolean);
  if (!parts.every((part) => /^-?\d+$/.test(part))) throw new Refused(`${label}: \u201c${trimmed}\u201d is not a list of positions; write 9, or 1, 4, or 3:7, or last, or all.`);
  return parts.map(Number);
}

function amountOf(text, label) {
  const parts = text.replace(/^\s*\[|\]\s*$/g, "").split(/[\s,]+/).filter(Boolean);
  const numbers = parts.map((part) => Number(part.replace("\u2212", "-")));
  if (!numbers.length) throw new Refused(`This operation needs a ${label}: a number such as 0.5.`);
  if (!numbers.every(Number.isFinite)) throw new Refused(`The ${label} \u201c${text.trim()}\u201d is not a number.`);
  return one(numbers);
}

// The edits that are switched on, as session.run takes them.
export function specOf(edits) {
  const spec = {};
  for (const { hook, enabled, ...edit } of edits) if (enabled !== false) (spec[hook] ??= []).push(edit);
  return Object.fromEntries(Object.entries(spec).map(([hook, list]) => [hook, one(list)]));
}

// While a number is typed or stepped, at most eight changes a second go out, the last one always.
function live(send) {
  let timer = null;
  return (event) => {
    const input = event.target;
    if (timer) return;
    timer = setTimeout(() => {
      timer = null;
      const value = input.valueAsNumber;
      if (Number.isFinite(value)) send(value);
    }, 120);
  };
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
