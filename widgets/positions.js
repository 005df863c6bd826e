// Choosing tokens by words: positions as text and back, and text found across tokens.

import { typed, visible } from "./dom.js";

export class NoPositions extends Error {}

// "9", "1, 4", "3:7", "-2:", "last" or "all" as sorted positions; `whose` names the prompt in a refusal.
export function parsePositions(text, count, whose) {
  const chosen = new Set();
  for (const part of text.replace(/\s*:\s*/g, ":").split(/[\s,]+/).filter(Boolean)) {
    const [from, to, step] = range(part, count);
    if (from < 0 || to > count || from >= to) throw new NoPositions(`\u201c${part}\u201d is outside the ${whose}, whose tokens are 0 to ${count - 1}.`);
    for (let p = from; p < to; p += step) chosen.add(p);
  }
  return [...chosen].sort((a, b) => a - b);
}

function range(part, count) {
  const at = (digits) => Number(digits) + (digits.startsWith("-") ? count : 0);
  if (part === "all") return [0, count, 1];
  if (part === "last") return [count - 1, count, 1];
  if (/^-?\d+$/.test(part)) return [at(part), at(part) + 1, 1];
  const slice = part.match(/^(-?\d+)?:(-?\d+)?(?::0*([1-9]\d*))?$/);
  if (!slice) throw new NoPositions(`\u201c${part}\u201d says no token: write 9, or 1, 4, or 3:7 (that is 3 to 6), or last, or all.`);
  return [at(slice[1] ?? "0"), slice[2] ? at(slice[2]) : count, Number(slice[3] ?? 1)];
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

// Sorted positions as parsePositions reads them: "1, 3:7", or "all".
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
