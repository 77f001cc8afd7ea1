/**
 * Where each node of a tree is drawn, in units that a viewport turns into pixels.
 *
 * Tokens go to the right: a box is as wide as its edge has tokens, by the chosen scale. Branches go down: each leaf has
 * one row, and a prefix spans the rows of all that continue it. A request that computes has a provisional box (a ghost)
 * where its tokens leave the tree; if that is inside an edge, the edge is drawn in two parts, as after the split.
 *
 * Costs O(nodes).
 */

/** How wide an edge of so many tokens is. Each edge is scaled alone: a short one after a long one stays readable. */
export const SCALES = {
  linear: (tokens) => tokens,
  "square root": (tokens) => Math.sqrt(tokens),
  logarithm: (tokens) => Math.log2(1 + tokens),
};

const NONE = Object.freeze([]);

/** One rectangle. `id` stays the same from layout to layout; a node's last part has the node's key as its id. */
export class Box {
  constructor(id, node, ghost, start, end, parent) {
    this.id = id;
    this.node = node; // null for a ghost
    this.ghost = ghost; // null for a node
    this.start = start;
    this.end = end;
    this.parent = parent;
    this.children = NONE;
    this.level = parent ? parent.level + 1 : 1;
    this.count = node && id === node.node ? 1 : 0; // nodes in this box and those to its right
    this.rows = 0;
    this.right = 0; // where the widest branch below ends
    this.x0 = this.x1 = this.y0 = this.y1 = 0;
    this.from = null; // where it was in the layout before, while it glides
  }

  /** The place of a token offset inside this box. */
  xAt(offset) {
    const share = this.end > this.start ? (offset - this.start) / (this.end - this.start) : 1;
    return this.x0 + (this.x1 - this.x0) * Math.min(1, Math.max(0, share));
  }
}

/** Lay out one root, null for none. Ghosts: {id, node, offset, tokens, done}; `node` is a key, null for the root. */
export function layoutTree(root, ghosts = [], scaleName = "square root") {
  const scale = SCALES[scaleName];
  const boxes = root ? placeBoxes(root, groupGhosts(root, ghosts), scale) : [];
  countRows(boxes);
  const top = boxes.filter((box) => box.parent === null);
  const rows = stackRows(boxes, top);
  const width = top.reduce((most, box) => Math.max(most, box.right), 0);
  const numNodes = top.reduce((sum, box) => sum + box.count, 0);
  const byId = new Map();
  for (const box of boxes) byId.set(box.id, box);
  return { boxes, ghosts: boxes.filter((box) => box.ghost), top, rows, width, numNodes, byId };
}

/** Ghosts by the key of the node that they leave; one whose node is not here is left out. */
function groupGhosts(root, ghosts) {
  const groups = new Map();
  for (const ghost of ghosts) {
    if (ghost.tokens <= 0 || (ghost.node !== null && !root.get(ghost.node))) continue;
    if (!groups.has(ghost.node)) groups.set(ghost.node, []);
    groups.get(ghost.node).push(ghost);
  }
  return groups;
}

/** All boxes, parents first, with their places along the tokens. */
function placeBoxes(root, ghosts, scale) {
  const boxes = [];
  const stack = [];
  const grow = (key, parent) => {
    const leaving = (ghosts.get(key) ?? []).filter((ghost) => isAtEnd(ghost, parent));
    for (let at = leaving.length - 1; at >= 0; at -= 1) stack.push({ ghost: leaving[at], parent });
    const children = root.childrenOf(key);
    for (let at = children.length - 1; at >= 0; at -= 1) stack.push({ node: children[at], parent });
  };
  grow(null, null);
  while (stack.length) {
    const { node, ghost, parent } = stack.pop();
    if (ghost) boxes.push(placeGhost(ghost, parent, scale));
    else grow(node.node, placeEdge(node, ghosts.get(node.node), parent, scale, boxes));
  }
  return boxes;
}

function isAtEnd(ghost, box) {
  return !box || !box.node || ghost.offset >= box.node.end || ghost.offset <= box.node.start;
}

/** The box of one edge, or its parts if ghosts leave it on the way. Returns the last one. */
function placeEdge(node, ghosts, parent, scale, boxes) {
  if (ghosts) return placeParts(node, ghosts, parent, scale, boxes);
  const box = place(new Box(node.node, node, null, node.start, node.end, parent), scale(node.end - node.start));
  boxes.push(box);
  return box;
}

/** The parts of one edge, cut where ghosts leave it. Returns the last part. */
function placeParts(node, ghosts, parent, scale, boxes) {
  const inside = ghosts.filter((ghost) => ghost.offset > node.start && ghost.offset < node.end);
  const cuts = [...new Set(inside.map((ghost) => ghost.offset))].sort((a, b) => a - b);
  const unit = scale(node.end - node.start) / Math.max(1, node.end - node.start);
  const heads = new Map(); // offset where it ends → part
  let start = node.start;
  for (const cut of cuts) {
    parent = place(new Box(`${node.node}@${cut}`, node, null, start, cut, parent), unit * (cut - start));
    heads.set(cut, parent);
    boxes.push(parent);
    start = cut;
  }
  const tail = place(new Box(node.node, node, null, start, node.end, parent), unit * (node.end - start));
  boxes.push(tail);
  for (const ghost of inside) {
    boxes.push(placeGhost(ghost, heads.get(ghost.offset), scale));
  }
  return tail;
}

function placeGhost(ghost, parent, scale) {
  return place(new Box(ghost.id, null, ghost, ghost.offset, ghost.offset + ghost.tokens, parent), scale(ghost.tokens));
}

function place(box, width) {
  box.x0 = box.parent ? box.parent.x1 : 0;
  box.x1 = box.x0 + width;
  if (box.parent?.children === NONE) box.parent.children = [box];
  else box.parent?.children.push(box);
  return box;
}

function countRows(boxes) {
  for (let at = boxes.length - 1; at >= 0; at -= 1) {
    const box = boxes[at];
    box.rows = Math.max(1, box.rows);
    box.right = Math.max(box.right, box.x1);
    if (!box.parent) continue;
    box.parent.rows += box.rows;
    box.parent.count += box.count;
    box.parent.right = Math.max(box.parent.right, box.right);
  }
}

/** Give each box its rows; returns how many there are. */
function stackRows(boxes, top) {
  let rows = 0;
  for (const box of top) {
    box.y0 = rows;
    rows += box.rows;
  }
  for (const box of boxes) {
    box.y1 = box.y0 + box.rows;
    let y = box.y0;
    for (const child of box.children) {
      child.y0 = y;
      y += child.rows;
    }
  }
  return rows;
}
