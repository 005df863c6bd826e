// Undo and redo, and the history: the runs so far, to name, pin, compare and go back to.

import { h, headline, percent, signed, token, visible } from "./dom.js";

const TEXT = 'textarea, [contenteditable="true"], input:not([type="checkbox"], [type="radio"], [type="range"], [type="button"])';

export function mountSteps(el, store, root) {
  const buttons = ["undo", "redo"].map((kind) => h("button", { type: "button", onclick: () => move(kind) }, kind === "undo" ? "Undo" : "Redo"));
  el.append(...buttons);
  let held = false; // the focus was inside when the page changed

  function move(kind) {
    if (!store.steps[kind]) return;
    held = root.contains(document.activeElement);
    store.move({ type: kind });
  }

  // In a text field Ctrl-Z is the browser's own; the notebook's never: it would bring back deleted cells.
  root.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.altKey || event.key.toLowerCase() !== "z") return;
    event.stopPropagation();
    if (event.target.closest(TEXT)) return;
    event.preventDefault();
    move(event.shiftKey ? "redo" : "undo");
  });

  // What a slider does until it is let go is one step.
  const release = () => store.hold(false);
  root.addEventListener("pointerdown", (event) => store.hold(Boolean(event.target.closest('input[type="range"]'))));
  for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, release);

  store.watch(
    (s) => [s.steps],
    (steps) => {
      const [undo, redo] = buttons;
      const keys = /Mac|iP/.test(navigator.platform) ? ["\u2318Z", "\u21e7\u2318Z"] : ["Ctrl+Z", "Ctrl+Shift+Z"];
      [undo, redo].forEach((button, i) => {
        const name = i ? steps.redo : steps.undo;
        const left = !name && button === document.activeElement;
        button.disabled = !name;
        button.title = name ? `${button.textContent}: ${name} (${keys[i]})` : `Nothing to ${button.textContent.toLowerCase()}`;
        if (left) held = true;
      });
      // A view may have taken away the control that had the focus: the keys must still come here, not to the notebook.
      const focused = document.activeElement;
      if (held && (!root.contains(focused) || focused.disabled)) ([undo, redo].find((button) => focused?.disabled && !button.disabled) ?? root).focus({ preventScroll: true });
      held = false;
    },
  );
  return () => {
    for (const name of ["pointerup", "pointercancel"]) window.removeEventListener(name, release);
  };
}

export function mountHistory(el, panel, store) {
  const button = h("button", { type: "button", "aria-expanded": "false", title: "The runs so far: name, pin, compare, restore", onclick: () => open(panel.hidden) });
  el.append(button);
  const list = h("div", { class: "runs", role: "list" });
  const side = h("div", { class: "two", role: "table", "aria-label": "Two runs compared", hidden: true });
  const hint = h("small", {});
  panel.append(h("div", { class: "head" }, h("b", {}, "History"), hint, h("span", { class: "sp" }), h("button", { type: "button", onclick: () => open(false) }, "Close")), side, list);
  panel.hidden = true;
  let chosen = []; // the ids of the runs to compare: this page's own, at most two

  function open(on) {
    panel.hidden = !on;
    button.setAttribute("aria-expanded", String(on));
    if (on) show();
    else button.focus({ preventScroll: true });
  }
  for (const part of [el, panel])
    part.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || panel.hidden) return;
      event.stopPropagation();
      open(false);
    });

  store.watch(
    (s) => [s.history.count],
    (count) => (button.textContent = count ? `History ${count}` : "History"),
  );
  store.watch(
    (s) => (panel.hidden ? [null] : [s.runs(), s.history.shown]),
    () => panel.hidden || show(),
  );

  function show() {
    const runs = store.runs();
    if (!runs) return;
    const ids = new Set(runs.map((run) => run.id));
    chosen = chosen.filter((id) => ids.has(id));
    const held = list.contains(document.activeElement) ? document.activeElement : null;
    const { key } = held?.dataset ?? {};
    const typing = held?.type === "text" ? [held.value, held.selectionStart, held.selectionEnd] : null;
    list.replaceChildren(...runs.map(row));
    if (!runs.length) list.append(h("div", { class: "empty", role: "listitem" }, "No runs yet: type a prompt and press Enter. Each run is kept here, to name, compare and go back to."));
    const next = key && list.querySelector(`[data-key="${key}"]`);
    if (next && typing) {
      next.value = typing[0];
      next.setSelectionRange(typing[1], typing[2]);
    }
    const name = key && list.querySelector(`[data-key="name${key.match(/\d+$/)}"]`);
    if (held) ([next, name, list.querySelector("input")].find((item) => item && !item.disabled) ?? button).focus({ preventScroll: true });
    compare(runs.filter((run) => chosen.includes(run.id)));
  }

  function row(run, i, runs) {
    const shown = run.id === store.history.shown;
    const name = `run ${run.id}`;
    const field = h("input", { type: "text", class: "name", value: run.name, placeholder: run.about, title: run.about, maxlength: 120, "aria-label": `Name of ${name}`, "data-key": `name${run.id}`, autocomplete: "off", spellcheck: "false" });
    const commit = () => field.value.trim() !== run.name && store.send({ type: "keep", run: run.id, name: field.value });
    field.addEventListener("blur", commit);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) commit();
      if (event.key === "Escape") field.value = run.name;
    });
    const after = runs[i + 1] ?? runs[i - 1];
    const act = (text, does, more = {}) => h("button", { type: "button", "aria-label": `${text} ${name}`, "data-key": `${text}${run.id}`, onclick: does, ...more }, text);
    return h(
      "div",
      { class: shown ? "run on" : "run", role: "listitem", "aria-current": shown ? "true" : null },
      h("input", { type: "checkbox", checked: chosen.includes(run.id), title: "Compare with another", "aria-label": `Compare ${name}`, "data-key": `two${run.id}`, onchange: (event) => choose(run.id, event.target.checked) }),
      field,
      h("span", { class: "found num" }, headline(run)),
      act("Restore", () => store.move({ type: "restore", run: run.id }), shown ? { disabled: true, title: "This run is shown now" } : {}),
      act("Pin", () => store.send({ type: "keep", run: run.id, pinned: !run.pinned }), { "aria-pressed": String(run.pinned), title: run.pinned ? "Kept for good" : "Keep for good" }),
      act("Delete", () => {
        list.querySelector(`[data-key="Delete${after?.id}"]`)?.focus();
        store.send({ type: "forget", run: run.id });
      }),
      h("div", { class: "dim more" }, [time(run.when), run.name && run.about, difference(run), run.edited && `KL ${nats(run)}`, quoted(run.prompt)].filter(Boolean).join(" \u00b7 ")),
    );
  }

  function choose(id, on) {
    chosen = on ? [...chosen, id].slice(-2) : chosen.filter((other) => other !== id);
    show();
  }

  // Two runs side by side, the older one left.
  function compare(pair) {
    hint.textContent = chosen.length === 1 ? "Tick another run to compare the two." : "The latest 100 runs; pinned ones stay. Tick two to compare them.";
    side.hidden = pair.length < 2;
    if (side.hidden) return;
    const [left, right] = pair.reverse();
    const line = (name, ...cells) => h("div", { role: "row" }, h("div", { role: "rowheader", class: "dim" }, name), ...cells.map((cell) => h("div", { role: "cell" }, cell)));
    const texts = [...new Set([left, right].flatMap((run) => run.rows.slice(0, 4).map(([text]) => text)))];
    const odds = (run, text) => {
      const found = run.rows.find((item) => item[0] === text);
      return found ? change(run.edited, percent(found[2]), percent(found[3])) : "\u2013";
    };
    side.replaceChildren(
      h("div", { role: "row" }, h("div", { role: "columnheader", class: "dim" }, "run"), ...[left, right].map((run) => h("div", { role: "columnheader" }, h("b", {}, run.name || `Run ${run.id}`)))),
      line("edits", left.about, right.about),
      line("prompt", left.prompt, right.prompt),
      ...texts.map((text) => line(token(text), odds(left, text), odds(right, text))),
      line("logit difference", difference(left), difference(right)),
      line("KL", ...[left, right].map((run) => (run.edited ? `${nats(run)} nats` : "\u2013"))),
    );
  }
}

// "Mary minus John +5.5 to \u22126.2"
function difference({ difference: found, edited }) {
  return found ? `${found.tokens.map((text) => visible(text)).join(" minus ")} ${change(edited, ...found.values.map((value) => signed(value)))}` : "";
}

function nats({ kl }) {
  return kl === null ? "NaN" : kl.toFixed(2);
}

function quoted(text) {
  return `\u201c${visible(text.length > 90 ? `${text.slice(0, 90)}\u2026` : text).replaceAll("\u2423", " ")}\u201d`;
}

function change(edited, before, after) {
  return edited ? `${before} to ${after}` : before;
}

function time(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
}
