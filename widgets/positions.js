// Tokens by words: positions as text and back, and text found across tokens.

import { typed, visible } from "./dom.js";

const TOKENS = "no token: write 9, or 1, 4, or 3:7 (that is 3 to 6), or last, or all";
const HEADS = "no head: write 3, or 1, 4, or 0:3 (that is 0 to 2), or all";
const WORDS = { all: [null, null], last: [-1, null] };
const MOST = 100000; // positions that one slice in a list may stand for

// A text that says nothing here; its message is for the user.
export class Refused extends Error {}

// A list such as "0, 2:5, last" as its parts: one place {text, at}, or a slice {text, from, to, step}, open ends null.
function read(text, none, words) {
  return text.replace(/\s*:\s*/g, ":").split(/[\s,]+/).filter(Boolean).map((part) => {
    if (/^-?\d+$/.test(part)) return { text: part, at: Number(part) };
    const found = part.match(/^(-?\d+)?:(-?\d+)?(?::0*([1-9]\d*))?$/) ?? (Object.hasOwn(words, part) && [part, ...words[part]]);
    if (!found) throw new Refused(`\u201c${part}\u201d says ${none}.`);
    const [, from, to, step] = found;
    const number = (digits) => (digits === undefined || digits === null ? null : Number(digits));
    return { text: part, from: number(from), to: number(to), step: Number(step ?? 1) };
  });
}

// The positions of an edit, as the spec writes them: a slice or a word alone as text, else one by one in their order;
// null for an empty text.
export function positionsOf(text) {
  const parts = read(text, TOKENS, WORDS);
  if (!parts.length) return null;
  return parts.length === 1 && parts[0].at === undefined ? parts[0].text : parts.flatMap(listed);
}

// Heads, one by one; null for all.
export function headsOf(text) {
  const parts = text.trim() === "all" ? [] : read(text, HEADS, {});
  return parts.length ? parts.flatMap(listed) : null;
}

function listed({ text, at, from, to, step }) {
  if (at !== undefined) return [at];
  if (text === "last") return [-1];
  const count = to === null || to < 0 || from < 0 ? 0 : Math.ceil((to - from) / step);
  if (count < 1 || count > MOST) throw new Refused(`\u201c${text}\u201d needs both ends here, the smaller one first, such as 3:7 (that is 3 to 6).`);
  return Array.from({ length: count }, (_, i) => from + i * step);
}

// The tokens to choose of `count`, sorted; `whose` names their prompt in a refusal.
export function choiceOf(text, count, whose) {
  const place = (at) => (at < 0 ? at + count : at);
  const chosen = new Set();
  for (const { text: part, at, from, to, step } of read(text, TOKENS, WORDS)) {
    const [first, end] = at !== undefined ? [place(at), place(at) + 1] : [place(from ?? 0), place(to ?? count)];
    if (first < 0 || end > count || first >= end) throw new Refused(`\u201c${part}\u201d is outside the ${whose}, whose tokens are 0 to ${count - 1}.`);
    for (let p = first; p < end; p += step ?? 1) chosen.add(p);
  }
  return [...chosen].sort((a, b) => a - b);
}

// The text that gives these positions or heads back, in their order: a source's follow the prompt's one by one.
export function written(places) {
  if (places === null || places === undefined || places === "all") return "";
  if (typeof places === "string") return places;
  const list = [places].flat();
  const parts = [];
  for (let i = 0, j; i < list.length; i = j) {
    for (j = i + 1; list[j] === list[j - 1] + 1; ) j++;
    parts.push(...(j - i > 2 && list[i] >= 0 ? [`${list[i]}:${list[j - 1] + 1}`] : list.slice(i, j)));
  }
  return parts.join(", ");
}

// Sorted positions as choiceOf reads them: "1, 3:7", or "all".
export function positionsText(positions, count) {
  return count > 2 && positions.length === count ? "all" : written(positions);
}

// A token for the ear: " Mary" is "space Mary".
export function spoken(text) {
  const words = { "\u2423": "space", "\u23ce": "new line", "\u21e5": "tab", "\u240d": "return", "\u237d": "no-break space" };
  const shown = visible(text).replace(/([\u2423\u23ce\u21e5\u240d\u237d])\1*/g, (run, sign) => run.length > 1 ? ` ${run.length} ${words[sign]}s ` : ` ${words[sign]} `);
  return shown.trim() || "empty";
}

// Where a text stands, upper and lower case alike: [first token, last token] of each place, in order. A character whose
// bytes are several tokens is found in all of them.
export function findText(tokens, query) {
  const wanted = typed(query).toLowerCase();
  if (!wanted) return [];
  let text = "";
  const owners = []; // of each UTF-16 unit of the text: its first and last token
  const add = (piece, from, to) => {
    const lower = piece.toLowerCase();
    text += lower;
    for (let i = 0; i < lower.length; i++) owners.push([from, to]);
  };
  let bytes = []; // [byte, token] that no whole token text holds
  const flush = () => {
    for (let i = 0, size; i < bytes.length; i += size) {
      size = [0xf0, 0xe0, 0xc0].findIndex((lead) => bytes[i][0] >= lead);
      size = size < 0 ? 1 : 4 - size;
      const part = bytes.slice(i, i + size);
      add(new TextDecoder().decode(new Uint8Array(part.map(([byte]) => byte))), part[0][1], part.at(-1)[1]);
    }
    bytes = [];
  };
  tokens.forEach(([, shown], p) => {
    for (const piece of shown.split(/(\u27e8[0-9A-F]{2}(?: [0-9A-F]{2})*\u27e9)/).filter(Boolean)) {
      if (/^\u27e8[0-9A-F]{2}[ \u27e9]/.test(piece)) bytes.push(...piece.slice(1, -1).split(" ").map((hex) => [parseInt(hex, 16), p]));
      else {
        flush();
        add(piece, p, p);
      }
    }
  });
  flush();
  const places = [];
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
    const place = [owners[at][0], owners[at + wanted.length - 1][1]];
    if (String(places.at(-1)) !== String(place)) places.push(place);
  }
  return places;
}
