// The part of a map that is shown: how far it is zoomed, which cells that leaves, and how it moves.

// {scale, row, col}: 1 shows all; row and col are the middle, in cells.
export const WHOLE = Object.freeze({ scale: 1, row: 0, col: 0 });

// The cells shown, as whole numbers: {row, col, rows, cols}. `least` is how few each side may come down to, {rows, cols}.
export function windowOf(view, plot, least) {
  const side = (count, few, middle) => {
    const shown = Math.min(count, Math.max(few, 1, Math.round(count / view.scale)));
    return [Math.max(0, Math.min(count - shown, Math.round(middle - shown / 2))), shown];
  };
  const [row, rows] = side(plot.rows, least.rows, view.row);
  const [col, cols] = side(plot.cols, least.cols, view.col);
  return { row, col, rows, cols };
}

// Where zooming in ends: both sides are down to their least.
export function deepest(plot, least) {
  return Math.max(1, plot.rows / Math.max(1, least.rows), plot.cols / Math.max(1, least.cols));
}

// Zoomed by a factor around a cell, which keeps its place on the screen.
export function zoomed(view, factor, cell, plot, least) {
  const scale = Math.max(1, Math.min(deepest(plot, least), view.scale * factor));
  if (scale <= 1.001) return WHOLE;
  const before = windowOf(view, plot, least);
  const after = windowOf({ ...view, scale }, plot, least);
  const middle = (at, start, was, is) => at + 0.5 + (start + was / 2 - at - 0.5) * (is / was);
  return { scale, row: middle(cell.row, before.row, before.rows, after.rows), col: middle(cell.col, before.col, before.cols, after.cols) };
}

// Moved by cells, no further than the edges.
export function moved(view, down, right, plot, least) {
  const { rows, cols } = windowOf(view, plot, least);
  const within = (middle, shown, count) => Math.max(shown / 2, Math.min(count - shown / 2, middle));
  return { scale: view.scale, row: within(view.row + down, rows, plot.rows), col: within(view.col + right, cols, plot.cols) };
}

// Moved just so far that a cell is shown.
export function revealed(view, cell, plot, least) {
  const { row, col, rows, cols } = windowOf(view, plot, least);
  const short = (at, start, shown) => Math.min(0, at - start) + Math.max(0, at - start - shown + 1);
  const [down, right] = [short(cell.row, row, rows), short(cell.col, col, cols)];
  return down || right ? moved({ ...view, row: row + rows / 2, col: col + cols / 2 }, down, right, plot, least) : view;
}
