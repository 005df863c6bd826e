// Small helpers for building the page: elements, tokens as text, numbers as text.

export function h(tag, props = {}, ...children) {
  const el = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) el.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "checked" || key === "disabled") el[key] = value;
    else el.setAttribute(key, value === true ? "" : value);
  }
  el.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return el;
}

// Characters that would be invisible, or would reorder the page, are shown by a sign or by their code.
const SIGNS = { " ": "\u2423", "\n": "\u23ce", "\t": "\u21e5", "\r": "\u240d", "\u00a0": "\u237d" };
const HIDDEN = /[\u0000-\u0020\u007f-\u00a0\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

// Bytes that are no whole character arrive as "⟨E4 BD⟩": the space in them is ours, not the prompt's.
const BYTES = /\u27e8[0-9A-F ]+\u27e9/g;

export function visible(text) {
  return text.replace(BYTES, (bytes) => bytes.replaceAll(" ", "\u202f")).replace(HIDDEN, (char) => SIGNS[char] ?? `\u2039${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u203a`);
}

// What a user typed back into the token it stands for.
export function typed(text) {
  return text.replaceAll("\u2423", " ").replaceAll("\u23ce", "\n").replaceAll("\u21e5", "\t");
}

// A token as text nodes: its leading spaces dimmed.
export function tokenNodes(text) {
  const spaces = text.match(/^ */)[0];
  const nodes = [];
  if (spaces) nodes.push(h("i", {}, visible(spaces)));
  nodes.push(document.createTextNode(text === "" ? "\u2205" : visible(text.slice(spaces.length))));
  return nodes;
}

export function token(text) {
  return h("code", { class: "t", dir: "auto" }, ...tokenNodes(text));
}

const MINUS = "\u2212";

export function signed(value, digits = 1) {
  if (value === null || Number.isNaN(value)) return "NaN";
  const text = Math.abs(value).toFixed(digits);
  if (Number(text) === 0) return text;
  return (value > 0 ? "+" : MINUS) + text;
}

export function percent(p) {
  return p === null ? "NaN" : (p * 100).toFixed(1) + "%";
}

// Four significant digits, with thousands separated: 21,977, 151.2, 0.0312.
export function number(value) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "+\u221e" : MINUS + "\u221e";
  const size = Math.abs(value);
  const text = size === 0 ? "0" : size >= 1000 ? Math.round(size).toLocaleString("en-US") : size >= 0.001 ? String(Number(size.toPrecision(4))) : size.toExponential(1);
  return (value < 0 ? MINUS : "") + text;
}

export function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
}

// Why there is no patched run, where an edit is wrong: all of them run, or none.
export function notRun(error) {
  return error.index === null ? "The edits were not run: see what is wrong with them." : `The edits were not run: see what is wrong with edit ${error.index + 1}.`;
}

// A run in a few words: the likeliest token and its probability, "Paris 66% to 12%" with an edit.
export function headline({ rows, edited }, name = visible) {
  if (!rows?.length) return "";
  const whole = (p) => (p === null ? "NaN" : `${Math.round(p * 100)}%`);
  const [text, , before, after] = rows.reduce((a, b) => (b[2] > a[2] ? b : a));
  return `${name(text)} ${whole(before)}${edited ? ` to ${whole(after)}` : ""}`;
}

// Positions as a student would write them: 3, 5 to 8.
export function ranges(positions) {
  const sorted = [...positions].sort((a, b) => a - b);
  const parts = [];
  for (let i = 0; i < sorted.length; ) {
    let j = i;
    while (j + 1 < sorted.length && sorted[j + 1] === sorted[j] + 1) j++;
    parts.push(j > i + 1 ? `${sorted[i]} to ${sorted[j]}` : sorted.slice(i, j + 1).join(", "));
    i = j + 1;
  }
  return parts.join(", ");
}

// An error line that screen readers announce; empty and hidden while there is none.
export function alertLine(el) {
  const line = h("div", { class: "error", role: "alert", hidden: true });
  el.append(line);
  return (message) => {
    line.hidden = !message;
    if (line.textContent !== (message ?? "")) line.textContent = message ?? "";
  };
}

// Rows of radio-like buttons, one of them pressed.
export function segment(label, options, onPick) {
  const buttons = options.map(([value, text]) => h("button", { type: "button", "data-value": value, onclick: () => onPick(value) }, text));
  const el = h("span", { class: "seg", role: "group", "aria-label": label }, ...buttons);
  return { el, select: (value) => buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.value === String(value)))) };
}

// Keys pressed inside stay inside: the notebook would delete or add cells. Escape and the front end's own Ctrl and Cmd
// keys go on.
export function keepKeys(root) {
  root.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" && !event.ctrlKey && !event.metaKey) event.stopPropagation();
  });
}
