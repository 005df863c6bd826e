// One heatmap on a canvas: cells, axes, legend, marks, zoom, and the value under the pointer or the keyboard's cell.

import { h, number, visible } from "./dom.js";
import { flagged, paint, pool, ramp, range } from "./scale.js";
import { watchTheme, zoomOf } from "./screen.js";
import { fillTable, named, of } from "./table.js";
import { deepest, moved, revealed, WHOLE, windowOf, zoomed } from "./view.js";

const RIGHT = 6;
const CELL = { width: 46, height: 24 }; // cells this large need no more zoom, in CSS pixels
const MANY = 2e5; // cells
const SLOPE = Math.SQRT1_2; // labels that do not fit side by side are turned by 45 degrees

// show(plot) draws; plot: { key, values, rows, cols, rowLabel(i), colLabel(i), corner, positions: "rows"|"cols"|"both",
// diverging, flag: "line"|"vector"|false, unit, tokens, selected: {row, col}, edited: [{row, col}], say(row, col), masked,
// label }. The number of a row or column is written beside a label that is not the number itself.
// onLook({zoom}) and onLook({table}) keep how the map is looked at; follow(zoom, table) looks at it so.
export function createMap(el, { onPick, onLook }) {
  // "application": the arrow keys are for the map, and not for a screen reader's own cursor.
  const canvas = h("canvas", { class: "map", tabindex: "0", role: "application", "aria-roledescription": "heatmap" });
  const readout = h("span", { class: "readout" });
  const spoken = h("span", { class: "sr", "aria-live": "polite" });
  const bar = h("canvas", { class: "ramp", width: "150", height: "9", "aria-hidden": "true" });
  const low = h("span", { class: "num" });
  const high = h("span", { class: "num" });
  const unit = h("span", { class: "unit" });
  const notes = h("span", { class: "notes" });
  const table = h("table", { class: "numbers" });
  const sheet = h("div", { class: "sheet", role: "region", "aria-label": "The map as a table", tabindex: "0", hidden: true }, table);
  const button = (text, label, onclick) => h("button", { type: "button", title: label, "aria-label": label, onclick }, text);
  const tools = {
    out: button("\u2212", "Zoom out", () => zoom(1 / 2)),
    in: button("+", "Zoom in", () => zoom(2)),
    all: button("All", "Show the whole map", () => look(WHOLE)),
    table: h("button", { type: "button", "aria-expanded": "false", title: "The cells that are shown as a table of numbers", onclick: () => tabulate(sheet.hidden) }, "Show as table"),
  };
  const box = h("div", { class: "mapbox" }, canvas, sheet);
  const legend = h("div", { class: "legend" }, low, bar, high, unit, h("span", { class: "sp" }), h("span", { class: "zoom", role: "group", "aria-label": "Zoom" }, tools.out, tools.in, tools.all), tools.table);
  el.append(box, legend, h("div", { class: "legend foot" }, notes, h("span", { class: "sp" }), readout), spoken);

  let plot = null;
  let view = WHOLE;
  let kept = {}; // how far which map is zoomed: {map, ...view}, or none
  let shown = null; // the cells in sight: { row, col, rows, cols }
  let size = { width: 0, height: 0 }; // of the canvas, in CSS pixels
  let ratio = 1; // pixels of the screen for one of CSS
  let layout = null; // where the cells are on it
  let hover = null;
  let cursor = null; // the current cell; none: the selected one
  let frame = 0; // in which it is to be drawn
  let scale = null; // range, flagged positions and widths of labels: they do not change while the map is zoomed
  const base = document.createElement("canvas"); // all but the cell under the pointer, drawn once

  const css = (name) => getComputedStyle(el).getPropertyValue(name).trim();
  const text = (size, mono = false) => `${(size * parseFloat(getComputedStyle(el).fontSize)) / 13}px ${mono ? css("--mono") : "system-ui, sans-serif"}`;
  const words = () => plot.positions !== "rows"; // whether columns are tokens
  const snap = (at) => Math.round(at * ratio) / ratio; // on an edge between pixels of the screen
  const whole = (width) => Math.max(1, Math.round(width * ratio)) / ratio; // of whole pixels

  function show(next) {
    if (next.key !== plot?.key) {
      view = keptOf(next.key);
      hover = cursor = scale = null;
    } else if (JSON.stringify(next.selected) !== JSON.stringify(plot.selected)) cursor = null;
    if (next.values !== plot?.values) scale = null;
    plot = next;
    update();
    say();
  }

  // Without a page there are no fonts to measure and nothing is drawn: the observer calls again.
  function update() {
    if (!plot || !box.isConnected || !box.clientWidth) return;
    // Of very many cells the range takes as long as the picture: one task each, so that the page answers between them.
    if (!scale && plot.rows * plot.cols > MANY) {
      scale = measure();
      soon();
    } else draw();
  }

  // How few cells may fill the map.
  function least() {
    return { rows: Math.min(plot.rows, Math.ceil(size.height / CELL.height)), cols: Math.min(plot.cols, Math.ceil(size.width / CELL.width)) };
  }

  const keptOf = (key) => (kept.map === key ? { scale: kept.scale, row: kept.row, col: kept.col } : WHOLE);

  function look(next) {
    if (!plot) return;
    view = next;
    draw();
    say();
    keep();
  }

  function keep() {
    onLook({ zoom: view.scale > 1 ? { map: plot.key, ...view } : {} });
  }

  function follow(zoom, table) {
    kept = zoom;
    const next = plot && keptOf(plot.key);
    if (next && ["scale", "row", "col"].some((name) => next[name] !== view[name])) {
      view = next;
      draw();
      say();
    }
    if (table !== sheet.hidden) return;
    sheet.hidden = !table;
    canvas.hidden = table;
    tools.table.setAttribute("aria-expanded", String(table));
    tools.table.textContent = table ? "Show as map" : "Show as table";
    if (plot) draw();
  }

  const middle = () => ({ row: shown.row + shown.rows / 2 - 0.5, col: shown.col + shown.cols / 2 - 0.5 });

  function zoom(factor, cell = current() ?? middle()) {
    if (plot && layout) look(zoomed(view, factor, cell, plot, least()));
  }

  function soon() {
    if (!frame) frame = requestAnimationFrame(() => ((frame = 0), draw()));
  }

  function measure() {
    const g = base.getContext("2d");
    const widest = (count, label) => {
      let most = 0;
      for (let i = 0, step = Math.ceil(count / 300); i < count; i += step) most = Math.max(most, g.measureText(label(i)).width);
      return Math.ceil(most);
    };
    g.font = text(11, plot.positions !== "cols");
    const rows = widest(plot.rows, (r) => named(plot.rowLabel(r), r));
    g.font = text(10.5, true);
    const flags = flagged(plot, plot.tokens);
    return { flags, limits: range(plot, flags), rows: Math.min(104, rows), cols: words() ? widest(plot.cols, plot.colLabel) : 0 };
  }

  function draw() {
    // As many pixels as the box takes on the screen, from edge to edge: with one more or less all would be blurred.
    const edges = box.getBoundingClientRect();
    const across = (from, to) => Math.round(to * window.devicePixelRatio) - Math.round(from * window.devicePixelRatio);
    const pixels = { width: across(edges.left, edges.right), height: across(edges.top, edges.bottom) };
    if (!plot || !pixels.width || !pixels.height) return; // detached or hidden: the observer calls again
    ratio = window.devicePixelRatio * zoomOf(box);
    const { width, height } = (size = { width: pixels.width / ratio, height: pixels.height / ratio });
    for (const surface of [canvas, base]) if (surface.width !== pixels.width || surface.height !== pixels.height) Object.assign(surface, pixels);
    scale ??= measure();
    const g = base.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    shown = windowOf(view, plot, least());
    const left = snap(scale.rows + 8);
    layout = { left, top: snap(2), width: snap(width - RIGHT) - left };
    layout.cw = layout.width / shown.cols;
    layout.slanted = words() && layout.cw < Math.min(scale.cols + 4, CELL.width);
    const bottom = layout.slanted ? Math.min(scale.cols + 22, 78) * SLOPE + 10 : words() ? 30 : 18;
    layout.height = snap(Math.max(20, height - bottom - 2));
    layout.ch = layout.height / shown.rows;
    const colours = ramp(plot.diverging ? [css("--neg"), css("--mid"), css("--pos")] : [css("--mid"), css("--seq1"), css("--seq2")]);
    const cells = pool(plot.values, plot.rows, plot.cols, Math.max(1, Math.floor(layout.height * ratio)), Math.max(1, Math.floor(layout.width * ratio)), shown, plot.masked);
    g.save();
    g.beginPath();
    g.rect(layout.left, layout.top, layout.width, layout.height);
    g.clip();
    drawCells(g, cells, colours);
    for (const cell of plot.edited ?? []) outline(g, cell, css("--patch"), 3.5); // seen beside the next one
    for (const cell of plot.selected ?? []) outline(g, cell, css("--fg"), 1.5);
    g.restore();
    drawAxes(g);
    drawLegend(cells, colours);
    drawPointed();
    canvas.setAttribute("aria-label", `${plot.label}. ${plot.rows} by ${plot.cols} cells. Arrow keys move, Enter chooses, plus and minus zoom, 0 shows all.`);
    if (!sheet.hidden) fillTable(table, plot, shown, cursor ?? plot.selected?.[0]);
  }

  // What was drawn before, and the cell under the pointer or the keyboard.
  function drawPointed() {
    const g = canvas.getContext("2d");
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, canvas.width, canvas.height);
    g.drawImage(base, 0, 0);
    const cell = hover ?? (canvas.matches(":focus") ? cursor : null);
    if (!cell) return;
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    outline(g, cell, css("--accent"), 1.5);
  }

  function hatch(g, colour) {
    const side = Math.round(5 * ratio);
    const tile = document.createElement("canvas");
    tile.width = tile.height = side;
    const t = tile.getContext("2d");
    t.strokeStyle = colour;
    t.lineWidth = ratio;
    t.beginPath();
    for (const d of [-side, 0, side]) {
      t.moveTo(d - 1, side + 1);
      t.lineTo(d + side + 1, -1);
    }
    t.stroke();
    const pattern = g.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / ratio));
    return pattern;
  }

  function drawCells(g, cells, colours) {
    const { limits, flags } = scale;
    // The last block of a pooled map may hold fewer cells than the others: it ends outside.
    const w = cells.across * layout.cw;
    const t = cells.down * layout.ch;
    const signs = w >= 9 && t >= 7;
    const [r, gr, b] = ramp([css("--fg"), css("--fg")]);
    const { image, odd } = paint(cells, colours, limits.low, limits.high, signs ? null : new Uint32Array(new Uint8Array([r, gr, b, 255]).buffer)[0], plot.masked);
    const off = document.createElement("canvas");
    off.width = cells.cols;
    off.height = cells.rows;
    off.getContext("2d").putImageData(image, 0, 0);
    if (plot.masked) {
      g.fillStyle = hatch(g, css("--line"));
      g.fillRect(layout.left, layout.top, layout.width, layout.height);
    }
    g.imageSmoothingEnabled = false;
    g.drawImage(off, layout.left, layout.top, w * cells.cols, t * cells.rows);
    // Thin gaps where cells are large enough to be told apart.
    g.fillStyle = css("--bg");
    const wide = whole(layout.cw > 20 ? 2 : 1);
    const thin = whole(1);
    if (layout.cw >= 7) for (let c = 0; c <= shown.cols; c++) g.fillRect(snap(layout.left + c * layout.cw - wide / 2), layout.top, wide, layout.height);
    if (layout.ch >= 5) for (let r = 0; r <= shown.rows; r++) g.fillRect(layout.left, snap(layout.top + r * layout.ch - thin / 2), layout.width, thin);
    // Flagged positions: hatched, so that their colour is not read against the scale.
    g.fillStyle = hatch(g, css("--bg"));
    for (const p of flags) {
      if (plot.positions === "rows") g.fillRect(layout.left, layout.top + (p - shown.row) * layout.ch, layout.width, layout.ch);
      else g.fillRect(layout.left + (p - shown.col) * layout.cw, layout.top, layout.cw, layout.height);
    }
    const x = (i) => layout.left + ((i % cells.cols) + 0.5) * w;
    const y = (i) => layout.top + (Math.floor(i / cells.cols) + 0.5) * t;
    // The sign without the colour: a dash in the middle of what is clearly below zero.
    layout.dashes = plot.diverging && t >= 6;
    if (layout.dashes) {
      const dash = Math.min(7, w > 4 ? w * 0.6 : w);
      g.fillStyle = css("--fg");
      g.globalAlpha = 0.6;
      for (let i = 0; i < cells.values.length; i++) if (cells.values[i] < -0.02 * limits.high && cells.values[i] !== -Infinity) g.fillRect(x(i) - dash / 2, y(i) - 0.5, dash, 1);
      g.globalAlpha = 1;
    }
    if (!signs) return;
    g.fillStyle = css("--fg");
    g.font = `${Math.max(8, Math.min(11, t))}px sans-serif`;
    g.textAlign = "center";
    g.textBaseline = "middle";
    for (const i of odd) g.fillText(Number.isNaN(cells.values[i]) ? "\u00d7" : cells.values[i] > 0 ? (w < 20 ? "\u221e" : "+\u221e") : "\u2212\u221e", x(i), y(i));
  }

  // A missing row or column is the whole line.
  function outline(g, { row, col }, colour, width) {
    const inside = (at, from, count) => at === undefined || (at >= from && at < from + count);
    if (!inside(row, shown.row, shown.rows) || !inside(col, shown.col, shown.cols)) return;
    const w = col === undefined ? layout.width : Math.max(layout.cw, 3);
    const t = row === undefined ? layout.height : Math.max(layout.ch, 3);
    const line = whole(width);
    const edge = (at) => snap(at - line / 2) + line / 2;
    const [x, y] = [layout.left + ((col ?? shown.col) - shown.col) * layout.cw, layout.top + ((row ?? shown.row) - shown.row) * layout.ch];
    g.strokeStyle = colour;
    g.lineWidth = line;
    g.strokeRect(edge(x), edge(y), edge(x + w) - edge(x), edge(y + t) - edge(y));
  }

  function drawAxes(g) {
    const dim = css("--dim");
    const fg = css("--fg");
    const rowsOn = new Set((plot.selected ?? []).map((cell) => cell.row));
    const colsOn = new Set((plot.selected ?? []).map((cell) => cell.col));
    g.textBaseline = "middle";
    g.textAlign = "right";
    g.font = text(11, plot.positions !== "cols");
    for (const r of ticks(shown.row, shown.rows, layout.ch, 12)) {
      g.fillStyle = rowsOn.has(r) ? fg : dim;
      g.fillText(clip(g, named(plot.rowLabel(r), r), scale.rows), layout.left - 5, Math.max(6, layout.top + (r - shown.row + 0.5) * layout.ch));
    }
    const bottom = layout.top + layout.height;
    const middle = (c) => layout.left + (c - shown.col + 0.5) * layout.cw;
    if (layout.slanted) {
      g.font = text(10.5, true);
      for (const c of ticks(shown.col, shown.cols, layout.cw, 15)) {
        const room = Math.min(100, middle(c) / SLOPE - 6);
        g.save();
        g.translate(middle(c) + 3, bottom + 6);
        g.rotate(-Math.PI / 4);
        g.fillStyle = colsOn.has(c) ? fg : dim;
        const at = ` ${c}`;
        g.fillText(clip(g, plot.colLabel(c), Math.min(room, 78) - g.measureText(at).width) + at, 0, 0);
        g.restore();
      }
      return;
    }
    g.textAlign = "center";
    g.textBaseline = "alphabetic";
    const marks = ticks(shown.col, shown.cols, layout.cw, words() ? CELL.width / 2 : 40);
    const stride = marks.length > 1 ? marks[1] - marks[0] : 1;
    for (const c of marks) {
      g.fillStyle = colsOn.has(c) ? fg : dim;
      g.font = text(10.5, words());
      g.fillText(clip(g, plot.colLabel(c), layout.cw * stride - 3), middle(c), bottom + 13);
      g.font = text(9);
      if (words()) g.fillText(String(c), middle(c), bottom + 25);
    }
  }

  function drawLegend(cells, colours) {
    const { limits, flags } = scale;
    const g = bar.getContext("2d");
    const image = g.createImageData(150, 9);
    for (let i = 0; i < 150 * 9; i++) image.data.set(colours.subarray(4 * Math.floor(((i % 150) / 149) * 255), 4 * Math.floor(((i % 150) / 149) * 255) + 4), 4 * i);
    g.putImageData(image, 0, 0);
    low.textContent = number(limits.low);
    high.textContent = number(limits.high);
    unit.textContent = plot.unit;
    unit.title = unit.textContent; // cut short where the page is narrow
    const parts = [];
    const zoomable = deepest(plot, least()) > view.scale * 1.001;
    if (view.scale > 1) parts.push(`Shown: ${of("rows", shown.row, shown.rows, plot.rows)}, ${of("columns", shown.col, shown.cols, plot.cols)}; drag to move.`);
    if (flags.size) {
      const names = [...flags].slice(0, 4).map((p) => `${p} ${visible(plot.tokens[p]?.[1] ?? "")}`);
      parts.push(`Left out of the scale, hatched: token ${names.join(", ")}${flags.size > 4 ? ` and ${flags.size - 4} more` : ""}.`);
    }
    if (limits.clipped) parts.push(`Clipped at ${number(limits.high)}: ${limits.clipped.toLocaleString("en-US")} cells beyond.`);
    if (limits.empty) parts.push("Zero everywhere.");
    if (cells.down > 1 || cells.across > 1) parts.push(`Each drawn cell is the extreme of ${cells.down} \u00d7 ${cells.across} values.`);
    if (plot.diverging && !limits.empty) parts.push(layout.dashes ? "A dash: below zero." : zoomable ? "Zoom in to see signs." : "");
    if (plot.masked) parts.push("Hatched: masked.");
    notes.textContent = parts.filter(Boolean).join(" ");
    // Not disabled: what is focused would lose the focus.
    for (const [tool, idle] of [[tools.in, !zoomable], [tools.out, view.scale === 1], [tools.all, view.scale === 1]]) tool.setAttribute("aria-disabled", String(idle));
    canvas.style.touchAction = view.scale > 1 ? "none" : "pan-x pan-y"; // two fingers are the map's, one scrolls the page
  }

  function cellAt(event) {
    if (!plot || !layout) return null;
    const box = canvas.getBoundingClientRect();
    const zoom = zoomOf(canvas);
    const col = Math.floor(((event.clientX - box.left) / zoom - layout.left) / layout.cw);
    const row = Math.floor(((event.clientY - box.top) / zoom - layout.top) / layout.ch);
    return row >= 0 && col >= 0 && row < shown.rows && col < shown.cols ? { row: shown.row + row, col: shown.col + col } : null;
  }

  function current() {
    const cell = hover ?? cursor ?? plot?.selected?.find((c) => c.row !== undefined && c.col !== undefined);
    return cell && plot && cell.row < plot.rows && cell.col < plot.cols ? cell : null;
  }

  function say(aloud = false) {
    const cell = current();
    readout.replaceChildren();
    if (!cell) return;
    const value = plot.values[cell.row * plot.cols + cell.col];
    readout.append(`${plot.say(cell.row, cell.col)}: `, h("b", {}, plot.masked && value === -Infinity ? "masked" : exact(value)));
    if (aloud) spoken.textContent = readout.textContent;
  }

  function tabulate(open) {
    onLook({ table: open });
    (open ? sheet : tools.table).focus({ preventScroll: true });
  }

  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -1e9], End: [0, 1e9] };
  const ZOOMS = { "+": () => zoom(2, start()), "=": () => zoom(2, start()), "-": () => zoom(1 / 2, start()), 0: () => look(WHOLE) };

  // Where the keyboard is, or would begin.
  function start() {
    return cursor ?? { row: clamp(plot.selected?.[0]?.row ?? shown.row, plot.rows), col: clamp(plot.selected?.[0]?.col ?? shown.col, plot.cols) };
  }

  function onKey(event) {
    if (!plot || !layout || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in STEPS) {
      const [down, right] = STEPS[event.key];
      const from = start();
      cursor = { row: clamp(from.row + down, plot.rows), col: clamp(from.col + right, plot.cols) };
      hover = null;
      const next = revealed(view, cursor, plot, least());
      if (next !== view) look(next);
      else drawPointed();
      say(true);
    } else if (event.key in ZOOMS) {
      hover = null;
      ZOOMS[event.key]();
      spoken.textContent = notes.textContent;
    } else if ((event.key === "Enter" || event.key === " ") && cursor) onPick(cursor, plot);
    else return;
    event.preventDefault();
  }

  canvas.addEventListener("keydown", onKey);
  canvas.addEventListener("focus", () => {
    if (!plot || !layout || !canvas.matches(":focus-visible")) return; // a click has its own cell
    cursor = start();
    drawPointed();
    say(true);
  });
  canvas.addEventListener("blur", () => plot && layout && drawPointed());
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || sheet.hidden) return;
    event.stopPropagation(); // it has closed something, and shall not also leave the cell
    tabulate(false);
  });

  // The pointer: over a cell it reads, dragged it moves a zoomed map, with Ctrl (and in a pinch of a touchpad) the wheel
  // zooms. Two fingers on the screen zoom too, around the cell between them.
  const fingers = new Map(); // id -> their last event
  const apart = ([a, b]) => Math.max(1, Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY));
  let pinch = null; // as it began
  let drag = null;
  let dragged = false;
  canvas.addEventListener("pointerdown", (event) => {
    dragged = false;
    if (event.pointerType === "touch") fingers.set(event.pointerId, event);
    if (fingers.size === 2 && plot && layout) {
      const [a, b] = fingers.values();
      const cell = cellAt({ clientX: (a.clientX + b.clientX) / 2, clientY: (a.clientY + b.clientY) / 2 }) ?? middle();
      pinch = { view, cell, apart: apart([a, b]) };
      drag = hover = null;
      return;
    }
    if (event.button === 0 && plot && layout && view.scale > 1) drag = { x: event.clientX, y: event.clientY, row: shown.row + shown.rows / 2, col: shown.col + shown.cols / 2, id: event.pointerId };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, event);
    if (pinch) {
      dragged = true;
      view = zoomed(pinch.view, apart([...fingers.values()]) / pinch.apart, pinch.cell, plot, least());
      soon();
      return;
    }
    if (drag) {
      const [right, down] = [event.clientX - drag.x, event.clientY - drag.y].map((by) => by / zoomOf(canvas));
      if (!dragged && Math.hypot(right, down) < 4) return;
      if (!dragged) canvas.setPointerCapture(drag.id);
      dragged = true;
      hover = null;
      view = moved({ ...view, row: drag.row, col: drag.col }, -down / layout.ch, -right / layout.cw, plot, least());
      canvas.style.cursor = "grabbing";
      soon();
      return;
    }
    const cell = cellAt(event);
    if (cell?.row === hover?.row && cell?.col === hover?.col) return;
    hover = cell;
    canvas.style.cursor = cell ? "pointer" : "default";
    if (plot && layout) drawPointed();
    say();
  });
  for (const end of ["pointerup", "pointercancel"])
    canvas.addEventListener(end, ({ pointerId }) => {
      fingers.delete(pointerId);
      if ((drag || pinch) && dragged) keep();
      drag = pinch = null;
    });
  canvas.addEventListener("pointerleave", () => {
    hover = null;
    if (plot && layout) drawPointed();
    say();
  });
  canvas.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (!cell || dragged) return;
    cursor = cell;
    onPick(cell, plot);
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the notebook scrolls
      event.preventDefault();
      const cell = cellAt(event);
      if (cell) zoom(Math.exp(-Math.max(-60, Math.min(60, event.deltaY)) / 100), cell);
    },
    { passive: false },
  );
  // By the screen's pixels, where they are known: this also tells of a window moved to another screen.
  const sized = new ResizeObserver(update);
  sized.observe(box, "devicePixelContentBoxSize" in ResizeObserverEntry.prototype ? { box: "device-pixel-content-box" } : {});
  const unthemed = watchTheme(draw);

  return {
    show,
    follow,
    clear() {
      plot = layout = drag = pinch = null;
      const g = canvas.getContext("2d");
      g.setTransform(1, 0, 0, 1, 0, 0);
      g.clearRect(0, 0, canvas.width, canvas.height);
      notes.textContent = low.textContent = high.textContent = unit.textContent = "";
      bar.getContext("2d").clearRect(0, 0, 150, 9);
      readout.replaceChildren();
      table.replaceChildren();
    },
    dispose() {
      cancelAnimationFrame(frame);
      sized.disconnect();
      unthemed();
    },
  };
}

// A float32 in as few digits as say which one it is.
export function exact(value) {
  if (!Number.isFinite(value)) return number(value);
  const size = Math.abs(value);
  let text = "0";
  for (let digits = 1; digits <= 9 && Math.fround(Number(text)) !== size; digits++) text = String(Number(size.toPrecision(digits)));
  return (value < 0 ? "\u2212" : "") + text;
}

function clamp(value, count) {
  return Math.max(0, Math.min(count - 1, value));
}

// Every n-th line of those shown, so that labels keep their distance.
function ticks(from, count, size, room) {
  const steps = [1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
  const step = steps.find((s) => s * size >= room) ?? 10000;
  const first = Math.ceil(from / step) * step;
  return Array.from({ length: Math.max(0, Math.ceil((from + count - first) / step)) }, (_, i) => first + i * step);
}

function clip(g, text, width) {
  if (g.measureText(text).width <= width) return text;
  const chars = [...text];
  while (chars.length > 1 && g.measureText(chars.join("") + "\u2026").width > width) chars.pop();
  return chars.join("") + "\u2026";
}
