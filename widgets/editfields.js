// The fields of an edit: what each operation takes, and the way between a typed text and the JSON of the spec.

import { Refused } from "./positions.js";

export const OPS = ["suppress", "scale", "add", "set", "patch"];
export const AMOUNT = { scale: "factor", add: "value", set: "value" };
export const NO_SOURCE = "There is nothing to patch from yet: type a second prompt as Source, above.";

export function one(list) {
  return Array.isArray(list) && list.length === 1 ? list[0] : list;
}

export function amountOf(text, label) {
  const parts = text.replace(/^\s*\[|\]\s*$/g, "").split(/[\s,]+/).filter(Boolean);
  const numbers = parts.map((part) => Number(part.replace("\u2212", "-")));
  if (!numbers.length) throw new Refused(`This operation needs a ${label}: a number such as 0.5.`);
  if (!numbers.every(Number.isFinite)) throw new Refused(`The ${label} \u201c${text.trim()}\u201d is not a number.`);
  if (label === "factor" && numbers.length > 1) throw new Refused(`A factor is one number, with a point, such as 0.5; \u201c${text.trim()}\u201d is ${numbers.length}.`);
  return one(numbers);
}

// An edit with another operation: what both take stays, what the new one needs starts where it changes nothing yet.
export function withOp(edit, op, source) {
  const { factor, value, source: from, source_pos, ...rest } = edit;
  const amount = factor ?? value;
  if (op === "scale") return { ...rest, op, factor: typeof amount === "number" ? amount : 1 };
  if (op in AMOUNT) return { ...rest, op, value: amount ?? 0 };
  if (op !== "patch") return { ...rest, op };
  if (!from && !source) throw new Refused(NO_SOURCE);
  return { ...rest, op, source: from ?? { prompt: source }, source_pos };
}

// A number that is typed or dragged goes out shortly before the numbers of the one before are due: it waits in the kernel
// until they have come, and the engine does not wait for it. More often would take the processor from the engine, for each
// change redraws the page. The last one always goes out: `now` sends what waits, `stop` forgets it.
export function live(send, store) {
  let timer = null;
  let next;
  let last = {}; // the result that was there when a number went out, and when that was
  const stop = () => {
    clearTimeout(timer);
    timer = null;
    store.waiting.delete(now);
  };
  const now = () => {
    if (timer === null) return;
    stop();
    last = { result: store.result, at: performance.now() };
    send(next);
  };
  // The kernel says a little later that it runs, and not at all where a number asks for no run; a view alone never runs.
  const early = () => {
    const passed = performance.now() - last.at;
    if (!store.jobs) return false;
    if (store.jobs.active.some((job) => job.label === "Run")) return passed < 700 * (store.result.seconds ?? 0);
    return store.result === last.result && passed < 250;
  };
  const tick = () => {
    if (!store.waiting.has(now)) stop(); // the page has gone
    else if (early()) timer = setTimeout(tick, 20);
    else now();
  };
  const later = (value) => {
    next = value;
    store.waiting.add(now);
    timer ??= setTimeout(tick, 20);
  };
  return { later, now, stop };
}
