// One heatmap on a canvas: cells, axes, legend, marks, and the value under the pointer or the keyboard's cell.

import { h, number, visible } from "./dom.js";
import { flagged, paint, pool, ramp, range } from "./scale.js";

const BOTTOM = 32; // room for the labels of the columns
const RIGHT = 6;

// show(plot) draws; plot: { key, values, rows, cols, rowLabel(i), colLabel(i), positions: "rows"|"cols"|"both", diverging,
// flag: "line"|"vector"|false, unit, tokens, selected: {row, col}, edited: [{row, col}], say(row, col), masked, label }.
export function createMap(el, { onPick }) {
  const canvas = h("canvas", { class: "map", tabindex: "0", role: "img" });
  const readout = h("span", { class: "readout" });
  const spoken = h("span", { class: "sr", "aria-live": "polite" });
  const bar = h("canvas", { class: "ramp", width: "150", height: "9", "aria-hidden": "true" });
  const low = h("span", { class: "num" });
  const high = h("span", { class: "num" });
  const unit = h("span", { class: "unit" });
  const notes = h("div", { class: "notes" });
  const box = h("div", { class: "mapbox" }, canvas);
  const legend = h("div", { class: "legend" }, low, bar, high, unit, h("span", { class: "sp" }), readout);
  el.append(box, legend, notes, spoken);

  let plot = null;
  let layout = null; // where the cells are, in CSS pixels
  let hover = null;
  let cursor = null;
  let computed = null; // range, flags and pooled cells of the plot's values at this size

  const css = (name) => getComputedStyle(el).getPropertyValue(name).trim();

  function show(next) {
    const fresh = !plot || !next || next.key !== plot.key;
    plot = next;
    if (fresh) {
      computed = null;
      hover = null;
      cursor = null;
    }
    draw();
    say();
  }

  function draw() {
    const width = box.clientWidth;
    const height = box.clientHeight;
    if (!plot || !width || !height) return; // detached or hidden: the observer calls again
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      computed = null;
    }
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    const left = labelWidth(g, height - BOTTOM);
    layout = { left, top: 2, width: width - left - RIGHT, height: height - BOTTOM - 2 };
    layout.cw = layout.width / plot.cols;
    layout.ch = layout.height / plot.rows;
    if (!computed) {
      const flags = flagged(plot, plot.tokens);
      const limits = range(plot, flags);
      const cells = pool(plot.values, plot.rows, plot.cols, Math.max(1, Math.floor(layout.height * ratio)), Math.max(1, Math.floor(layout.width * ratio)));
      computed = { flags, limits, cells };
    }
    const colours = ramp(plot.diverging ? [css("--neg"), css("--mid"), css("--pos")] : [css("--mid"), css("--seq1"), css("--seq2")]);
    drawCells(g, colours);
    drawMarks(g);
    drawAxes(g, height);
    drawLegend(colours);
    canvas.setAttribute("aria-label", `${plot.label}. ${plot.rows} by ${plot.cols} cells; arrow keys move, Enter chooses.`);
  }

  function drawCells(g, colours) {
    const { cells, limits } = computed;
    const { image, odd } = paint(cells, colours, limits.low, limits.high);
    const off = document.createElement("canvas");
    off.width = cells.cols;
    off.height = cells.rows;
    off.getContext("2d").putImageData(image, 0, 0);
    g.imageSmoothingEnabled = false;
    g.drawImage(off, layout.left, layout.top, layout.width, layout.height);
    // Thin gaps where cells are large enough to be told apart.
    g.fillStyle = css("--bg");
    if (layout.cw >= 7) for (let c = 0; c <= plot.cols; c++) g.fillRect(layout.left + c * layout.cw - (layout.cw > 20 ? 1 : 0.5), layout.top, layout.cw > 20 ? 2 : 1, layout.height);
    if (layout.ch >= 5) for (let r = 0; r <= plot.rows; r++) g.fillRect(layout.left, layout.top + r * layout.ch - 0.5, layout.width, 1);
    const w = layout.width / cells.cols;
    const t = layout.height / cells.rows;
    g.fillStyle = css("--fg");
    g.font = `${Math.max(8, Math.min(11, t))}px sans-serif`;
    g.textAlign = "center";
    g.textBaseline = "middle";
    for (const i of odd) {
      const value = cells.values[i];
      if (plot.masked && value === -Infinity) continue;
      const x = layout.left + ((i % cells.cols) + 0.5) * w;
      const y = layout.top + (Math.floor(i / cells.cols) + 0.5) * t;
      if (w >= 8 && t >= 7) g.fillText(Number.isNaN(value) ? "\u00d7" : value > 0 ? "+\u221e" : "\u2212\u221e", x, y);
      else g.fillRect(x - Math.max(1, w) / 2, y - Math.max(1, t) / 2, Math.max(1, w), Math.max(1, t));
    }
  }

  function drawMarks(g) {
    // Flagged positions: hatched, so that their colour is not read against the scale.
    g.strokeStyle = css("--bg");
    g.lineWidth = 1;
    for (const p of computed.flags) {
      const box = plot.positions === "rows" ? [layout.left, layout.top + p * layout.ch, layout.width, layout.ch] : [layout.left + p * layout.cw, layout.top, layout.cw, layout.height];
      g.save();
      g.beginPath();
      g.rect(...box);
      g.clip();
      g.beginPath();
      for (let d = -box[3]; d < box[2]; d += 5) {
        g.moveTo(box[0] + d, box[1] + box[3]);
        g.lineTo(box[0] + d + box[3], box[1]);
      }
      g.stroke();
      g.restore();
    }
    for (const cell of plot.edited ?? []) outline(g, cell, css("--patch"), 2);
    for (const cell of plot.selected ?? []) outline(g, cell, css("--fg"), 1.5);
    if (hover ?? cursor) outline(g, hover ?? cursor, css("--accent"), 1.5);
  }

  // A missing row or column is the whole line.
  function outline(g, { row, col }, colour, width) {
    if (row >= plot.rows || col >= plot.cols) return;
    const w = col === undefined ? layout.width : Math.max(layout.cw, 3);
    const t = row === undefined ? layout.height : Math.max(layout.ch, 3);
    g.strokeStyle = colour;
    g.lineWidth = width;
    g.strokeRect(layout.left + (col ?? 0) * layout.cw, layout.top + (row ?? 0) * layout.ch, w, t);
  }

  function labelWidth(g, height) {
    g.font = axisFont();
    let widest = 0;
    for (const r of ticks(plot.rows, height / plot.rows, 11)) widest = Math.max(widest, g.measureText(plot.rowLabel(r)).width);
    return Math.min(96, Math.ceil(widest) + 8);
  }

  function axisFont() {
    return `11px ${plot.positions === "cols" ? "system-ui, sans-serif" : css("--mono")}`;
  }

  function drawAxes(g) {
    const dim = css("--dim");
    const fg = css("--fg");
    const rowsOn = new Set((plot.selected ?? []).map((cell) => cell.row));
    const colsOn = new Set((plot.selected ?? []).map((cell) => cell.col));
    g.textBaseline = "middle";
    g.textAlign = "right";
    g.font = axisFont();
    for (const r of ticks(plot.rows, layout.ch, 12)) {
      g.fillStyle = rowsOn.has(r) ? fg : dim;
      g.fillText(clip(g, plot.rowLabel(r), layout.left - 8), layout.left - 5, layout.top + (r + 0.5) * layout.ch);
    }
    g.textAlign = "center";
    g.textBaseline = "alphabetic";
    const bottom = layout.top + layout.height;
    const words = plot.positions !== "rows";
    const marks = ticks(plot.cols, layout.cw, words ? 24 : 40);
    const stride = marks.length > 1 ? marks[1] - marks[0] : 1;
    for (const c of marks) {
      const x = layout.left + (c + 0.5) * layout.cw;
      g.fillStyle = colsOn.has(c) ? fg : dim;
      g.font = `10.5px ${words ? css("--mono") : "system-ui, sans-serif"}`;
      g.fillText(clip(g, plot.colLabel(c), layout.cw * stride - 3), x, bottom + 13);
      g.font = "9px system-ui, sans-serif";
      if (words) g.fillText(String(c), x, bottom + 25);
    }
  }

  function drawLegend(colours) {
    const { limits, flags, cells } = computed;
    const g = bar.getContext("2d");
    const image = g.createImageData(150, 9);
    for (let i = 0; i < 150 * 9; i++) image.data.set(colours.subarray(4 * Math.floor(((i % 150) / 149) * 255), 4 * Math.floor(((i % 150) / 149) * 255) + 4), 4 * i);
    g.putImageData(image, 0, 0);
    low.textContent = number(limits.low);
    high.textContent = number(limits.high);
    unit.textContent = plot.unit;
    unit.title = unit.textContent; // cut short where the page is narrow
    const parts = [];
    if (flags.size) {
      const names = [...flags].slice(0, 4).map((p) => `${p} ${visible(plot.tokens[p]?.[1] ?? "")}`);
      parts.push(`Left out of the scale, hatched: token ${names.join(", ")}${flags.size > 4 ? ` and ${flags.size - 4} more` : ""}.`);
    }
    if (limits.clipped) parts.push(`Clipped at ${number(limits.high)}: ${limits.clipped.toLocaleString("en-US")} cells beyond.`);
    if (limits.empty) parts.push("Zero everywhere.");
    if (cells.down > 1 || cells.across > 1) parts.push(`Each drawn cell is the extreme of ${cells.down} \u00d7 ${cells.across} values.`);
    notes.textContent = parts.join(" ");
  }

  function cellAt(event) {
    if (!plot || !layout) return null;
    const box = canvas.getBoundingClientRect();
    const col = Math.floor((event.clientX - box.left - layout.left) / layout.cw);
    const row = Math.floor((event.clientY - box.top - layout.top) / layout.ch);
    return row >= 0 && col >= 0 && row < plot.rows && col < plot.cols ? { row, col } : null;
  }

  function say(aloud = false) {
    const cell = hover ?? cursor ?? plot?.selected?.find((c) => c.row !== undefined && c.col !== undefined);
    readout.replaceChildren();
    if (!cell || !plot || cell.row >= plot.rows || cell.col >= plot.cols) return;
    const value = number(plot.values[cell.row * plot.cols + cell.col]);
    const masked = plot.masked && plot.values[cell.row * plot.cols + cell.col] === -Infinity;
    readout.append(`${plot.say(cell.row, cell.col)}: `, h("b", {}, masked ? "masked" : value));
    if (aloud) spoken.textContent = readout.textContent;
  }

  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -1e9], End: [0, 1e9] };

  function onKey(event) {
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in STEPS) {
      const [down, right] = STEPS[event.key];
      const from = cursor ?? { row: plot.selected?.[0]?.row ?? 0, col: plot.selected?.[0]?.col ?? 0 };
      cursor = { row: clamp(from.row + down, plot.rows), col: clamp(from.col + right, plot.cols) };
      hover = null;
      draw();
      say(true);
    } else if ((event.key === "Enter" || event.key === " ") && cursor) onPick(cursor, plot);
    else return;
    event.preventDefault();
  }

  canvas.addEventListener("keydown", onKey);
  canvas.addEventListener("blur", () => {
    cursor = null;
    if (plot) draw();
  });
  canvas.addEventListener("mousemove", (event) => {
    const cell = cellAt(event);
    if (cell?.row === hover?.row && cell?.col === hover?.col) return;
    hover = cell;
    canvas.style.cursor = cell ? "pointer" : "default";
    draw();
    say();
  });
  canvas.addEventListener("mouseleave", () => {
    hover = null;
    if (plot) draw();
    say();
  });
  canvas.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell) onPick(cell, plot);
  });
  const sized = new ResizeObserver(draw);
  sized.observe(box);
  // The front end's theme may change after the page was drawn.
  // Drawn in the next frame: until then the inherited colours may still be the old ones.
  const themed = new MutationObserver(() => requestAnimationFrame(draw));
  themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"] });

  return {
    show,
    clear() {
      plot = null;
      const g = canvas.getContext("2d");
      g.setTransform(1, 0, 0, 1, 0, 0);
      g.clearRect(0, 0, canvas.width, canvas.height);
      notes.textContent = low.textContent = high.textContent = unit.textContent = "";
      bar.getContext("2d").clearRect(0, 0, 150, 9);
      readout.replaceChildren();
    },
    dispose() {
      sized.disconnect();
      themed.disconnect();
    },
  };
}

function clamp(value, count) {
  return Math.max(0, Math.min(count - 1, value));
}

// Every n-th line, so that labels keep their distance.
function ticks(count, size, room) {
  const steps = [1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
  const step = steps.find((s) => s * size >= room) ?? 10000;
  return Array.from({ length: Math.ceil(count / step) }, (_, i) => i * step);
}

function clip(g, text, width) {
  if (g.measureText(text).width <= width) return text;
  const chars = [...text];
  while (chars.length > 1 && g.measureText(chars.join("") + "\u2026").width > width) chars.pop();
  return chars.join("") + "\u2026";
}
