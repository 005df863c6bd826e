// The prompts and their tokens: type, choose tokens by hand, by words or by finding them, see where two prompts differ.

import { mountCarry } from "./carry.js";
import { alertLine, h, ranges } from "./dom.js";
import { choiceOf, findText, positionsText, Refused } from "./positions.js";
import { createStrip, scrollTogether } from "./strip.js";

export function mount(el, store) {
  const grid = h("div", { class: "prompts" });
  el.append(grid);
  const prompt = line(grid, store, "prompt", "Prompt", "Type a prompt and press Enter");
  const source = line(grid, store, "source", "Source", "A second prompt to patch from (optional)");
  scrollTogether(prompt.strip.list, source.strip.list);
  return mountCarry(grid, store, prompt, source);
}

// One prompt that is there already, only to choose from.
export function mountPicker(el, store) {
  const grid = h("div", { class: "prompts" });
  el.append(grid);
  line(grid, store, "prompt", "Tokens");
}

// Without a hint there is nothing to type the text into.
function line(grid, store, role, title, hint = null) {
  const other = role === "prompt" ? "source" : "prompt";
  const chosen = role === "prompt" ? "positions" : "source_positions";
  const choose = (positions) => store.set({ [chosen]: positions });

  const input = hint && textField(store, role, title, hint);
  const said = h("div", { class: "sr", "aria-live": "polite" });
  const say = (text) => (said.textContent = text);
  const strip = createStrip(`Tokens of the ${role}`, choose, (p) => say(`${strip.name(p)}; ${chosenWords(store.selection(role))}`));
  const count = h("small", { class: "count" });
  const note = h("div", { class: "notes", role: "status" });
  const empty = role === "prompt" && h("div", { class: "empty" }, "No tokens yet: type a prompt above and press Enter.");
  const entry = h("div", { class: "entry" }, input);
  const body = h("div", { class: "line" }, entry, strip.el, empty || "", note, said);
  const fail = alertLine(body);
  grid.append(h("div", { class: "name" }, title, count), body);

  store.watch((s) => [s.tokens(role)], strip.show);
  store.watch(
    (s) => [s.tokens(role), s.tokens(other)],
    (tokens, others) => {
      const differ = strip.compare(others, other);
      const both = tokens.length > 0 && others.length > 0;
      const unequal = both && tokens.length !== others.length;
      count.textContent = unequal ? `${tokens.length} \u2260 ${others.length}` : tokens.length ? `${tokens.length} token${tokens.length > 1 ? "s" : ""}` : "";
      count.classList.toggle("unequal", unequal);
      if (role === "source") note.textContent = both ? compared(tokens.length, others.length, differ) : "";
    },
  );
  store.watch(
    (s) => [s.selection(role), s.tokens(role), s.tokens(other)],
    (positions) => strip.select(positions),
  );

  const tools = h("div", { class: "tools" }, pickerOf(store, role, choose, chosen, strip, say), finderOf(store, role, strip, say));
  entry.append(tools);
  store.watch(
    (s) => [s.error(role), s.tokens(role), s.state.prompt],
    (message, tokens, text) => {
      fail(message);
      tools.hidden = !tokens.length;
      if (empty) empty.hidden = Boolean(message || tokens.length || text);
    },
  );
  return { strip, tools, note, say, fail };
}

const HOW = "Drag a source token onto one of the prompt to patch it.";

function compared(sources, prompts, differ) {
  if (!differ && sources === prompts) return `The two prompts are the same. ${HOW}`;
  const lengths = `Unequal lengths: the source has ${sources} tokens, the prompt ${prompts}. Choose the source tokens apart where they do not line up. `;
  return `${sources === prompts ? "" : lengths}Underlined: where the two prompts differ. ${HOW}`;
}

function chosenWords(positions) {
  const list = ranges(positions);
  const many = `${positions.length} token${positions.length === 1 ? "" : "s"} chosen`;
  return list.length > 60 ? many : `${many}: ${list}`;
}

export function textField(store, role, title, hint) {
  const input = h("textarea", { rows: "1", placeholder: hint, "aria-label": title, spellcheck: "false", dir: "auto", class: "text" });
  function commit() {
    if (input.value === store.state[role]) return;
    if (role === "prompt") store.set({ prompt: input.value, positions: [] });
    else {
      // Edits that patch from the source go on patching from it.
      const old = store.state.source;
      const edits = store.state.edits.map((edit) => (old && edit.source?.prompt === old && input.value ? { ...edit, source: { prompt: input.value } } : edit));
      store.set({ source: input.value, source_positions: [], edits });
    }
  }
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.isComposing) {
      event.preventDefault();
      commit();
    } else if (event.key === "Escape") input.value = store.state[role];
  });
  input.addEventListener("blur", commit);
  store.watch(
    (s) => [s.state[role]],
    (text) => {
      input.value = text;
    },
  );
  return input;
}

// Choosing by words: positions as text, and the choices made most often.
function pickerOf(store, role, set, chosen, strip, say) {
  const field = h("input", {
    type: "text",
    size: 8,
    "aria-label": `Positions in the ${role}`,
    title: "The chosen tokens: 9, or 1, 4, or 3:7 (that is 3 to 6), or last, or all. Enter takes them.",
    autocomplete: "off",
    spellcheck: "false",
  });
  const choose = (positions) => {
    set(positions);
    say(chosenWords(store.selection(role)));
  };
  const word = (text, title, pick) => h("button", { type: "button", title, onclick: () => choose(pick(store.tokens(role))) }, text);
  const same = (tokens) => tokens.flatMap(([id], p) => (id === tokens[strip.current][0] ? [p] : []));
  const follow = role === "source" && word("as the prompt", "Choose in the source what is chosen in the prompt", () => []);
  const el = h(
    "div",
    { class: "picker", role: "group", "aria-label": `Choose in the ${role}` },
    field,
    follow,
    word("last", "Choose the last token", (tokens) => [tokens.length - 1]),
    word("all", "Choose every token", (tokens) => tokens.map((_, p) => p)),
    word("same as this token", "Choose every token that equals the one chosen last", same),
  );
  const fail = alertLine(el);

  function show() {
    field.value = positionsText(store.state[chosen], store.tokens(role).length);
    field.removeAttribute("aria-invalid");
    fail(null);
  }
  function commit() {
    if (field.value === positionsText(store.state[chosen], store.tokens(role).length)) return show();
    try {
      choose(choiceOf(field.value, store.tokens(role).length, role));
      show();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      field.setAttribute("aria-invalid", "true");
      fail(error.message);
    }
  }
  field.addEventListener("change", commit);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) commit();
    else if (event.key === "Escape") show();
  });
  store.watch(
    (s) => [s.state[chosen], s.tokens(role), s.selection(role)],
    (positions, tokens, meant) => {
      field.placeholder = role === "prompt" ? "last" : positionsText(meant, tokens.length);
      if (follow) follow.setAttribute("aria-pressed", String(!positions.length));
      show();
    },
  );
  return el;
}

// Finding text: every place is marked, and each step makes the next one the strip's tab stop.
function finderOf(store, role, strip, say) {
  let places = [];
  let at = 0;
  const field = h("input", { type: "search", size: 9, placeholder: "find text", "aria-label": `Find in the ${role}`, title: "Enter: the next place; Shift+Enter: the one before", autocomplete: "off", spellcheck: "false", oninput: () => look() });
  const where = h("small", {});
  const go = (sign, label, by) => h("button", { type: "button", tabindex: "-1", "aria-label": label, title: label, onclick: () => step(by) }, sign);
  const steps = h("span", { hidden: true }, where, go("\u2039", "previous place", -1), go("\u203a", "next place", 1)); // with keys: Enter

  function show() {
    strip.mark(places, at);
    steps.hidden = !field.value;
    where.textContent = places.length ? `${at + 1} of ${places.length}` : "none";
    if (field.value) say(places.length ? `${where.textContent}: ${strip.name(places[at][0])}` : `\u201c${field.value}\u201d is not in the ${role}`);
  }
  function look() {
    places = findText(store.tokens(role), field.value);
    at = 0;
    show();
  }
  function step(by) {
    if (!places.length) return;
    at = (at + by + places.length) % places.length;
    show();
  }
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) step(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape" && field.value) {
      field.value = "";
      look();
      event.stopPropagation(); // a second one leaves for the notebook
    }
  });
  store.watch((s) => [s.tokens(role)], look);
  return h("div", { class: "finder" }, field, steps);
}
