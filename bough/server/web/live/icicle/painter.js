/**
 * Draws a scene on a canvas. Spans of one role are filled in one go, because a thousand single fills are slow.
 *
 * It decides nothing: what is seen comes from `findVisible`, what moves from the scene.
 */

import { mainTier } from "../tiers.js";
import { TextFitter, formatCount, labelSpan } from "./labels.js";
import { LONG_TOKENS } from "./layout.js";
import { Palette } from "./palette.js";

const FONT_PX = 11;
const LINE_PX = 14;
const LABEL_WIDTH_PX = 52; // narrower labels run downwards
const LABEL_HEIGHT_PX = 12;
const SIDEWAYS_WIDTH_PX = 14;
const SIDEWAYS_HEIGHT_PX = 52; // in less nothing can be read
const MOST_LINES = 8;
const BESIDE_ALPHA = 0.5; // branches beside what is shown

/** Draws on one canvas, in CSS pixels whatever the resolution of the screen. */
export class Painter {
  constructor(canvas) {
    this._canvas = canvas;
    this._context = canvas.getContext("2d");
    this.readTheme();
  }

  /** Read the colours and the font again. */
  readTheme() {
    this._palette = new Palette(this._canvas);
    this._context.font = `${FONT_PX}px ${this._palette.font}`;
    this._fitter = new TextFitter((text) => this._context.measureText(text).width, FONT_PX + 1);
  }

  /** Draw. `state`: {scene, view, size, ratio, items, path, chosen, hovered, now, isGrey}; path is a Set of boxes. */
  paint(state) {
    const context = this._context;
    context.setTransform(state.ratio, 0, 0, state.ratio, 0, 0);
    context.clearRect(0, 0, state.size.width, state.size.height);
    context.font = `${FONT_PX}px ${this._palette.font}`;
    context.textBaseline = "middle";
    context.filter = "none";
    this._paintLeaving(state);
    this._paintFills(state);
    for (const item of state.items) this._paintBox(item, state);
    this._paintLabels(state);
    this._paintOutlines(state);
    context.globalAlpha = 1;
  }

  _paintFills(state) {
    for (const { role, alpha, rects } of groupByRole(state)) {
      this._fillRects(rects, this._palette.colourOf(role), alpha * this._palette.fillAlpha);
    }
    for (const tier of ["host", "disk"]) {
      const items = state.items.filter((item) => item.box.node && !item.count && mainTier(item.box.node) === tier);
      this._fillRects(items, this._palette.patternOf(tier, this._context), 0.3);
    }
  }

  _fillRects(rects, fill, alpha) {
    const context = this._context;
    context.globalAlpha = alpha;
    context.fillStyle = fill;
    context.beginPath();
    for (const each of rects)
      context.rect(each.x, each.y, Math.max(0.7, each.width - 1), Math.max(0.7, gapped(each.height)));
    context.fill();
  }

  /** What single boxes have of their own: a ghost, a summary, a glow, marks. */
  _paintBox(item, state) {
    const { box } = item;
    if (item.count) return this._paintSummary(item);
    if (box.rest) return this._paintRest(item);
    if (box.ghost) return this._paintGhost(item, state);
    const glow = state.scene.glowOf.get(box);
    if (glow) this._paintGlow(item, glow, state);
    if (state.current.has(box.node.node)) this._fillRects([{ ...item, width: 4 }], this._palette.accent, 1);
    if (box.node.in_use && item.height >= 6) this._stroke(item, this._palette.lane, 2, [], 1);
    if (item.height >= 8) this._paintBreaks(item);
    if (item.height >= 12 && item.width >= 12) this._paintPins(item);
  }

  _paintSummary(item) {
    this._fillRects([item], this._palette.muted, 0.28);
    if (item.height < LABEL_HEIGHT_PX || item.width < 16) return;
    this._write([`+${formatCount(item.count)}`], Math.max(item.x, 0) + 4, item.y + item.height / 2, this._palette.text);
  }

  _paintGhost(item, { scene, now }) {
    const { ghost } = item.box;
    const { accent } = this._palette;
    const share = scene.doneShare(item.box, now);
    const answerShare = Math.min(share, ghost.answer / Math.max(1, ghost.tokens));
    const pulse = scene.isPulsing ? 0.5 + 0.5 * Math.sin(now / 180) : 1;
    this._fillRects([item], accent, 0.08);
    this._fillRects([{ ...item, height: item.height * (share - answerShare) }], accent, 0.22 + 0.12 * pulse);
    this._fillRects(
      [{ ...item, y: item.y + item.height * (1 - answerShare), height: item.height * answerShare }],
      accent,
      0.55,
    );
    this._stroke(item, accent, 1, [3, 3], 0.9);
  }

  _paintGlow(item, glow, { now }) {
    const span = spanTo(item, glow.reach);
    const left = glow.age > 0 ? Math.max(0, (glow.endsAt - now) / 1500) : 1;
    const pulse = glow.isLoading ? 0.35 + 0.3 * Math.sin(now / 160) : 0.5;
    this._fillRects([span], this._palette.accent, 0.6 * pulse * left);
    if (item.width < 8) return;
    this._fillRects([{ ...span, x: item.x + item.width - 4, width: 4 }], this._palette.accent, left);
  }

  /** Branches that are not drawn: their number. */
  _paintRest(item) {
    this._fillRects([item], this._palette.muted, 0.12);
    const { branches } = item.box.rest;
    const text = item.width < LABEL_WIDTH_PX ? `+${formatCount(branches)}` : `+ ${formatCount(branches)} others`;
    this._write(this._fitter.fit(text, item.width - 4, 1), item.x + 3, item.y + item.height / 2, this._palette.text);
  }

  /** A torn edge in what is longer than it is drawn. */
  _paintBreaks(item) {
    for (const { span, y, height } of spansIn(item)) {
      if ((!span.isGap && span.end - span.start <= LONG_TOKENS) || height < 12) continue;
      this._tear(item.x, y + height - 4, item.width - 1);
      if (span.isGap) this._tear(item.x, y + 1, item.width - 1);
    }
  }

  _tear(x, y, width) {
    const context = this._context;
    context.globalAlpha = 1;
    context.strokeStyle = this._palette.surface;
    context.lineWidth = 2;
    context.beginPath();
    for (let along = 0; along <= width; along += 4) context.lineTo(x + along, y + ((along / 4) % 2 ? 3 : 0));
    context.stroke();
  }

  /** Pins where a prefix is kept. */
  _paintPins(item) {
    for (const point of item.box.node.kept) {
      if (point > item.box.start && point <= item.box.end)
        this._paintPin(item.x + item.width - 3, item.y + spanTo(item, point).height - 14);
    }
  }

  _paintPin(x, y) {
    const context = this._context;
    context.globalAlpha = 1;
    context.fillStyle = this._palette.text;
    context.beginPath();
    context.arc(x - 5, y + 5, 3, 0, 2 * Math.PI);
    context.rect(x - 5.6, y + 5, 1.2, 7);
    context.fill();
  }

  _paintLabels(state) {
    for (const item of state.items) {
      if (item.count || item.box.rest || item.height < LABEL_HEIGHT_PX) continue;
      const alpha = item.box.ghost ? 1 : state.scene.alphaOf(item.box, state.now);
      if (item.box.ghost) this._paintLabel(labelGhost(item.box.ghost), item, state.size, alpha);
      else for (const each of spansIn(item)) this._paintSpanLabel(each, item, state.size, alpha);
    }
  }

  _paintSpanLabel({ span, y, height }, item, size, alpha) {
    const isLast = span === item.box.spans.at(-1);
    const more = isLast && item.box.hidden ? ` (+${formatCount(item.box.hidden)} after it)` : "";
    const label = labelSpan(span, span.end - span.start > LONG_TOKENS) + more;
    this._paintLabel(label, { ...item, y, height }, size, alpha);
  }

  /** A text in the part of a rectangle that is seen, in as many lines as there is room for; none if too few words fit. */
  _paintLabel(label, rect, size, alpha) {
    const x0 = Math.max(rect.x, 0) + 8; // beside the line of the messages that the chat shows
    const width = Math.min(rect.x + rect.width, size.width) - x0 - 4;
    const y0 = Math.max(rect.y, 0);
    const height = Math.min(rect.y + rect.height, size.height) - y0;
    if (width < LABEL_WIDTH_PX) return this._writeSideways(label, x0 - 3, y0, width + 5, height, alpha);
    if (height < LABEL_HEIGHT_PX) return;
    const mostLines = Math.min(MOST_LINES, Math.max(1, Math.floor((height - 2) / LINE_PX)));
    this._write(this._fitter.fit(label, width, mostLines), x0, y0 + height / 2, this._palette.text, alpha);
  }

  _write(lines, x, middle, colour, alpha = 1) {
    const context = this._context;
    context.globalAlpha = alpha;
    context.fillStyle = colour;
    const top = middle - ((lines.length - 1) * LINE_PX) / 2;
    lines.forEach((line, at) => context.fillText(line, x, top + at * LINE_PX));
  }

  /** A label that runs down a box that is too narrow for words. */
  _writeSideways(label, x0, y0, width, height, alpha) {
    if (width < SIDEWAYS_WIDTH_PX || height < SIDEWAYS_HEIGHT_PX) return;
    const lines = this._fitter.fit(label, height - 10, Math.max(1, Math.floor((width - 2) / LINE_PX)));
    const context = this._context;
    context.save();
    context.translate(x0 + width / 2, y0 + 5);
    context.rotate(Math.PI / 2);
    this._write(lines, 0, 0, this._palette.text, alpha);
    context.restore();
  }

  /** The path under the pointer, the chosen node, and a frame around it all if the connection is lost. */
  _paintOutlines({ items, path, chosen, hovered, isFocused }) {
    for (const item of items) {
      if (item.count) continue;
      if (path.has(item.box)) this._stroke(item, this._palette.text, item.box === hovered ? 1.6 : 1, [], 0.75);
      if (chosen && item.box === chosen) this._stroke(item, this._palette.accent, isFocused ? 3 : 2, [], 1);
    }
  }

  _stroke(item, colour, width, dashes, alpha) {
    const context = this._context;
    context.globalAlpha = alpha;
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.setLineDash(dashes);
    const inset = width / 2;
    context.strokeRect(
      item.x + inset,
      item.y + inset,
      Math.max(1, item.width - 1 - width),
      Math.max(1, gapped(item.height) - width),
    );
    context.setLineDash([]);
  }

  _paintLeaving({ scene, view, size, now }) {
    const sx = size.width / (view.x1 - view.x0);
    const sy = size.height / (view.y1 - view.y0);
    for (const { box, place, alpha } of scene.takeLeaving(now)) {
      const rect = { x: (place.x0 - view.x0) * sx, y: (place.y0 - view.y0) * sy };
      rect.width = (place.x1 - place.x0) * sx;
      rect.height = (place.y1 - place.y0) * sy;
      this._fillRects([rect], this._palette.muted, 0.4 * alpha);
    }
  }
}

function labelGhost(ghost) {
  if (ghost.state === "answering") return `answering: ${formatCount(ghost.answer)} tokens`;
  return `${ghost.state} ${formatCount(ghost.doneTokens)} of ${formatCount(ghost.promptTokens)}`;
}

/** The spans of all nodes as rectangles, by role and strength. */
function groupByRole({ items, scene, now }) {
  const groups = new Map();
  for (const item of items) {
    if (item.count || !item.box.node) continue;
    const alpha = scene.alphaOf(item.box, now) * (item.box.isBeside ? BESIDE_ALPHA : 1);
    for (const { span, y, height } of spansIn(item)) {
      const name = `${span.role} ${alpha}`;
      if (!groups.has(name)) groups.set(name, { role: span.role, alpha, rects: [] });
      groups.get(name).rects.push({ x: item.x, y, width: item.width, height });
    }
  }
  return groups.values();
}

/** The spans of an item, each with its place in pixels. */
function spansIn({ y, height, box }) {
  const total = box.spans.reduce((sum, span) => sum + span.height, 0);
  const found = [];
  for (const span of box.spans) {
    const high = (height * span.height) / total;
    found.push({ span, y, height: high });
    y += high;
  }
  return found;
}

/** The part of an item up to a token offset. */
function spanTo(item, offset) {
  return { x: item.x, y: item.y, width: item.width, height: item.height * item.box.shareAt(offset) };
}

/** Boxes that are high enough leave a gap below. */
function gapped(height) {
  return height > 3 ? height - 1 : height;
}
