/** The part of a layout that is seen, in units of the layout: what pans and zooms make of it. */

export const MOST_ROW_PX = 40;
const READABLE_ROW_PX = 20;
const MOST_UNIT_PX = 60;
const MARGIN = 0.02;

/** The view of a whole layout in a canvas of this size. Few rows do not grow beyond MOST_ROW_PX. */
export function fitView(layout, size) {
  const rows = Math.max(layout.rows, size.height / MOST_ROW_PX, 1);
  return { x0: 0, x1: Math.max(layout.width, size.width / MOST_UNIT_PX, 1), y0: 0, y1: rows };
}

/** The view of one box and all to its right, with a little of what leads to it. */
export function viewOf(box, layout, size) {
  const width = Math.max(box.right - box.x0, size.width / MOST_UNIT_PX);
  const rows = Math.max(box.rows, size.height / MOST_ROW_PX);
  const x0 = box.parent ? box.x0 - 0.06 * width : box.x0;
  return keepInside({ x0, x1: box.x0 + width, y0: box.y0, y1: box.y0 + rows }, layout, size);
}

/**
 * Zoom by a factor (above 1: nearer) around a point of the canvas in pixels.
 *
 * A large tree has far more rows than fit: as long as they are too low to be read only they are enlarged, then all is.
 */
export function zoomView(view, factor, at, layout, size) {
  const fit = fitView(layout, size);
  const isReadable = size.height / (view.y1 - view.y0) >= READABLE_ROW_PX;
  const isWide = view.x1 - view.x0 >= fit.x1;
  const xFactor = factor > 1 ? (isReadable ? factor : 1) : factor;
  const yFactor = factor > 1 || isReadable || isWide ? factor : 1;
  const width = limit((view.x1 - view.x0) / xFactor, size.width / MOST_UNIT_PX, fit.x1);
  const rows = limit((view.y1 - view.y0) / yFactor, size.height / MOST_ROW_PX, fit.y1);
  const x = view.x0 + ((view.x1 - view.x0) * at.x) / size.width;
  const y = view.y0 + ((view.y1 - view.y0) * at.y) / size.height;
  const x0 = x - (width * at.x) / size.width;
  const y0 = y - (rows * at.y) / size.height;
  return keepInside({ x0, x1: x0 + width, y0, y1: y0 + rows }, layout, size);
}

/** Move the view by pixels. */
export function panView(view, dx, dy, layout, size) {
  const x = (dx * (view.x1 - view.x0)) / size.width;
  const y = (dy * (view.y1 - view.y0)) / size.height;
  return keepInside({ x0: view.x0 + x, x1: view.x1 + x, y0: view.y0 + y, y1: view.y1 + y }, layout, size);
}

/** The view, moved as little as needed so that a box is seen. */
export function revealBox(view, box, layout, size) {
  const [width, rows] = [view.x1 - view.x0, view.y1 - view.y0];
  const x0 = limit(view.x0, Math.min(box.x1, box.x0 + width) - width, box.x0 - MARGIN * width);
  const y0 = limit(view.y0, Math.min(box.y1, box.y0 + rows) - rows, box.y0);
  return keepInside({ x0, x1: x0 + width, y0, y1: y0 + rows }, layout, size);
}

/** Whether two views show the same. */
export function isSameView(a, b) {
  const near = (name) => Math.abs(a[name] - b[name]) < 1e-6 * Math.max(1, Math.abs(a[name]));
  return near("x0") && near("x1") && near("y0") && near("y1");
}

/** The view between two others, at a share from 0 to 1. */
export function mixViews(from, to, share) {
  const mix = (name) => from[name] + (to[name] - from[name]) * share;
  return { x0: mix("x0"), x1: mix("x1"), y0: mix("y0"), y1: mix("y1") };
}

function keepInside(view, layout, size) {
  const fit = fitView(layout, size);
  const [width, rows] = [Math.min(view.x1 - view.x0, fit.x1), Math.min(view.y1 - view.y0, fit.y1)];
  const x0 = limit(view.x0, 0, fit.x1 - width);
  const y0 = limit(view.y0, 0, fit.y1 - rows);
  return { x0, x1: x0 + width, y0, y1: y0 + rows };
}

function limit(value, least, most) {
  return Math.max(least, Math.min(value, most));
}
