/**
 * Which boxes of a layout are drawn in a view, and which are too small: those are merged into one summary each ("+12").
 *
 * Costs what is seen: what lies outside the view, or is merged, is not walked.
 */

export const MOST_BOXES = 1500;
const LEAST_PX = 2; // a column that is narrower is merged with its neighbours
const SUMMARY_PX = 24; // a summary grows to this width, so that its number can be read
const LEAST_HEIGHT_PX = 1; // an only child that is less high is drawn with its parent

/**
 * The items to draw: {box, x, y, width, height} in pixels, and for summaries also `count`, their box being the parent (null:
 * the root). `placeOf(box)` gives where a box is now. Also how many nodes are drawn, and how many are merged.
 */
export function findVisible(top, view, size, placeOf) {
  for (let least_px = LEAST_PX; ; least_px *= 1.5) {
    const found = collect(top, view, size, placeOf, least_px);
    if (found) return found;
  }
}

/** As findVisible for one least width; null if there are too many. */
function collect(top, view, size, placeOf, least_px) {
  const found = { items: [], numShown: 0, numMerged: 0 };
  const toPixels = pixelsOf(view, size, placeOf);
  const stack = [{ boxes: top, parent: null, carried: null }];
  while (stack.length) {
    const { boxes, parent, carried } = stack.pop();
    const small = new SmallRun(parent);
    for (const box of boxes) {
      const item = toPixels(box);
      if (item.x + item.width < 0 || item.x > size.width || item.y > size.height) continue;
      if (item.width < least_px && boxes.length > 1) small.add(item, found);
      else {
        small.flush(found);
        visit(item, carried, found, stack);
      }
    }
    small.flush(found);
    if (found.items.length > MOST_BOXES && least_px < size.width) return null;
  }
  return found;
}

function pixelsOf(view, size, placeOf) {
  const sx = size.width / (view.x1 - view.x0);
  const sy = size.height / (view.y1 - view.y0);
  return (box) => {
    const at = placeOf(box);
    const [x, y] = [(at.x0 - view.x0) * sx, (at.y0 - view.y0) * sy];
    return {
      box,
      x,
      y,
      width: (at.x1 - at.x0) * sx,
      height: (at.y1 - at.y0) * sy,
      bottom: (box.bottom - view.y0) * sy,
      count: 0,
    };
  };
}

function visit(item, carried, found, stack) {
  const { box } = item;
  if (carried !== null) {
    item.height += item.y - carried;
    item.y = carried;
  }
  const isCarried = item.height < LEAST_HEIGHT_PX && box.children.length === 1;
  if (isCarried) found.numMerged += box.own;
  else if (item.y + item.height >= 0) {
    found.items.push(item);
    found.numShown += box.own;
  }
  if (box.children.length) stack.push({ boxes: box.children, parent: box, carried: isCarried ? item.y : null });
}

/** Neighbours that are each too small, as one rectangle. */
class SmallRun {
  constructor(parent) {
    this._parent = parent;
    this._item = null;
  }

  add(item, found) {
    if (this._item && this._item.width >= SUMMARY_PX) this.flush(found);
    if (!this._item) this._item = { ...item, box: this._parent, count: 0, height: 0, first: item.box };
    this._item.width = item.x + item.width - this._item.x;
    this._item.height = Math.max(this._item.height, item.bottom - item.y);
    this._item.count += item.box.count;
  }

  flush(found) {
    if (!this._item) return;
    found.items.push(this._item);
    found.numMerged += this._item.count;
    this._item = null;
  }
}

/** The item under a point of the canvas, the last drawn first; null if there is none. */
export function findAt(items, x, y) {
  for (let at = items.length - 1; at >= 0; at -= 1) {
    const item = items[at];
    if (x >= item.x && x <= item.x + item.width && y >= item.y && y <= item.y + item.height) return item;
  }
  return null;
}
