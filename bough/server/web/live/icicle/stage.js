/**
 * The canvas of the icicle: its size, its view, and when it is drawn.
 *
 * It draws only when something has changed or moves. What merely pulses is drawn 15 times a second, because the model may
 * be computing on the same processor.
 */

import { Painter } from "./painter.js";
import { Scene } from "./scene.js";
import { fitView, isSameView, mixViews, revealBox, viewOf, zoomView } from "./viewport.js";
import { findAt, findVisible } from "./visible.js";

const GLIDE_MS = 200;
const PULSE_MS = 66;
const NUM_TIMES = 120;

/** Owns one canvas until `close`. `onDrawn({numShown, numMerged})` is called when these have changed. */
export class Stage {
  constructor(canvas, onDrawn) {
    this.scene = new Scene();
    this.size = { width: 1, height: 1 };
    this.isFitted = true; // the view follows the whole tree
    this._canvas = canvas;
    this._painter = new Painter(canvas);
    this._onDrawn = onDrawn;
    this._marks = { path: new Set(), current: new Set(), chosen: null, hovered: null, isFocused: false };
    this._view = this._from = fitView(this.scene.layout, this.size);
    this._viewAt = -Infinity;
    this._found = { items: [], numShown: 0, numMerged: 0 };
    this._frame = this._timer = 0;
    this._drawTimes = globalThis.boughFrameTimes = { draws_ms: [], frames_ms: [] };
    this._lastFrame = 0;
    this._motion = matchMedia("(prefers-reduced-motion: reduce)");
    this._watch();
  }

  get isMotionWanted() {
    return !this._motion.matches;
  }

  get layout() {
    return this.scene.layout;
  }

  /** The view that is seen, or is being moved to. */
  get view() {
    return this._view;
  }

  /** Show a new layout. `isSame`: it is the same tree as before, so that its boxes may glide. */
  show(layout, glows, root, { isSame }) {
    if (!isSame) this.scene = new Scene();
    this.scene.update(layout, glows, root, performance.now(), { isMoving: this.isMotionWanted && isSame });
    if (!isSame) this.isFitted = true;
    if (this.isFitted) this._setView(fitView(layout, this.size), { isGliding: isSame });
    this.requestDraw();
  }

  /** Look at another part. */
  moveTo(view, { isGliding = true } = {}) {
    this.isFitted = isSameView(view, fitView(this.layout, this.size));
    this._setView(view, { isGliding });
    this.requestDraw();
  }

  /** Zoom around the middle. */
  zoom(factor) {
    const { width, height } = this.size;
    this.moveTo(zoomView(this._view, factor, { x: width / 2, y: height / 2 }, this.layout, this.size));
  }

  /** Look at the whole tree. */
  fit() {
    this.moveTo(fitView(this.layout, this.size));
  }

  /** Look at a box with all below it. */
  zoomTo(box) {
    this.moveTo(viewOf(box, this.layout, this.size));
  }

  /** Move as little as needed to see a box. */
  reveal(box) {
    this.moveTo(revealBox(this._view, box, this.layout, this.size));
  }

  /** Emphasise boxes: {path, current, chosen, hovered, isFocused}. */
  mark(marks) {
    this._marks = { ...this._marks, ...marks };
    this.requestDraw();
  }

  /** The item under a point of the canvas. */
  itemAt(x, y) {
    return findAt(this._found.items, x, y);
  }

  requestDraw() {
    const isHidden = this.size.width <= 1; // the pane is folded
    if (!this._frame && !isHidden) this._frame = requestAnimationFrame((now) => this._draw(now));
  }

  close() {
    cancelAnimationFrame(this._frame);
    clearTimeout(this._timer);
    this._frame = -1;
    this._resizes.disconnect();
    this._themes.disconnect();
    this._scheme.removeEventListener("change", this._readTheme);
  }

  _watch() {
    this._resizes = new ResizeObserver(() => this._resize());
    this._resizes.observe(this._canvas.parentElement);
    this._readTheme = () => (this._painter.readTheme(), this.requestDraw());
    this._scheme = matchMedia("(prefers-color-scheme: dark)");
    this._scheme.addEventListener("change", this._readTheme);
    this._themes = new MutationObserver(this._readTheme);
    this._themes.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme", "class"] });
    this._resize();
  }

  _resize() {
    const { clientWidth, clientHeight } = this._canvas.parentElement;
    this.size = { width: Math.max(1, clientWidth), height: Math.max(1, clientHeight) };
    const ratio = globalThis.devicePixelRatio || 1;
    this._canvas.width = Math.round(this.size.width * ratio);
    this._canvas.height = Math.round(this.size.height * ratio);
    if (this.isFitted) this._setView(fitView(this.layout, this.size), { isGliding: false });
    this.requestDraw();
  }

  _setView(view, { isGliding }) {
    const now = performance.now();
    this._from = this._viewNow(now);
    this._view = view;
    this._viewAt = isGliding && this.isMotionWanted ? now : -Infinity;
    this._canvas.style.touchAction = this.isFitted ? "pan-y" : "none"; // a finger scrolls the page, or the tree
  }

  _viewNow(now) {
    const share = Math.min(1, Math.max(0, (now - this._viewAt) / GLIDE_MS));
    return share >= 1 ? this._view : mixViews(this._from, this._view, share * (2 - share));
  }

  _draw(frame) {
    const started = performance.now();
    this._frame = 0;
    const view = this._viewNow(frame);
    const found = findVisible(this.layout.top, view, this.size, (box) => this.scene.placeOf(box, frame));
    const ratio = this._canvas.width / this.size.width;
    this._painter.paint({
      scene: this.scene,
      view,
      size: this.size,
      ratio,
      items: found.items,
      now: frame,
      ...this._marks,
    });
    const isNew = found.numShown !== this._found.numShown || found.numMerged !== this._found.numMerged;
    this._found = found;
    if (isNew) this._onDrawn(found);
    this._noteTimes(frame, performance.now() - started);
    this._continue(frame);
  }

  _continue(now) {
    clearTimeout(this._timer);
    if (now < this._viewAt + GLIDE_MS || this.scene.isMoving(now)) this.requestDraw();
    else if (this.scene.isPulsing) this._timer = setTimeout(() => this.requestDraw(), PULSE_MS);
    else this._lastFrame = 0;
  }

  /** Keep the last times of drawing, and between frames that follow each other, for tests. */
  _noteTimes(frame, draw_ms) {
    const { draws_ms, frames_ms } = this._drawTimes;
    draws_ms.push(draw_ms);
    if (this._lastFrame) frames_ms.push(frame - this._lastFrame);
    this._lastFrame = frame;
    for (const times of [draws_ms, frames_ms]) if (times.length > NUM_TIMES) times.shift();
  }
}
