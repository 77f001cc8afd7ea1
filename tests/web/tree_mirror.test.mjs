// The mirror of the tree: what the events tell, in whatever order they come.

import assert from "node:assert/strict";
import { test } from "node:test";

import { RootMirror, TreeMirror } from "../../bough/server/web/live/tree_mirror.js";
import { node } from "./nodes.mjs";

const event = (nodes, { gone = [], root = "", reset = false, more = false } = {}) => ({
  reset,
  more,
  roots: [{ root, nodes, gone }],
});
const keys = (nodes) => nodes.map((each) => each.node);

test("a split puts the new head where its tail was, and the tail keeps its key", () => {
  const root = new RootMirror("");
  root.apply([node(1, null, 0, 70), node(2, null, 0, 9)], []);

  root.apply([node(4, 3, 23, 31), node(1, 3, 23, 70), node(3, null, 0, 23)], []);

  assert.deepEqual(keys(root.childrenOf(null)), [3, 2]);
  assert.deepEqual(keys(root.childrenOf(3)), [1, 4]);
  assert.deepEqual(keys(root.pathTo(1)), [3, 1]);
});

test("a head that comes before its tail is put in the same place", () => {
  const root = new RootMirror("");
  root.apply([node(1, null, 0, 70), node(2, null, 0, 9)], []);

  root.apply([node(3, null, 0, 23)], []);
  root.apply([node(1, 3, 23, 70)], []);

  assert.deepEqual(keys(root.childrenOf(null)), [3, 2]);
});

test("nodes that come before their parents are not below the root until these are there", () => {
  const tree = new TreeMirror();
  tree.apply(event([node(7, 5, 10, 20)], { reset: true, more: true }));
  const root = tree.roots.get("");
  assert.equal(tree.isWhole, false);
  assert.deepEqual(root.pathTo(7), []);
  assert.deepEqual(root.childrenOf(null), []);

  tree.apply(event([node(5, null, 0, 10)]));

  assert.equal(tree.isWhole, true);
  assert.deepEqual(keys(root.pathTo(7)), [5, 7]);
});

test("nodes that are gone are forgotten, and a merged node goes to its new parent", () => {
  const root = new RootMirror("");
  root.apply([node(1, null, 0, 5), node(2, 1, 5, 9), node(3, 2, 9, 12), node(4, 2, 9, 20)], []);

  root.apply([node(3, 1, 5, 12)], [2, 4]); // 4 was evicted, and 2 merged into 3

  assert.deepEqual(keys(root.childrenOf(1)), [3]);
  assert.equal(root.get(4), undefined);
  assert.deepEqual(root.countBelow(1), { nodes: 2, tokens: 12 });
});

test("a reset forgets all roots, and each root has its own nodes", () => {
  const tree = new TreeMirror();
  tree.apply(event([node(1, null, 0, 5)], { root: "alice", reset: true }));
  tree.apply(event([node(2, null, 0, 6)], { root: "bob" }));
  assert.deepEqual([...tree.roots.keys()], ["alice", "bob"]);
  assert.equal(tree.numNodes, 2);

  tree.apply(event([node(9, null, 0, 7)], { root: "carol", reset: true }));

  assert.deepEqual([...tree.roots.keys()], ["carol"]);
  assert.equal(tree.resets, 2);
});

test("a root whose last node is gone is gone", () => {
  const tree = new TreeMirror();
  tree.apply(event([node(1, null, 0, 5)], { reset: true }));

  tree.apply(event([], { gone: [1] }));

  assert.equal(tree.roots.size, 0);
});

test("a path passes through the nodes on it, and through no others", () => {
  const root = new RootMirror("");
  root.apply([node(1, null, 0, 5), node(2, 1, 5, 9), node(3, 1, 5, 12), node(4, 2, 9, 20)], []);

  const passed = [1, 2, 3, 4, 99].filter((key) => root.passesThrough(4, key));

  assert.deepEqual(passed, [1, 2, 4]);
});
