// A token of the source, carried to a token of the prompt, which is then patched from it at the chosen hooks. By dragging
// it there; by picking it up with a button or the key p, and choosing the token to patch by a tap or by keys.

import { h } from "./dom.js";
import { addEdits, patchesHere, placeWords, refusal } from "./edits.js";
import { Refused } from "./positions.js";

// `prompt` and `source` are the lines of the two prompts: {strip, tools, note, say, fail}.
export function mountCarry(root, store, prompt, source) {
  const button = h("button", { type: "button", "aria-pressed": "false", title: "Patch from this token: choose a token of the prompt next. Or drag it there, or press p on it", onclick: () => (from === null ? pickUp(picked()) : putDown()) }, "patch to\u2026");
  const line = h("div", { class: "notes carry", role: "status" });
  source.tools.insertBefore(button, source.tools.lastChild);
  source.note.before(line);
  const widget = root.closest(".axp");
  let from = null; // the source's token on its way
  let over = null; // the prompt's token that it would patch
  let aimed = false; // it was picked up, not dragged
  let press = null; // a pointer that is down on a token of the source, and has not left it yet

  // The token of the last gesture, else the first chosen one.
  function picked() {
    const chosen = store.selection("source");
    return chosen.includes(source.strip.current) ? source.strip.current : chosen[0];
  }

  function words() {
    const reason = refusal(store);
    if (reason) return `Nothing can be patched here: ${reason}. Choose another hook; Escape cancels.`;
    if (over === null) return `Token ${from} of the source: drop it on the token of the prompt to patch at ${placeWords(store)}; Escape cancels.`;
    return would();
  }

  const would = () => `patch ${placeWords(store)}: pos ${over} from pos ${from} of the second prompt`;

  function show() {
    const carrying = from !== null;
    button.setAttribute("aria-pressed", String(carrying));
    root.classList.toggle("carrying", carrying);
    source.strip.flag("carried", from);
    prompt.strip.flag("target", carrying && !refusal(store) ? over : null);
    source.note.hidden = carrying;
    line.textContent = carrying ? `${words()}${aimed ? ". Choose its token in the prompt: a tap, or arrows and Enter; Escape cancels." : ""}` : "";
  }

  function take(p, to) {
    from = p;
    over = to;
    document.getSelection()?.removeAllRanges(); // the text that a drag had begun to select
    window.addEventListener("keydown", escape, true); // a drag does not need the focus here
    widget.addEventListener("focusout", leave);
    show();
  }

  function putDown() {
    press = null;
    if (from === null) return;
    window.removeEventListener("keydown", escape, true);
    widget.removeEventListener("focusout", leave);
    from = over = null;
    aimed = false;
    prompt.strip.aim(null);
    show();
  }

  function drop(to) {
    over = to;
    if (refusal(store)) {
      source.say(words());
      return show();
    }
    const done = would();
    try {
      const edits = patchesHere(store, [to]).map((edit) => ({ ...edit, source_pos: from }));
      putDown();
      addEdits(store, edits);
      source.say(`added: ${done}`);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      putDown();
      source.fail(error.message); // until other tokens come
    }
  }

  // The notebook goes on with what it is told outside.
  function leave({ relatedTarget }) {
    if (!widget.contains(relatedTarget) && document.hasFocus()) putDown();
  }

  function escape(event) {
    if (event.key !== "Escape") return;
    if (!widget.contains(event.target)) return putDown();
    event.preventDefault();
    event.stopPropagation();
    const back = from;
    const held = prompt.strip.list.contains(document.activeElement);
    putDown();
    source.say("nothing patched");
    if (held) source.strip.focus(back);
  }

  // By button or key: the prompt's next gesture says where to.
  function pickUp(p) {
    const to = Math.min(p, store.tokens("prompt").length - 1);
    take(p, to);
    prompt.strip.aim({
      move(at) {
        over = at;
        show();
        prompt.say(prompt.strip.name(at));
      },
      choose(at) {
        const back = from;
        drop(at);
        if (from === null) source.strip.focus(back); // to go on with the next one
      },
    });
    prompt.strip.focus(to);
    aimed = true;
    show();
  }
  prompt.strip.list.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".tok");
    if (!aimed || !token) return;
    over = Number(token.dataset.p);
    show();
  });

  source.strip.list.addEventListener("keydown", (event) => {
    if (event.key !== "p" || event.ctrlKey || event.metaKey || event.altKey || button.hidden) return;
    event.preventDefault();
    pickUp(source.strip.current);
  });
  source.strip.list.setAttribute("aria-keyshortcuts", "p");
  source.strip.list.classList.add("gives");

  // By pointer: a press that stays on its token is a click and chooses it, one that leaves it carries it.
  source.strip.list.addEventListener("pointerdown", (event) => {
    const token = event.target.closest(".tok");
    if (!token || !event.isPrimary || event.button || button.hidden) return;
    putDown();
    press = { id: event.pointerId, token };
    follow(true);
  });

  function follow(on) {
    for (const [name, heard] of [["pointermove", onMove], ["pointerup", onUp], ["pointercancel", onUp]]) window[on ? "addEventListener" : "removeEventListener"](name, heard, true);
  }

  const tokenAt = ({ clientX, clientY }) => root.getRootNode().elementFromPoint(clientX, clientY)?.closest(".tok");
  const targetAt = (event) => {
    const token = tokenAt(event);
    return token && prompt.strip.list.contains(token) ? Number(token.dataset.p) : null;
  };

  function onMove(event) {
    if (press?.id !== event.pointerId) return;
    if (from === null && tokenAt(event) !== press.token) take(Number(press.token.dataset.p), null);
    if (from === null) return;
    event.preventDefault();
    const to = targetAt(event);
    if (to === over) return;
    over = to;
    show();
  }

  function onUp(event) {
    if (press && press.id !== event.pointerId) return;
    follow(false);
    const to = event.type === "pointerup" && from !== null && press ? targetAt(event) : null;
    if (to !== null) drop(to);
    putDown();
  }

  // Other texts, whose tokens come later, or another hook meanwhile.
  store.watch(
    (s) => [s.tokens("prompt"), s.tokens("source"), s.state.prompt, s.state.source],
    (prompts, sources) => {
      button.hidden = !prompts.length || !sources.length;
      putDown();
    },
  );
  store.watch(
    (s) => [s.state.hook, s.state.hooks, s.state.heads],
    () => from !== null && show(),
  );
  return putDown;
}
