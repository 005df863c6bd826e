// The prompts and their token strips: type, choose tokens by mouse or arrows, see where two prompts differ.

import { alertLine, h, tokenNodes, visible } from "./dom.js";

export function mount(el, store) {
  const grid = h("div", { class: "prompts" });
  el.append(grid);
  line(grid, store, "prompt", "Prompt", "Type a prompt and press Enter");
  line(grid, store, "source", "Source", "A second prompt to patch from (optional)");
}

function line(grid, store, role, title, hint) {
  const other = role === "prompt" ? "source" : "prompt";
  const chosen = role === "prompt" ? "positions" : "source_positions";
  const input = h("textarea", { rows: "1", placeholder: hint, "aria-label": title, spellcheck: "false", dir: "auto", class: "text" });
  const strip = h("div", { class: "strip", role: "listbox", "aria-multiselectable": "true", "aria-label": `Tokens of the ${role}`, "aria-orientation": "horizontal" });
  const body = h("div", { class: "line" }, input, strip);
  const note = h("div", { class: "notes" });
  body.append(note);
  const fail = alertLine(body);
  grid.append(h("span", { class: "name" }, title), body);

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

  let anchor = 0;
  let focus = 0;
  const at = (event) => {
    const button = event.target.closest("[data-p]");
    return button && strip.contains(button) ? Number(button.dataset.p) : null;
  };

  function choose(position, event) {
    const now = new Set(store.selection(role));
    if (event.shiftKey) {
      const [from, to] = [Math.min(anchor, position), Math.max(anchor, position)];
      store.set({ [chosen]: Array.from({ length: to - from + 1 }, (_, i) => from + i) });
    } else {
      anchor = position;
      if (event.ctrlKey || event.metaKey) {
        if (!now.delete(position)) now.add(position);
        store.set({ [chosen]: [...now].sort((a, b) => a - b) });
      } else store.set({ [chosen]: [position] });
    }
    move(position);
  }

  function move(position) {
    strip.children[focus]?.setAttribute("tabindex", "-1");
    focus = position;
    strip.children[focus]?.setAttribute("tabindex", "0");
  }

  strip.addEventListener("click", (event) => {
    const position = at(event);
    if (position !== null) choose(position, event);
  });
  strip.addEventListener("keydown", (event) => {
    const position = at(event);
    if (position === null || event.altKey) return;
    const last = strip.childElementCount - 1;
    const to = { ArrowLeft: position - 1, ArrowUp: position - 1, ArrowRight: position + 1, ArrowDown: position + 1, Home: 0, End: last }[event.key];
    if (to !== undefined && !event.ctrlKey && !event.metaKey) {
      const next = Math.max(0, Math.min(last, to));
      choose(next, event);
      strip.children[next].focus();
    } else if (event.key === "Enter") choose(position, { shiftKey: false, ctrlKey: false });
    else if (event.key === " ") choose(position, { ctrlKey: true });
    else return;
    event.preventDefault();
  });

  store.watch(
    (s) => [s.state[role]],
    (text) => {
      input.value = text;
    },
  );
  store.watch(
    (s) => [s.tokens(role), s.tokens(other)],
    (tokens, others) => {
      const held = strip.contains(document.activeElement);
      strip.replaceChildren(
        ...tokens.map(([id, text, kind], p) => {
          const there = others[p];
          const differs = others.length > 0 && there?.[0] !== id;
          const name = [`token ${p}`, `id ${id}`, { bos: "beginning of sequence", special: "special token" }[kind]];
          if (differs) name.push(there ? `the ${other} has ${visible(there[1])} here` : `the ${other} ends before`);
          return h(
            "button",
            {
              type: "button",
              role: "option",
              tabindex: "-1",
              "data-p": p,
              class: ["tok", kind, differs ? "diff" : ""].join(" "),
              title: name.filter(Boolean).join(", "),
            },
            h("sup", {}, String(p)),
            h("bdi", {}, ...tokenNodes(text)),
          );
        }),
      );
      strip.hidden = !tokens.length;
      const both = role === "source" && tokens.length && others.length;
      const differ = strip.querySelector(".diff") ? "Underlined: where the two prompts differ." : "";
      note.textContent = !both
        ? ""
        : tokens.length !== others.length
          ? `${differ} The source has ${tokens.length} tokens, the prompt ${others.length}: choose the source tokens apart where they do not line up.`.trim()
          : differ || "The two prompts are the same.";
      anchor = Math.min(anchor, Math.max(0, tokens.length - 1));
      move(Math.min(focus, Math.max(0, tokens.length - 1)));
      if (held) strip.children[focus]?.focus();
    },
  );
  store.watch(
    (s) => [s.selection(role), s.tokens(role), s.tokens(other)],
    (positions) => {
      const on = new Set(positions);
      for (const button of strip.children) {
        const selected = on.has(Number(button.dataset.p));
        button.setAttribute("aria-selected", String(selected));
        button.classList.toggle("sel", selected);
      }
      if (!on.has(focus) && positions.length && !strip.contains(document.activeElement)) move(positions[positions.length - 1]);
      const first = strip.children[positions[0]];
      // Within the strip only: the notebook must not move.
      if (first && strip.scrollHeight > strip.clientHeight) {
        const top = first.offsetTop - strip.offsetTop;
        if (top < strip.scrollTop || top + first.offsetHeight > strip.scrollTop + strip.clientHeight) strip.scrollTop = top - 4;
      }
    },
  );
  store.watch(
    (s) => [s.error(role)],
    (message) => fail(message),
  );
}
