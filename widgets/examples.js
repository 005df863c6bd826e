// The examples: prompts in which something is known to happen, each with where to look.

import { createMenu } from "./menu.js";

const EXAMPLES = [
  {
    name: "Eiffel Tower",
    about: "A fact: zero a token, and see where Paris comes from.",
    prompt: "The Eiffel Tower is in the city of",
    compare: [" Paris", " London"],
  },
  {
    name: "Mary and John",
    about: "Who gets the drink? Patch the second name, and it is the other one.",
    prompt: "When Mary and John went to the store, Mary gave a drink to",
    source: "When Mary and John went to the store, John gave a drink to",
    compare: [" Mary", " John"],
    positions: [9],
  },
  {
    name: "Induction",
    about: "Words without sense, repeated: heads that look back continue them.",
    prompt: "river lamp seven purple cat stone river lamp seven purple cat",
    compare: [" stone", " cat"],
  },
  {
    name: "Capitals",
    about: "Patch the country, and Paris becomes Rome.",
    prompt: "The capital of France is",
    source: "The capital of Italy is",
    compare: [" Paris", " Rome"],
    positions: [3],
  },
];

export function mountExamples(el, store) {
  const items = () =>
    EXAMPLES.map(({ name, about, ...example }) => ({ name, about, take: () => store.set({ source: "", positions: [], source_positions: [], edits: [], ...example }) }));
  el.append(createMenu("Examples", items));
}
