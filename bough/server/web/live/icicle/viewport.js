/** The part of a layout that is seen, in units of the layout: what pans and zooms make of it. */

const MOST_COLUMN_PX = 400;
const READABLE_COLUMN_PX = 60;
const MOST_UNIT_PX = 60;
const FITTED_UNIT_PX = 14; // few messages do not fill the canvas
const MARGIN = 0.02;

/** The view of a whole layout in a canvas of this size. */
export function fitView(layout, size) {
  return {
    x0: 0,
    x1: Math.max(layout.columns, 1),
    y0: 0,
    y1: Math.max(layout.height, size.height / FITTED_UNIT_PX, 1),
  };
}

/** The view of one box and all below it, with a little of what leads to it. */
export function viewOf(box, layout, size) {
  const columns = Math.max(box.columns, size.width / MOST_COLUMN_PX);
  const height = Math.max(box.bottom - box.y0, size.height / MOST_UNIT_PX);
  const y0 = box.parent ? box.y0 - 0.06 * height : box.y0;
  return keepInside({ x0: box.x0, x1: box.x0 + columns, y0, y1: box.y0 + height }, layout, size);
}

/**
 * Zoom by a factor (above 1: nearer) around a point of the canvas in pixels.
 *
 * A large tree has far more columns than fit: as long as they are too narrow to be read only they are enlarged, then all is.
 */
export function zoomView(view, factor, at, layout, size) {
  const fit = fitView(layout, size);
  const isReadable = size.width / (view.x1 - view.x0) >= READABLE_COLUMN_PX;
  const isHigh = view.y1 - view.y0 >= fit.y1;
  const yFactor = factor > 1 ? (isReadable ? factor : 1) : factor;
  const xFactor = factor > 1 || isReadable || isHigh ? factor : 1;
  const height = limit((view.y1 - view.y0) / yFactor, size.height / MOST_UNIT_PX, fit.y1);
  const columns = limit((view.x1 - view.x0) / xFactor, size.width / MOST_COLUMN_PX, fit.x1);
  const x = view.x0 + ((view.x1 - view.x0) * at.x) / size.width;
  const y = view.y0 + ((view.y1 - view.y0) * at.y) / size.height;
  const x0 = x - (columns * at.x) / size.width;
  const y0 = y - (height * at.y) / size.height;
  return keepInside({ x0, x1: x0 + columns, y0, y1: y0 + height }, layout, size);
}

/** Move the view by pixels. */
export function panView(view, dx, dy, layout, size) {
  const x = (dx * (view.x1 - view.x0)) / size.width;
  const y = (dy * (view.y1 - view.y0)) / size.height;
  return keepInside({ x0: view.x0 + x, x1: view.x1 + x, y0: view.y0 + y, y1: view.y1 + y }, layout, size);
}

/** The view, moved as little as needed so that a box is seen. */
export function revealBox(view, box, layout, size) {
  const [width, height] = [view.x1 - view.x0, view.y1 - view.y0];
  const x0 = limit(view.x0, Math.min(box.x1, box.x0 + width) - width, box.x0);
  const y0 = limit(view.y0, Math.min(box.y1, box.y0 + height) - height, box.y0 - MARGIN * height);
  return keepInside({ x0, x1: x0 + width, y0, y1: y0 + height }, layout, size);
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
  const [width, height] = [Math.min(view.x1 - view.x0, fit.x1), Math.min(view.y1 - view.y0, fit.y1)];
  const x0 = limit(view.x0, 0, fit.x1 - width);
  const y0 = limit(view.y0, 0, fit.y1 - height);
  return { x0, x1: x0 + width, y0, y1: y0 + height };
}

function limit(value, least, most) {
  return Math.max(least, Math.min(value, most));
}
