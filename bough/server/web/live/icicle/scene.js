/**
 * A layout on its way to the next one: boxes glide to their new places, new ones fade in, those that are gone fade out.
 *
 * Also which parts of the tree running requests reuse, load and compute now. Time is passed in, in milliseconds.
 */

import { isRunning } from "../events.js";

export const GLIDE_MS = 200;
export const FADE_MS = 450;
export const AFTERGLOW_MS = 1500;
const MOST_LEAVING = 300;

/** What requests on one root are doing: ghosts for the layout, and which tokens of which path are reused or loading. */
export function readRequests(requests, model, rootName, endedAt, now) {
  const ghosts = [];
  const glows = [];
  for (const each of requests.values()) {
    if (each.model !== model || each.root !== rootName) continue;
    const isLive = isRunning(each);
    const age = isLive ? 0 : now - (endedAt.get(each.id) ?? -Infinity);
    if (age > AFTERGLOW_MS) continue;
    const reach = each.state === "loading" ? each.matched_tokens : each.cached_tokens;
    if (each.node !== null && reach > 0)
      glows.push({ node: each.node, reach, isLoading: each.state === "loading", age });
    if (isLive && each.state !== "waiting") ghosts.push(ghostOf(each));
  }
  return { ghosts, glows };
}

function ghostOf(request) {
  const offset = request.node === null ? 0 : request.offset;
  const prompt = Math.max(0, request.prompt_tokens - offset);
  const done = Math.max(0, Math.min(prompt, request.done_tokens - offset));
  const answer = Math.max(0, request.completion_tokens - Math.max(0, offset - request.prompt_tokens));
  const { id, node, state, done_tokens: doneTokens, prompt_tokens: promptTokens } = request;
  return { id, node, offset, tokens: prompt + answer, done: done + answer, answer, state, doneTokens, promptTokens };
}

/** The boxes of a layout with where they come from. */
export class Scene {
  constructor() {
    this.layout = { boxes: [], ghosts: [], top: [], rows: 0, width: 0, numNodes: 0, byId: new Map() };
    this.glowOf = new Map(); // box → {reach, isLoading, age, since}
    this.leaving = []; // {box, place, since}
    this._startedAt = -Infinity;
    this._bornAt = new Map(); // box id → time
    this.isPulsing = false; // whether a request waits, loads or computes
  }

  /** Go over to a new layout. Without motion it is there at once. */
  update(layout, glows, root, now, { isMoving }) {
    const before = this.layout;
    const isGliding = isMoving && before.boxes.length > 0;
    if (isGliding) {
      const numKept = this._noteOrigins(before, layout, now);
      if (numKept < before.boxes.length) this._noteLeaving(before, layout, now);
    } else this.leaving = [];
    this._carryDone(before, layout);
    this.layout = layout;
    this._startedAt = isGliding ? now : -Infinity;
    this._setGlows(glows, root, now);
    this.isPulsing = isMoving && layout.ghosts.some((box) => box.ghost.state !== "answering");
    this._forgetBirths(now);
  }

  /** Where a box is now, in units of the layout. */
  placeOf(box, now) {
    const { from } = box;
    if (!from || now >= this._startedAt + GLIDE_MS) return box;
    const share = ease((now - this._startedAt) / GLIDE_MS);
    const mix = (name) => from[name] + (box[name] - from[name]) * share;
    return { x0: mix("x0"), x1: mix("x1"), y0: mix("y0"), y1: mix("y1") };
  }

  /** How far a box has faded in: from 0 to 1. */
  alphaOf(box, now) {
    const born = this._bornAt.get(box.id);
    return born === undefined ? 1 : Math.min(1, Math.max(0.08, (now - born) / FADE_MS));
  }

  /** The share of a ghost's tokens that is done, growing smoothly. */
  doneShare(box, now) {
    const { ghost } = box;
    const share = Math.min(1, Math.max(0, (now - this._startedAt) / GLIDE_MS));
    const done =
      ghost.doneBefore === undefined ? ghost.done : ghost.doneBefore + (ghost.done - ghost.doneBefore) * share;
    return Math.min(1, done / Math.max(1, ghost.tokens));
  }

  /** Whether anything moves or fades at this time. */
  isMoving(now) {
    if (now < this._startedAt + GLIDE_MS || this.leaving.length) return true;
    for (const born of this._bornAt.values()) if (now < born + FADE_MS) return true;
    for (const glow of this.glowOf.values()) if (glow.age > 0 && now < glow.endsAt) return true;
    return false;
  }

  /** Boxes that fade out, each with what is left of it. */
  takeLeaving(now) {
    this.leaving = this.leaving.filter((each) => now < each.since + FADE_MS);
    return this.leaving.map((each) => ({ ...each, alpha: 1 - (now - each.since) / FADE_MS }));
  }

  /** Note where each box was before, and which are new; returns how many were there. */
  _noteOrigins(before, layout, now) {
    let numKept = 0;
    for (const box of layout.boxes) {
      const old = before.byId.get(box.id);
      if (!old) this._bornAt.set(box.id, this._bornAt.get(box.id) ?? now);
      else {
        numKept += 1;
        if (old.from || !isSamePlace(old, box)) box.from = copyPlace(this.placeOf(old, now));
      }
    }
    return numKept;
  }

  _noteLeaving(before, layout, now) {
    const gone = before.boxes.filter((box) => box.node && box.id === box.node.node && !layout.byId.has(box.id));
    const news = gone
      .slice(0, MOST_LEAVING)
      .map((box) => ({ box, place: copyPlace(this.placeOf(box, now)), since: now }));
    this.leaving = [...this.leaving, ...news].slice(-MOST_LEAVING);
  }

  _carryDone(before, layout) {
    for (const box of layout.ghosts) {
      const old = before.byId.get(box.id);
      if (old) box.ghost.doneBefore = Math.max(0, old.ghost.done - (box.start - old.start));
    }
  }

  _setGlows(glows, root, now) {
    this.glowOf = new Map();
    for (const glow of glows) {
      const path = root ? root.pathTo(glow.node) : [];
      for (const node of path) {
        if (node.start >= glow.reach) break;
        const endsAt = now + AFTERGLOW_MS - glow.age;
        for (let box = this.layout.byId.get(node.node); box && box.node === node; box = box.parent) {
          if (box.start < glow.reach) this.glowOf.set(box, { ...glow, endsAt });
        }
      }
    }
  }

  _forgetBirths(now) {
    for (const [id, born] of this._bornAt) if (now > born + FADE_MS) this._bornAt.delete(id);
  }
}

function isSamePlace(a, b) {
  return a.x0 === b.x0 && a.x1 === b.x1 && a.y0 === b.y0 && a.y1 === b.y1;
}

function copyPlace({ x0, x1, y0, y1 }) {
  return { x0, x1, y0, y1 };
}

function ease(share) {
  const t = Math.min(1, Math.max(0, share));
  return t * (2 - t);
}
