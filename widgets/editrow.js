// One row of the list of edits: every field of the edit, changed in place.

import { h, token } from "./dom.js";
import { AMOUNT, amountOf, live, NO_SOURCE, one, withOp } from "./editfields.js";
import { createOps } from "./opmenu.js";
import { headsOf, positionsOf, Refused, written } from "./positions.js";
import { findHook } from "./store.js";

// The row at place `i`: `show(edit, count, error)` fills it, whichever edit is there now. `acts` are the list's: change,
// move, duplicate, remove.
export function createRow(store, i, acts) {
  const name = `edit ${i + 1}`;
  let edit = {};
  let refusal = "";
  let wrong = null;

  // Puts a new edit here, or says at the row why not.
  function put(make) {
    try {
      refusal = "";
      acts.change(i, make());
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      refusal = error.message;
    }
    draw();
  }

  // A text that is taken over on Enter and when the field is left. What is being typed stays until what it says changes.
  function field(key, label, size, hint, take) {
    let shown = null;
    const input = h("input", { type: "text", size, "aria-label": `${label} of ${name}`, title: hint, "data-key": key, autocomplete: "off", spellcheck: "false" });
    input.addEventListener("change", () => {
      if (input.value === shown) return;
      const text = input.value;
      put(() => {
        const changed = take(text);
        shown = null;
        return changed;
      });
    });
    const show = (text, placeholder = "") => {
      if (text !== shown) input.value = shown = text;
      input.placeholder = placeholder;
    };
    return { input, show, forget: () => (shown = null) };
  }

  const on = h("input", { type: "checkbox", "aria-label": `${name} enabled`, "data-key": "on", onchange: (event) => put(() => ({ ...edit, enabled: event.target.checked })) });
  const hook = h("button", { type: "button", class: "at", title: "Choose this hook and these tokens above", "data-key": "hook", onclick: look });
  const op = createOps(store, { "aria-label": `op of ${name}`, "data-key": "op", onchange: (event) => put(() => withOp(edit, event.target.value, store.state.source)) });

  // A number: by slider and by keyboard. Both change the one field of the edit.
  let sent = null;
  const pace = live((value) => {
    sent = value;
    put(() => ({ ...edit, [AMOUNT[edit.op]]: value }));
  }, store);
  const slider = h("input", { type: "range", "data-key": "slider", oninput: (event) => moved(event.target.valueAsNumber, number) });
  const number = h("input", { type: "number", class: "amount", step: "any", "data-key": "amount", oninput: (event) => moved(event.target.valueAsNumber, slider) });
  const amount = h("span", { class: "pair" }, slider, number);
  amount.addEventListener("focusout", () => {
    pace.now();
    if (number.value === "") number.value = sent; // no number was typed
  });
  function moved(value, other) {
    if (!Number.isFinite(value) || !(edit.op in AMOUNT)) return;
    if (other === slider) reach(value);
    other.value = value;
    pace.later(value);
  }
  // The slider's ends grow with the number, and do not move while it is dragged.
  function reach(value) {
    let end = edit.op === "scale" ? 2 : 10;
    while (end < Math.abs(value)) end *= 2;
    if (slider.dataset.op === edit.op && end <= Number(slider.max)) return;
    slider.dataset.op = edit.op;
    Object.assign(slider, { min: -end, max: end, step: end / 100 });
  }
  const vector = field("vector", "numbers", 10, "numbers separated by commas", (text) => ({ ...edit, [AMOUNT[edit.op]]: amountOf(text, AMOUNT[edit.op]) }));

  const places = "9, or 1, 4, or 3:7, or last; empty: ";
  const tokens = field("tokens", "tokens", 6, `${places}all`, (text) => ({ ...edit, pos: one(positionsOf(text)) }));
  const heads = field("heads", "heads", 4, "3, or 1, 4; empty: all", (text) => ({ ...edit, head: one(headsOf(text)) }));
  const source = field("source", "source", 12, "the prompt to patch from; empty: the source above", (text) => {
    if (!text && !store.state.source) throw new Refused(NO_SOURCE);
    return { ...edit, source: { prompt: text || store.state.source } };
  });
  const sourceTokens = field("source_tokens", "source tokens", 6, `${places}the same`, (text) => ({ ...edit, source_pos: one(positionsOf(text)) }));
  const fields = [vector, tokens, heads, source, sourceTokens];

  const tokenNames = h("span", {});
  const sourceNames = h("span", {});
  const inHeads = h("label", {}, "heads ", heads.input);
  const from = h("span", { class: "pair" }, h("label", {}, "from ", source.input), h("label", {}, "tokens ", sourceTokens.input), sourceNames);
  const act = (key, text, label, does) => h("button", { type: "button", "aria-label": label, "data-key": key, onclick: () => does() }, text);
  const up = act("up", "Up", `Move ${name} up`, () => move(-1));
  const down = act("down", "Down", `Move ${name} down`, () => move(1));
  const error = h("div", { class: "error", role: "alert", hidden: true });
  const row = h(
    "div",
    { class: "edit", role: "listitem" },
    on,
    h("div", { class: "what" }, hook, op, amount, vector.input, h("span", { class: "pair" }, h("label", {}, "tokens ", tokens.input), tokenNames), inHeads, from),
    h("div", { class: "acts" }, up, down, act("duplicate", "Duplicate", `Duplicate ${name}`, () => acts.duplicate(i)), act("remove", "Remove", `Remove ${name}`, () => acts.remove(i))),
    error,
  );
  row.addEventListener("keydown", (event) => {
    // In a menu of operations Alt and an arrow open it.
    if (!event.altKey || event.target === op || !["ArrowUp", "ArrowDown"].includes(event.key)) return;
    event.preventDefault();
    move(event.key === "ArrowUp" ? -1 : 1);
  });

  function move(step) {
    const held = row.contains(document.activeElement) ? document.activeElement : null;
    pace.now();
    held?.dispatchEvent(new Event("change")); // what is typed belongs to this edit
    acts.move(i, step, held?.dataset.key ?? "up");
  }

  function look() {
    const positions = [edit.pos ?? []].flat().filter((p) => Number.isInteger(p) && p >= 0);
    store.set({ hook: edit.hook, heads: [edit.head ?? []].flat(), ...(positions.length ? { positions } : {}) });
  }

  function draw() {
    const { column } = findHook(store.about, edit.hook) ?? {};
    row.classList.toggle("off", edit.enabled === false);
    on.checked = edit.enabled !== false;
    hook.textContent = edit.hook;
    op.value = edit.op;
    drawAmount(edit[AMOUNT[edit.op]]);
    tokens.show(written(edit.pos), "all");
    tokenNames.replaceChildren(...names(edit.pos, store.tokens()));
    inHeads.hidden = !column?.heads && edit.head === undefined;
    heads.show(written(edit.head), "all");
    from.hidden = edit.op !== "patch";
    const { prompt, ids, edits: before } = edit.source ?? {};
    const plain = prompt !== undefined && !before;
    const above = plain && prompt === store.state.source;
    source.show(plain && !above ? prompt : "", above ? "the source above" : plain ? "" : `${ids ? `${ids.length} token ids` : "a prompt"}${before ? ", edited" : ""}`);
    source.input.title = above || !plain ? "the prompt to patch from; empty: the source above" : prompt;
    sourceTokens.show(written(edit.source_pos), written(edit.pos) || "all");
    sourceNames.replaceChildren(...(above ? names(edit.source_pos ?? edit.pos, store.tokens("source")) : []));
    const message = refusal || wrong || "";
    error.hidden = !message;
    if (error.textContent !== message) error.textContent = message;
  }

  function drawAmount(value) {
    amount.hidden = typeof value !== "number";
    const lost = vector.input === document.activeElement && !amount.hidden;
    vector.input.hidden = !Array.isArray(value);
    if (Array.isArray(value)) vector.show(value.length <= 8 && !Array.isArray(value[0]) ? value.join(", ") : "", `${sizes(value)} numbers`);
    if (amount.hidden) return;
    const what = AMOUNT[edit.op];
    number.setAttribute("aria-label", `${what} of ${name}`);
    slider.setAttribute("aria-label", `${name}, ${what} by slider`);
    reach(value);
    if (value !== sent || number.value === "") {
      sent = value;
      if (number !== document.activeElement || number.valueAsNumber !== value) number.value = value;
      slider.value = value;
    }
    if (lost) number.focus();
  }

  return {
    el: row,
    remove() {
      pace.stop();
      row.remove();
    },
    show(now, count, message) {
      edit = now;
      wrong = message;
      up.setAttribute("aria-disabled", String(i === 0));
      down.setAttribute("aria-disabled", String(i === count - 1));
      draw();
    },
    // Another edit comes to this place: nothing typed for the old one stays.
    forget() {
      pace.now();
      refusal = "";
      sent = null;
      delete slider.dataset.op;
      for (const each of fields) each.forget();
    },
  };
}

// The tokens at up to three positions, by name.
function names(pos, tokens) {
  const places = pos === "last" ? [tokens.length - 1] : [pos ?? []].flat();
  return places.length > 3 ? [] : places.filter((p) => tokens[p]).flatMap((p) => [token(tokens[p][1]), " "]);
}

function sizes(value) {
  return Array.isArray(value) ? [value.length, sizes(value[0])].filter(Boolean).join(" \u00d7 ") : "";
}
