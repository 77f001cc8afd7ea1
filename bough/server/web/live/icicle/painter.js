/**
 * Draws a scene on a canvas. Boxes of one tier are filled in one go, because a thousand single fills are slow.
 *
 * It decides nothing: what is seen comes from `findVisible`, what moves from the scene.
 */

import { mainTier, tierShares } from "../tiers.js";
import { TextFitter, formatCount, toLabel } from "./labels.js";
import { Palette } from "./palette.js";

const FONT_PX = 11;
const LINE_PX = 14;
const LABEL_WIDTH_PX = 14;
const LABEL_HEIGHT_PX = 11;
const MOST_LINES = 8;
const UPRIGHT_PX = 44; // narrower labels run downwards

/** Draws on one canvas, in CSS pixels whatever the resolution of the screen. */
export class Painter {
  constructor(canvas) {
    this._canvas = canvas;
    this._context = canvas.getContext("2d");
    this._labels = new WeakMap(); // node → its label
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
    for (const [tier, items] of groupByTier(state.items, state)) this._fillTier(tier, items);
  }

  _fillTier(tier, items) {
    const context = this._context;
    const colour = this._palette.tiers[tier] ?? this._palette.muted;
    this._fillRects(items, colour, tier in this._palette.tiers ? this._palette.fillAlpha : 0.12);
    const pattern = this._palette.patternOf(tier, context);
    if (pattern)
      this._fillRects(
        items.filter((item) => item.height > 5 && item.width > 4),
        pattern,
        0.3,
      );
    this._fillRects(
      items.filter((item) => item.width > 12 && item.height > 5 && item.x > -3).map(leftEdge),
      colour,
      0.95,
    );
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

  /** What single boxes have of their own: a ghost, a summary, fading in, a glow, shares of tiers, marks. */
  _paintBox(item, state) {
    const { box } = item;
    if (item.count) return this._paintSummary(item);
    if (box.ghost) return this._paintGhost(item, state);
    const alpha = state.scene.alphaOf(box, state.now);
    if (alpha < 1) this._fillRects([item], this._colourOf(box.node), alpha * this._palette.fillAlpha);
    const glow = state.scene.glowOf.get(box);
    if (glow) this._paintGlow(item, glow, state);
    if (state.current.has(box.node.node)) this._fillRects([{ ...item, height: 4 }], this._palette.accent, 1);
    if (item.height >= 12 && item.width >= 12) this._paintShares(item);
    if (item.height >= 8 && item.width >= 8) this._paintMarks(item);
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
    this._fillRects([{ ...item, width: item.width * (share - answerShare) }], accent, 0.22 + 0.12 * pulse);
    this._fillRects(
      [{ ...item, x: item.x + item.width * (1 - answerShare), width: item.width * answerShare }],
      accent,
      0.55,
    );
    this._stroke(item, accent, 1, [3, 3], 0.9);
  }

  _paintGlow(item, glow, { now }) {
    const span = spanTo(item, glow.reach);
    const left = glow.age > 0 ? Math.max(0, (glow.endsAt - now) / 1500) : 1;
    const pulse = glow.isLoading ? 0.35 + 0.3 * Math.sin(now / 160) : 0.5;
    this._fillRects([span], glow.isLoading ? this._palette.accent : this._colourOf(item.box.node), pulse * left);
    if (item.height < 8) return;
    this._fillRects([{ ...span, y: item.y + gapped(item.height) - 3, height: 4 }], this._palette.accent, left);
  }

  /** A strip at the bottom with the share of each tier, if there are several. */
  _paintShares(item) {
    const shares = tierShares(item.box.node);
    if (shares.length < 2) return;
    let x = item.x;
    for (const [tier, share] of shares) {
      const width = item.width * share;
      this._fillRects([{ x, y: item.y + gapped(item.height) - 3, width, height: 4 }], this._palette.tiers[tier], 1);
      x += width;
    }
  }

  /** Restore points as ticks at the top, kept ones as pins. */
  _paintMarks(item) {
    const { box } = item;
    const { points, kept } = box.node;
    let last = -Infinity;
    for (const point of points) {
      if (point <= box.start || point > box.end) continue;
      const x = spanTo(item, point).width + item.x - 1;
      const isKept = kept.includes(point);
      if (!isKept && x - last < 4) continue;
      last = x;
      if (isKept) this._paintPin(x, item.y);
      else this._fillRects([{ x: x - 2, y: item.y, width: 3, height: 6 }], this._palette.text, 0.55);
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
      if (item.count || item.height < LABEL_HEIGHT_PX || item.width < LABEL_WIDTH_PX) continue;
      const alpha = item.box.ghost ? 1 : state.scene.alphaOf(item.box, state.now);
      this._paintLabel(item, state.size, alpha);
    }
  }

  /** The text of a box in the part of it that is seen, in as many lines as there is room for. */
  _paintLabel(item, size, alpha) {
    const x0 = Math.max(item.x, 0) + 7;
    const width = Math.min(item.x + item.width, size.width) - x0 - 4;
    const y0 = Math.max(item.y, 0);
    const height = Math.min(item.y + item.height, size.height) - y0;
    if (width < UPRIGHT_PX && height > 2 * width)
      return this._writeSideways(item.box, x0 - 4, y0, width + 8, height, alpha);
    if (width < LABEL_WIDTH_PX || height < LABEL_HEIGHT_PX) return;
    const mostLines = Math.min(MOST_LINES, Math.max(1, Math.floor((height - 4) / LINE_PX)));
    const lines = this._fitter.fit(this._labelOf(item.box), width, mostLines);
    this._write(lines, x0, y0 + height / 2, this._palette.text, alpha);
  }

  _write(lines, x, middle, colour, alpha = 1) {
    const context = this._context;
    context.globalAlpha = alpha;
    context.fillStyle = colour;
    const top = middle - ((lines.length - 1) * LINE_PX) / 2;
    lines.forEach((line, at) => context.fillText(line, x, top + at * LINE_PX));
  }

  /** A label that runs down a box that is too narrow for words. */
  _writeSideways(box, x0, y0, width, height, alpha) {
    if (width < LINE_PX - 3) return;
    const lines = this._fitter.fit(this._labelOf(box), height - 10, Math.max(1, Math.floor(width / LINE_PX)));
    const context = this._context;
    context.save();
    context.translate(x0 + width / 2, y0 + 6);
    context.rotate(Math.PI / 2);
    this._write(lines, 0, 0, this._palette.text, alpha);
    context.restore();
  }

  _labelOf(box) {
    if (box.ghost) return labelGhost(box.ghost);
    if (box.id !== box.node.node) return toLabel(box.node.text);
    let label = this._labels.get(box.node);
    if (label === undefined) this._labels.set(box.node, (label = toLabel(box.node.text)));
    return label;
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
      this._fillRects([rect], this._colourOf(box.node), 0.5 * alpha);
    }
  }

  _colourOf(node) {
    return this._palette.tiers[mainTier(node)] ?? this._palette.muted;
  }
}

function labelGhost(ghost) {
  if (ghost.state === "answering") return `answering: ${formatCount(ghost.answer)} tokens`;
  return `${ghost.state} ${formatCount(ghost.doneTokens)} of ${formatCount(ghost.promptTokens)}`;
}

/** Boxes of nodes that have faded in, by tier; null: those that hold nothing. */
function groupByTier(items, { scene, now }) {
  const groups = new Map();
  for (const item of items) {
    if (item.count || item.box.ghost || scene.alphaOf(item.box, now) < 1) continue;
    const tier = mainTier(item.box.node);
    if (!groups.has(tier)) groups.set(tier, []);
    groups.get(tier).push(item);
  }
  return groups;
}

function leftEdge(item) {
  return { x: item.x, y: item.y, width: 4, height: item.height };
}

/** The part of an item up to a token offset. */
function spanTo(item, offset) {
  const { start, end } = item.box;
  const share = Math.min(1, Math.max(0, (offset - start) / Math.max(1, end - start)));
  return { x: item.x, y: item.y, width: item.width * share, height: item.height };
}

/** Boxes that are high enough leave a gap below. */
function gapped(height) {
  return height > 3 ? height - 1 : height;
}
