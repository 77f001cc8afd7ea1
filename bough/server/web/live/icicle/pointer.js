/** Wheel, drag, pinch, click and double click on the canvas, turned into moves of the view and choices of boxes. */

import { panView, zoomView } from "./viewport.js";

const CLICK_PX = 4;

/**
 * Listens on an element until `close`. Calls onHover(item, x, y), onChoose(box), onZoom(box or null), and
 * onRest() for a click on branches that are not drawn.
 */
export class Pointer {
  constructor(element, stage, handlers) {
    this._element = element;
    this._stage = stage;
    this._handlers = handlers;
    this._down = new Map(); // pointer id → {x, y}
    this._moved_px = 0;
    this._abort = new AbortController();
    const on = (name, work, options) =>
      element.addEventListener(name, work, { signal: this._abort.signal, ...options });
    on("wheel", (event) => this._wheel(event), { passive: false });
    on("pointerdown", (event) => this._press(event));
    on("pointermove", (event) => this._move(event));
    on("pointerup", (event) => this._release(event));
    on("pointercancel", (event) => this._down.delete(event.pointerId));
    on("pointerleave", () => handlers.onHover(null, 0, 0));
    on("dblclick", (event) => this._zoomTo(this._at(event)));
  }

  close() {
    this._abort.abort();
  }

  _at(event) {
    const { left, top } = this._element.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  }

  /** The wheel zooms, with Shift it goes sideways. A wheel that cannot zoom out further scrolls the page. */
  _wheel(event) {
    const { view, layout, size, isFitted } = this._stage;
    const step = event.deltaMode === 1 ? 16 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      if (isFitted) return;
      this._stage.moveTo(panView(view, step * (event.deltaX || event.deltaY), 0, layout, size), { isGliding: false });
    } else {
      if (isFitted && event.deltaY > 0) return;
      const factor = Math.exp(-step * event.deltaY * (event.ctrlKey ? 0.01 : 0.002));
      this._stage.moveTo(zoomView(view, factor, this._at(event), layout, size), { isGliding: false });
    }
    event.preventDefault();
    this._handlers.onHover(null, 0, 0);
  }

  _press(event) {
    if (this._down.size === 0) this._moved_px = 0;
    this._down.set(event.pointerId, this._at(event));
    this._element.setPointerCapture(event.pointerId);
  }

  _move(event) {
    const at = this._at(event);
    const before = this._down.get(event.pointerId);
    if (!before) return this._handlers.onHover(this._stage.itemAt(at.x, at.y), at.x, at.y);
    this._moved_px += Math.hypot(at.x - before.x, at.y - before.y);
    if (this._moved_px < CLICK_PX) return;
    this._handlers.onHover(null, 0, 0);
    if (this._down.size === 1) this._drag(before, at);
    else this._pinch(event.pointerId, before, at);
    this._down.set(event.pointerId, at);
  }

  _drag(before, at) {
    const { view, layout, size } = this._stage;
    this._stage.moveTo(panView(view, before.x - at.x, before.y - at.y, layout, size), { isGliding: false });
  }

  _pinch(id, before, at) {
    const other = [...this._down].find(([key]) => key !== id)[1];
    const distance = (point) => Math.max(1, Math.hypot(point.x - other.x, point.y - other.y));
    const middle = { x: (at.x + other.x) / 2, y: (at.y + other.y) / 2 };
    const { view, layout, size } = this._stage;
    this._stage.moveTo(zoomView(view, distance(at) / distance(before), middle, layout, size), { isGliding: false });
  }

  _release(event) {
    const wasDown = this._down.delete(event.pointerId);
    if (!wasDown || this._moved_px >= CLICK_PX || event.button > 0) return;
    const at = this._at(event);
    const item = this._stage.itemAt(at.x, at.y);
    if (item?.count) this._zoomTo(at);
    else if (item?.box.rest) this._handlers.onRest();
    else if (item && item.box.node) this._handlers.onChoose(item.box);
  }

  /** Zoom to the box at a point with all below it; a summary is enlarged until it can be seen. */
  _zoomTo(at) {
    const { view, layout, size } = this._stage;
    const item = this._stage.itemAt(at.x, at.y);
    if (!item) return;
    if (item.count) {
      const middle = { x: Math.max(0, item.x), y: item.y + item.height / 2 };
      this._stage.moveTo(zoomView(view, Math.max(2, size.height / (3 * item.height)), middle, layout, size));
    } else this._stage.zoomTo(item.box);
    this._handlers.onZoom(item.box);
  }
}
