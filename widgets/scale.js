// Numbers to colours: ranges that one outlier cannot flatten, colour ramps from the theme, blocks that keep extremes.

// Positions that must not set the range: BOS, and those whose size is many times that of the others (attention sinks).
export function flagged(plot, tokens) {
  const { values, rows, cols, positions } = plot;
  const count = positions === "rows" ? rows : cols;
  const out = new Set();
  if (count < 3 || !plot.flag) return out;
  const other = positions === "rows" ? cols : rows;
  const [next, along] = positions === "rows" ? [cols, 1] : [1, cols]; // how far to the next position, and along one
  // One size a position and line for norms; for a hook the whole vector is one line.
  const lines = plot.flag === "vector" ? 1 : other;
  for (let line = 0; line < lines; line++) {
    const [first, last] = lines > 1 ? [line, line + 1] : [0, other];
    const sizes = new Float64Array(count);
    for (let p = 0; p < count; p++) {
      let size = 0;
      for (let o = first; o < last; o++) {
        const value = values[p * next + o * along];
        if (Number.isFinite(value)) size += value * value;
      }
      sizes[p] = Math.sqrt(size);
    }
    const middle = sizes.slice().sort()[count >> 1];
    sizes.forEach((size, p) => size > 5 * middle && middle > 0 && out.add(p));
  }
  tokens.forEach((token, p) => p < count && token[2] === "bos" && out.add(p));
  return out.size < count ? out : new Set();
}

// The range of the colours: the largest size of what is not flagged, less a far tail, which is counted as clipped.
export function range(plot, flags) {
  const { values, rows, cols, positions, diverging } = plot;
  const [left, right] = [new Uint8Array(rows), new Uint8Array(cols)]; // rows and columns that are left out
  for (const p of flags) (positions === "rows" ? left : right)[p] = 1;
  const step = Math.max(1, Math.floor((rows * cols) / 40000));
  const sizes = new Float32Array(Math.ceil((rows * cols) / step));
  let [count, top, low] = [0, 0, Infinity];
  for (let r = 0, i = 0; r < rows; r++)
    for (let c = 0; c < cols; c++, i++) {
      const value = values[i];
      if (!Number.isFinite(value) || value === 0 || left[r] || right[c]) continue;
      const size = Math.abs(value);
      if (size > top) top = size;
      if (value < low) low = value;
      if (i % step === 0) sizes[count++] = size;
    }
  if (top === 0) return { low: diverging ? -1 : 0, high: 1, clipped: 0, empty: true };
  const sorted = sizes.subarray(0, count).sort();
  const tail = sorted[Math.floor(count * 0.995)] ?? top;
  const high = top > 2.5 * tail ? tail : top;
  const bottom = diverging ? -high : plot.zero === false && low > 0 && low < high ? low : 0;
  let clipped = 0;
  if (high < top || flags.size) for (let i = 0; i < rows * cols; i++) if (Number.isFinite(values[i]) && Math.abs(values[i]) > high * 1.0001) clipped++;
  return { low: bottom, high, clipped, empty: false };
}

// 256 colours along CSS colours, read back from a canvas so that any CSS colour will do.
export function ramp(stops) {
  const canvas = document.createElement("canvas");
  canvas.width = 256;
  canvas.height = 1;
  const g = canvas.getContext("2d", { willReadFrequently: true });
  const fill = g.createLinearGradient(0, 0, 256, 0);
  stops.forEach((stop, i) => fill.addColorStop(i / (stops.length - 1), stop));
  g.fillStyle = fill;
  g.fillRect(0, 0, 256, 1);
  return g.getImageData(0, 0, 256, 1).data;
}

// Fewer cells than values: each block shows its extreme, so that a lone outlier stays visible; NaN wins, and what is
// masked gives way. Of the cells `shown`, or of all.
export function pool(values, rows, cols, maxRows, maxCols, shown = { row: 0, col: 0, rows, cols }, masked = false) {
  const down = Math.ceil(shown.rows / maxRows);
  const across = Math.ceil(shown.cols / maxCols);
  const r = Math.ceil(shown.rows / down);
  const c = Math.ceil(shown.cols / across);
  const out = new Float32Array(r * c);
  if (masked) out.fill(-Infinity);
  for (let i = 0; i < shown.rows; i++) {
    const from = (shown.row + i) * cols + shown.col;
    const to = Math.floor(i / down) * c;
    if (down === 1 && across === 1) {
      out.set(values.subarray(from, from + c), to);
      continue;
    }
    for (let j = 0, at = to, left = across; j < shown.cols; j++) {
      const value = values[from + j];
      const old = out[at];
      const first = masked && old === -Infinity;
      if (first || Number.isNaN(value) || (Math.abs(value) > Math.abs(old) && !(masked && value === -Infinity))) out[at] = value; // nothing is larger than NaN
      if (--left === 0) {
        at++;
        left = across;
      }
    }
  }
  return { values: out, rows: r, cols: c, down, across };
}

// Pixels of the pooled values. What has no colour (NaN, infinities) gets that of `mark`, and is listed for signs; what is
// masked is left transparent.
export function paint(cells, colours, low, high, mark, masked) {
  const image = new ImageData(cells.cols, cells.rows);
  const words = new Uint32Array(image.data.buffer);
  const table = new Uint32Array(colours.buffer.slice(0));
  const odd = [];
  const factor = 255 / (high - low || 1);
  for (let i = 0; i < words.length; i++) {
    const value = cells.values[i];
    if (Number.isFinite(value)) words[i] = table[Math.max(0, Math.min(255, Math.round((value - low) * factor)))];
    else if (!masked || value !== -Infinity) {
      odd.push(i);
      if (mark !== null) words[i] = mark;
    }
  }
  return { image, odd };
}
