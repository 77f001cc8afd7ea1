/**
 * Where each node of a tree is drawn, in units that a viewport turns into pixels.
 *
 * Tokens go down: a box is the edge of a node, with a span for each message in it. Branches go to the right: each leaf has a
 * column, and a prefix spans the columns of all that continue it. An edge of few tokens is drawn as the beginning of those
 * after it. With `shown`, all other branches are one box each, and most of them one box together (a rest).
 *
 * A request that computes has a provisional box (a ghost) where its tokens leave the tree; if that is inside an edge, the
 * edge is drawn in two parts, as after the split. Costs O(nodes).
 */

import { NOTHING, TINY_TOKENS, lastMessage, spansOf } from "./spans.js";

export const LONG_TOKENS = 1024; // a longer span is as high as this, and has a mark
const LEAST_HEIGHT = 3;
const GAP_HEIGHT = 3;
const MOST_SPANS = 5;
const MOST_SPANS_SHOWN = 9; // there is more room if not everything is drawn
const MOST_JOINED = 16; // tokens of tiny edges that are drawn as one
const MOST_BRANCHES = 2; // beside what is shown, at each fork
const COLUMNS = { active: 6, shown: 2, beside: 1.5, rest: 1 };

const NONE = Object.freeze([]);

/** How high a span is: one unit more for twice the tokens, so that a short message can be read beside a long one. */
function heightOf({ start, end, isGap }) {
  return isGap ? GAP_HEIGHT : Math.max(LEAST_HEIGHT, Math.log2(Math.min(end - start, LONG_TOKENS)));
}

const known = new WeakMap(); // node → what was made of it; records of nodes do not change

/** The spans of a node with their heights, tiny edges before it included, and the message with which they end. */
function readSpans(node, joined, before, most) {
  const name = `${before.role} ${before.hasWords} ${most} ${joined.map((each) => each.node)}`;
  const found = known.get(node);
  if (found?.name === name) return found;
  const nodes = [...joined, node];
  const spans = spansOf(nodes, before, most).map((span) => ({ ...span, height: heightOf(span) }));
  spans[0].start = nodes[0].start;
  const made = { name, spans, last: lastMessage(nodes, before) };
  known.set(node, made);
  return made;
}

/**
 * One rectangle: of a node, a ghost or a rest {branches}. `id` stays the same from layout to layout; a node's last part has
 * the node's key as its id. `own` counts the nodes that it stands for, `count` those and all below.
 */
export class Box {
  constructor(id, parent, { node = null, ghost = null, rest = null, start = 0, end = 0, spans = NONE, own = 0 }) {
    this.id = id;
    this.parent = parent;
    this.node = node;
    this.ghost = ghost;
    this.rest = rest;
    this.start = start;
    this.end = end;
    this.spans = spans;
    this.own = own;
    this.joined = NONE;
    this.children = NONE;
    this.isBeside = false; // whether it is a branch beside what is shown
    this.hidden = 0; // nodes below it that are not drawn
    this.count = own;
    this.columns = 0;
    this.bottom = 0; // where the longest branch below ends
    this.x0 = this.x1 = this.y0 = this.y1 = 0;
    this.from = null; // where it was in the layout before, while it glides
  }

  /** Where a token offset is: from 0 at the top of the box to 1. */
  shareAt(offset) {
    let before = 0;
    let total = 0;
    for (const span of this.spans) {
      const length = Math.max(1, span.end - span.start);
      before += span.height * Math.min(1, Math.max(0, (offset - span.start) / length));
      total += span.height;
    }
    return total ? before / total : offset > this.start ? 1 : 0;
  }
}

/**
 * Lay out one root, null for none. Ghosts: {id, node, offset, tokens, done}; `node` is a key, null for the root. `shown`:
 * {keys, active}, the keys of what is shown and of the branch in it that gets most room; null shows everything.
 */
export function layoutTree(root, ghosts = [], shown = null) {
  const boxes = root ? new Placing(root, ghosts, shown).place() : [];
  countColumns(boxes, shown);
  const top = boxes.filter((box) => box.parent === null);
  const columns = placeColumns(boxes, top);
  const height = top.reduce((most, box) => Math.max(most, box.bottom), 0);
  const numNodes = top.reduce((sum, box) => sum + box.count, 0);
  const byId = new Map();
  for (const box of boxes) byId.set(box.id, box);
  for (const box of boxes) for (const node of box.joined) if (!byId.has(node.node)) byId.set(node.node, box);
  return { boxes, ghosts: boxes.filter((box) => box.ghost), top, columns, height, numNodes, byId };
}

/** Makes the boxes of one root, parents first, with their places along the tokens. */
class Placing {
  constructor(root, ghosts, shown) {
    this._root = root;
    this._shown = shown?.keys;
    this._boxes = [];
    this._counted = new Set(); // tiny edges, which several boxes begin with
    this._ghosts = this._groupGhosts(ghosts);
  }

  place() {
    const stack = [];
    const grow = (key, box, before) => {
      for (const ghost of this._ghosts.get(key) ?? [])
        if (isAtEnd(ghost, box)) stack.push(() => this._placeGhost(ghost, box));
      const { branches, rest } = this._choose(this._branchesOf(key));
      if (rest.length) stack.push(() => this._placeRest(key, box, rest));
      for (const branch of branches.reverse()) stack.push(() => this._placeBranch(branch, box, before, grow));
    };
    grow(null, null, NOTHING);
    while (stack.length) stack.pop()();
    return this._boxes;
  }

  /** Ghosts by the key of the node that they leave; one whose node is not here is left out. */
  _groupGhosts(ghosts) {
    const groups = new Map();
    for (const each of ghosts) {
      if (each.tokens <= 0 || (each.node !== null && !this._root.get(each.node))) continue;
      const ghost = this._raise(each);
      if (!groups.has(ghost.node)) groups.set(ghost.node, []);
      groups.get(ghost.node).push(ghost);
    }
    return groups;
  }

  /** A ghost in a branch that is drawn as one box leaves that. */
  _raise(ghost) {
    const hidden = this._shown && this._root.pathTo(ghost.node).find((node) => !this._shown.has(node.node));
    return hidden && hidden.node !== ghost.node ? { ...ghost, node: hidden.node, offset: hidden.end } : ghost;
  }

  /** What continues a node: [{node, joined}], where `joined` are tiny edges before it. */
  _branchesOf(key, joined = NONE) {
    const found = [];
    for (const node of this._root.childrenOf(key)) {
      const tokens = node.end - (joined[0] ?? node).start;
      const isTiny = node.end - node.start < TINY_TOKENS && tokens <= MOST_JOINED && !this._ghosts.has(node.node);
      if (isTiny && this._root.childrenOf(node.node).length)
        found.push(...this._branchesOf(node.node, [...joined, node]));
      else found.push({ node, joined });
    }
    return found;
  }

  /** The branches that are drawn: what is shown, and beside it those that were used last. The others are the rest. */
  _choose(all) {
    if (!this._shown) return { branches: all, rest: NONE };
    const others = all.filter(({ node }) => !this._shown.has(node.node));
    if (others.length <= MOST_BRANCHES + 1) return { branches: all, rest: NONE };
    const rank = ({ node }) => (this._ghosts.has(node.node) ? Infinity : (node.last_used ?? 0));
    const rest = new Set(others.sort((a, b) => rank(b) - rank(a)).slice(MOST_BRANCHES));
    return { branches: all.filter((each) => !rest.has(each)), rest: [...rest] };
  }

  _placeBranch({ node, joined }, parent, before, grow) {
    const isShown = this._shown?.has(node.node);
    const { spans, last } = readSpans(node, joined, before, isShown ? MOST_SPANS_SHOWN : MOST_SPANS);
    const start = joined[0]?.start ?? node.start;
    const own = 1 + this._countNew(joined);
    const ghosts = this._ghosts.get(node.node) ?? NONE;
    const inside = ghosts.filter(({ offset }) => offset > node.start && offset < node.end);
    const box = this._placeParts(node, spans, start, own, inside, parent);
    box.joined = joined;
    if (isShown ?? true) return grow(node.node, box, last);
    box.isBeside = true;
    box.hidden = this._root.countBelow(node.node).nodes - 1;
    box.count += box.hidden;
    for (const ghost of ghosts) if (isAtEnd(ghost, box)) this._placeGhost(ghost, box);
  }

  /** How many of these tiny edges no box has begun with so far. */
  _countNew(joined) {
    const before = this._counted.size;
    for (const each of joined) this._counted.add(each);
    return this._counted.size - before;
  }

  /** The box of one edge, or its parts, cut where ghosts leave it. Returns the last part. */
  _placeParts(node, spans, start, own, inside, parent) {
    const cuts = [...new Set(inside.map((ghost) => ghost.offset))].sort((a, b) => a - b);
    for (const cut of cuts) {
      parent = this._add(`${node.node}@${cut}`, parent, { node, start, end: cut, spans: cutSpans(spans, start, cut) });
      for (const ghost of inside) if (ghost.offset === cut) ghost.head = parent;
      start = cut;
    }
    const tail = this._add(node.node, parent, {
      node,
      start,
      end: node.end,
      spans: cutSpans(spans, start, node.end),
      own,
    });
    for (const ghost of inside) this._placeGhost(ghost, ghost.head);
    return tail;
  }

  _placeGhost(ghost, parent) {
    const span = { start: ghost.offset, end: ghost.offset + ghost.tokens, role: "", text: "", isGap: false };
    this._add(ghost.id, parent, { ghost, ...span, spans: [{ ...span, height: heightOf(span) }] });
  }

  _placeRest(key, parent, branches) {
    const nodes = branches.reduce((sum, { node }) => sum + this._root.countBelow(node.node).nodes, 0);
    const box = this._add(`rest-${key}`, parent, { rest: { branches: branches.length, nodes } });
    box.y1 = box.y0 + LEAST_HEIGHT;
    box.isBeside = true;
    box.count = box.hidden = nodes;
  }

  _add(id, parent, fields) {
    const box = new Box(id, parent, fields);
    box.y0 = parent ? parent.y1 : 0;
    box.y1 = box.y0 + box.spans.reduce((sum, span) => sum + span.height, 0);
    if (parent?.children === NONE) parent.children = [box];
    else parent?.children.push(box);
    this._boxes.push(box);
    return box;
  }
}

function isAtEnd(ghost, box) {
  return !box || !box.node || ghost.offset >= box.node.end || ghost.offset <= box.node.start;
}

/** The spans from one offset to another, each with its share of the height. */
function cutSpans(spans, start, end) {
  if (start === spans[0].start && end === spans.at(-1).end) return spans;
  const inside = spans.filter((span) => span.start < end && span.end > start);
  return inside.map((span) => {
    const [from, to] = [Math.max(start, span.start), Math.min(end, span.end)];
    return { ...span, start: from, end: to, height: (span.height * (to - from)) / (span.end - span.start) };
  });
}

function countColumns(boxes, shown) {
  for (let at = boxes.length - 1; at >= 0; at -= 1) {
    const box = boxes[at];
    if (!box.children.length) box.columns = shown ? COLUMNS[kindOf(box, shown)] : 1;
    box.bottom = Math.max(box.bottom, box.y1);
    if (!box.parent) continue;
    box.parent.columns += box.columns;
    box.parent.count += box.count;
    box.parent.bottom = Math.max(box.parent.bottom, box.bottom);
  }
}

function kindOf(box, shown) {
  if (box.isBeside) return box.rest ? "rest" : "beside";
  return !box.node || shown.active.has(box.node.node) ? "active" : "shown";
}

/** Give each box its columns; returns how many there are. */
function placeColumns(boxes, top) {
  let columns = 0;
  for (const box of top) {
    box.x0 = columns;
    columns += box.columns;
  }
  for (const box of boxes) {
    box.x1 = box.x0 + box.columns;
    let x = box.x0;
    for (const child of box.children) {
      child.x0 = x;
      x += child.columns;
    }
  }
  return columns;
}
