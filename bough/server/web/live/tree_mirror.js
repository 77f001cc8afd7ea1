/**
 * The mirror of one model's tree, kept up to date by the `tree` events of the stream.
 *
 * A node is what the server told of it, and `order`: the place among its siblings. When an edge is split, the new head
 * takes the place of its tail, so that branches do not jump. Nodes may come before their parents; until the parent is
 * there they are in the mirror, but not below the root.
 */

/** The nodes of one root (one salt). */
export class RootMirror {
  constructor(name) {
    this.name = name;
    this.nodes = new Map(); // key → node
    this.version = 0;
    this._children = new Map(); // key of the parent, null: the root → Set of keys
    this._sorted = new Map(); // the same, as arrays in order, made when they are asked for
  }

  /** Take over new records of nodes and forget those that are gone. */
  apply(records, gone) {
    for (const record of records) this._put(record);
    for (const key of gone) this._remove(key);
    this.version += 1;
  }

  get(key) {
    return this.nodes.get(key);
  }

  /** The nodes below a node, or below the root (null), in a stable order. */
  childrenOf(key) {
    let sorted = this._sorted.get(key);
    if (!sorted) {
      sorted = [...(this._children.get(key) ?? [])]
        .map((each) => this.nodes.get(each))
        .sort((a, b) => a.order - b.order);
      this._sorted.set(key, sorted);
    }
    return sorted;
  }

  /** The nodes from the root to this one; empty if it is not there, or not connected to the root yet. */
  pathTo(key) {
    const path = [];
    let node = this.nodes.get(key);
    while (node && path.length <= this.nodes.size) {
      path.push(node);
      if (node.parent === null) return path.reverse();
      node = this.nodes.get(node.parent);
    }
    return [];
  }

  /** Whether the path to a node passes through another one (or ends there). */
  passesThrough(endKey, key) {
    const target = this.nodes.get(key);
    let node = this.nodes.get(endKey);
    while (target && node && node.start >= target.start) {
      if (node === target) return true;
      node = this.nodes.get(node.parent);
    }
    return false;
  }

  /** How many nodes and tokens a node has with all below it. */
  countBelow(key) {
    let nodes = 0;
    let tokens = 0;
    const stack = [this.nodes.get(key)].filter(Boolean);
    while (stack.length) {
      const node = stack.pop();
      nodes += 1;
      tokens += node.end - node.start;
      stack.push(...this.childrenOf(node.node));
    }
    return { nodes, tokens };
  }

  _put(record) {
    const before = this.nodes.get(record.node);
    const node = { ...record, order: before?.order ?? record.node };
    if (before && before.parent !== record.parent) this._unlink(before);
    for (const key of this._children.get(record.node) ?? [])
      node.order = Math.min(node.order, this.nodes.get(key).order);
    this.nodes.set(record.node, node);
    this._link(node);
  }

  _remove(key) {
    const node = this.nodes.get(key);
    if (!node) return;
    this._unlink(node);
    this.nodes.delete(key);
  }

  _link(node) {
    const siblings = this._children.get(node.parent);
    if (siblings) siblings.add(node.node);
    else this._children.set(node.parent, new Set([node.node]));
    this._sorted.delete(node.parent);
    this._raise(node);
  }

  /** Give the nodes above the order of a node that is older than they are. */
  _raise(node) {
    let above = this.nodes.get(node.parent);
    while (above && above.order > node.order) {
      above.order = node.order;
      this._sorted.delete(above.parent);
      above = this.nodes.get(above.parent);
    }
  }

  _unlink(node) {
    const siblings = this._children.get(node.parent);
    siblings?.delete(node.node);
    if (siblings?.size === 0) this._children.delete(node.parent);
    this._sorted.delete(node.parent);
  }
}

/** The roots of one model. `isWhole` is false while pieces of a large tree still come; `resets` counts beginnings. */
export class TreeMirror {
  constructor() {
    this.roots = new Map(); // name → RootMirror
    this.version = 0;
    this.resets = 0;
    this.isWhole = false;
  }

  /** Take over one `tree` event. */
  apply({ reset, roots, more }) {
    if (reset) {
      this.roots.clear();
      this.resets += 1;
    }
    for (const { root, nodes, gone } of roots) this._rootOf(root).apply(nodes, gone);
    for (const [name, mirror] of this.roots) if (mirror.nodes.size === 0) this.roots.delete(name);
    this.isWhole = !more;
    this.version += 1;
  }

  get numNodes() {
    let total = 0;
    for (const root of this.roots.values()) total += root.nodes.size;
    return total;
  }

  _rootOf(name) {
    let mirror = this.roots.get(name);
    if (!mirror) this.roots.set(name, (mirror = new RootMirror(name)));
    return mirror;
  }
}
