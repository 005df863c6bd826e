// What a gesture adds: an edit at each chosen hook that can be edited, at the chosen tokens and heads.

import { NO_SOURCE, one } from "./editfields.js";
import { Refused, written } from "./positions.js";
import { findHook } from "./store.js";

// The chosen hooks: a whole layer or component that a header chose, else the one hook.
export function chosenHooks({ hook, hooks }) {
  return hooks?.includes(hook) ? hooks : [hook];
}

// Why nothing can be edited at a hook; empty where it can.
export function closed(about, name) {
  const { column, layer } = findHook(about, name) ?? {};
  return column ? column.missing[String(layer)] ?? (column.editable ? "" : "can be read, not edited") : "there is no such hook";
}

// The chosen hooks that an edit goes to, and for each of the others why not. Chosen heads are those of `state.hook`: of
// many hooks only those with as many heads have them.
export function targets(store) {
  const names = chosenHooks(store.state);
  const heads = headsHere(store);
  const count = (name) => findHook(store.about, name)?.column.heads;
  const why = (name) => closed(store.about, name) || (heads && count(name) !== count(store.state.hook) ? `has no head ${written(heads)} of these` : "");
  return { open: names.filter((name) => !why(name)), skipped: names.flatMap((name) => (why(name) ? [[name, why(name)]] : [])) };
}

function headsHere({ about, state: { hook, heads } }) {
  return heads.length && findHook(about, hook)?.column.heads ? heads : null;
}

// Where the next edits go, in words: "blocks.12.hook_out", "blocks.3.attn.o.hook_in head 2", "12 hooks".
export function placeWords(store) {
  const { open } = targets(store);
  const heads = headsHere(store);
  return `${open.length > 1 ? `${open.length} hooks` : open[0] ?? store.state.hook}${heads ? ` head ${written(heads)}` : ""}`;
}

// Why the choice takes no edit at all; empty where it takes one.
export function refusal(store) {
  const { open, skipped } = targets(store);
  return open.length ? "" : skipped.length > 1 ? "none of the chosen hooks can be edited" : `${skipped[0][0]}: ${skipped[0][1]}`;
}

// The edits of an operation, without what the operation needs.
export function editsHere(store, op, pos = store.selection()) {
  const heads = headsHere(store);
  const reason = refusal(store);
  if (reason) throw new Refused(reason);
  return targets(store).open.map((hook) => ({ hook, op, ...(pos.length ? { pos: one(pos) } : {}), enabled: true, ...(heads ? { head: one(heads) } : {}) }));
}

// Patches from the source: from the tokens chosen there, if they are chosen apart, else from the same positions.
export function patchesHere(store, pos, sources = store.state.source_positions.length ? store.selection("source") : null) {
  const edits = editsHere(store, "patch", pos);
  if (!store.state.source) throw new Refused(NO_SOURCE);
  const apart = sources !== null && JSON.stringify(one(sources)) !== JSON.stringify(edits[0].pos);
  return edits.map((edit) => ({ ...edit, source: { prompt: store.state.source }, ...(apart ? { source_pos: one(sources) } : {}) }));
}

// One gesture and one step, however many edits it adds. Returns what was done, in words.
export function addEdits(store, edits) {
  const before = store.state.edits.length;
  store.set({ edits: [...store.state.edits, ...edits] });
  const [{ op, hook }] = edits;
  return edits.length > 1 ? `edits ${before + 1} to ${before + edits.length} added: ${op} at ${edits.length} hooks` : `edit ${before + 1} added: ${op} at ${hook}`;
}
