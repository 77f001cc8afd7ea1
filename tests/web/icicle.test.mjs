// The icicle without its canvas: where boxes lie, which are drawn, how the view and the focus move.

import assert from "node:assert/strict";
import { test } from "node:test";

import { TextFitter, describeNode, toLabel } from "../../bough/server/web/live/icicle/labels.js";
import { layoutTree } from "../../bough/server/web/live/icicle/layout.js";
import { moveByKey } from "../../bough/server/web/live/icicle/navigation.js";
import { Scene, readRequests } from "../../bough/server/web/live/icicle/scene.js";
import { fitView, viewOf, zoomView } from "../../bough/server/web/live/icicle/viewport.js";
import { MOST_BOXES, findVisible } from "../../bough/server/web/live/icicle/visible.js";
import { conversationsThrough, keysThrough, lastRequestThrough } from "../../bough/server/web/live/passing.js";
import { mainTier } from "../../bough/server/web/live/tiers.js";
import { RootMirror } from "../../bough/server/web/live/tree_mirror.js";
import { node, request } from "./nodes.mjs";

const SIZE = { width: 400, height: 600 };

function makeRoot(...nodes) {
  const root = new RootMirror("");
  root.apply(nodes, []);
  return root;
}

/** A prefix of 16 tokens that two branches of 32 and 5 continue, and a branch of its own. */
function makeTree() {
  return makeRoot(node(1, null, 0, 16), node(2, 1, 16, 48), node(3, 1, 16, 21), node(4, null, 0, 8));
}

/** Many branches of three nodes below one prefix. */
function makeLarge(branches) {
  const nodes = [node(1, null, 0, 100)];
  for (let each = 0; each < branches; each += 1) {
    const key = 2 + 3 * each;
    nodes.push(node(key, 1, 100, 120), node(key + 1, key, 120, 130), node(key + 2, key, 120, 140));
  }
  return makeRoot(...nodes);
}

const place = ({ x0, x1, y0, y1 }) => [x0, x1, y0, y1];

test("a box is as high as the logarithm of its tokens, and a prefix spans the columns of all that continue it", () => {
  const { byId, columns, height } = layoutTree(makeTree());

  assert.deepEqual(place(byId.get(1)), [0, 2, 0, 4]);
  assert.deepEqual(place(byId.get(2)), [0, 1, 4, 9]);
  assert.deepEqual(place(byId.get(3)), [1, 2, 4, 7]); // no box is less high
  assert.deepEqual(place(byId.get(4)), [2, 3, 0, 3]);
  assert.deepEqual([columns, height], [3, 9]);
});

test("a ghost that leaves an edge inside it cuts the edge where it will be split", () => {
  const ghost = { id: "req", node: 2, offset: 24, tokens: 8, done: 1 };

  const { byId, columns, numNodes } = layoutTree(makeTree(), [ghost]);

  assert.deepEqual(place(byId.get("2@24")), [0, 2, 4, 5.25]);
  assert.deepEqual(place(byId.get(2)), [0, 1, 5.25, 9]);
  assert.deepEqual(place(byId.get("req")), [1, 2, 5.25, 8.25]);
  assert.deepEqual([columns, numNodes], [4, 4]);
});

test("ghosts at the end of an edge and at the root have columns of their own, and one without its node none", () => {
  const ghosts = [
    { id: "a", node: 3, offset: 21, tokens: 4 },
    { id: "b", node: null, offset: 0, tokens: 8 },
    { id: "c", node: 77, offset: 3, tokens: 9 },
  ];

  const { byId } = layoutTree(makeTree(), ghosts);

  assert.deepEqual(place(byId.get("a")), [1, 2, 7, 10]);
  assert.deepEqual(place(byId.get("b")), [3, 4, 0, 3]);
  assert.equal(byId.get("c"), undefined);
});

test("a chain of ten thousand nodes is laid out and drawn without recursion", () => {
  const nodes = Array.from({ length: 10_000 }, (_, at) => node(at + 1, at || null, 4 * at, 4 * at + 4));
  const layout = layoutTree(makeRoot(...nodes));

  const { items, numShown, numMerged } = findVisible(layout.top, fitView(layout, SIZE), SIZE, (box) => box);

  assert.equal(layout.byId.get(10_000).y1, 30_000);
  assert.equal(numShown + numMerged, 10_000);
  assert.ok(items.length <= 2 * SIZE.height);
});

test("boxes that are too small are merged, all nodes are counted, and zooming shows them", () => {
  const layout = layoutTree(makeLarge(3333));
  const fit = fitView(layout, SIZE);

  const seen = findVisible(layout.top, fit, SIZE, (box) => box);
  assert.equal(seen.numShown + seen.numMerged, 10_000);
  assert.ok(seen.items.length <= MOST_BOXES);
  assert.equal(
    seen.items.reduce((sum, item) => sum + item.count, 0),
    seen.numMerged,
  );

  let view = fit;
  for (let step = 0; step < 9; step += 1) view = zoomView(view, 2, { x: 200, y: 590 }, layout, SIZE);
  const near = findVisible(layout.top, view, SIZE, (box) => box);
  assert.equal(near.numMerged, 0);
  assert.ok(near.numShown > 10);
});

test("zooming keeps the point under the pointer, and never leaves the layout", () => {
  const layout = layoutTree(makeLarge(100));
  const fit = fitView(layout, SIZE);

  const near = zoomView(fit, 4, { x: 200, y: 100 }, layout, SIZE);
  const columnAt = (view) => view.x0 + (view.x1 - view.x0) / 2;
  assert.ok(Math.abs(columnAt(near) - columnAt(fit)) < 1e-9);

  const far = zoomView(zoomView(near, 0.01, { x: 0, y: 0 }, layout, SIZE), 0.01, { x: 0, y: 0 }, layout, SIZE);
  assert.deepEqual(far, fit);
  const box = layout.byId.get(5);
  const view = viewOf(box, layout, SIZE);
  assert.ok(view.x0 <= box.x0 && view.x1 >= box.x1 && view.y0 <= box.y0 && view.y1 >= box.bottom);
});

test("while columns are too narrow to be read, zooming enlarges nothing but them", () => {
  const layout = layoutTree(makeLarge(1000));
  const fit = fitView(layout, SIZE);

  const near = zoomView(fit, 4, { x: 100, y: 300 }, layout, SIZE);
  assert.deepEqual([near.y0, near.y1], [fit.y0, fit.y1]);
  assert.ok(near.x1 - near.x0 < fit.x1 / 3);
});

test("arrows go to parent, child and siblings, Home and End to the first and the last", () => {
  const layout = layoutTree(makeTree(), [{ id: "req", node: 2, offset: 21, tokens: 4 }]);
  const go = (key, from) => moveByKey(key, layout.byId.get(from), layout).id;

  assert.equal(go("ArrowDown", 1), 2); // through the part that the ghost has cut off
  assert.equal(go("ArrowUp", 2), 1);
  assert.equal(go("ArrowRight", 2), 3);
  assert.equal(go("ArrowRight", 3), 4); // the next column, nearer to the root
  assert.equal(go("ArrowLeft", 4), 1);
  assert.equal(go("ArrowLeft", 1), 1);
  assert.equal(go("Home", 3), 1);
  assert.equal(go("End", 1), 4);
  assert.equal(moveByKey("x", layout.byId.get(1), layout), null);
});

test("a running request has a ghost where its tokens leave the tree, and its path glows up to what it reuses", () => {
  const running = request("r", "computing", { node: 2, offset: 21, cached_tokens: 19, done_tokens: 60 });
  const requests = new Map([["r", running]]);

  const { ghosts, glows } = readRequests(requests, "m", "", new Map(), 0);
  const root = makeTree();
  const layout = layoutTree(root, ghosts);
  const scene = new Scene();
  scene.update(layout, glows, root, 0, { isMoving: true });

  assert.deepEqual([ghosts[0].offset, ghosts[0].tokens, ghosts[0].done], [21, 79, 39]);
  assert.deepEqual([...scene.glowOf.keys()].map((box) => box.id).sort(), [1, "2@21"]);
  assert.deepEqual(readRequests(requests, "m", "other", new Map(), 0), { ghosts: [], glows: [] });
});

test("boxes glide to a new layout, new ones fade in and those that are gone fade out", () => {
  const root = makeTree();
  const scene = new Scene();
  scene.update(layoutTree(root), [], root, 0, { isMoving: true });
  root.apply([node(5, 1, 16, 22)], [2]);
  const layout = layoutTree(root);
  scene.update(layout, [], root, 1000, { isMoving: true });

  const moved = layout.byId.get(3);
  assert.equal(scene.placeOf(moved, 1000).x0, 1);
  assert.ok(scene.placeOf(moved, 1100).x0 < 1);
  assert.equal(scene.placeOf(moved, 1200).x0, 0);
  assert.ok(scene.alphaOf(layout.byId.get(5), 1100) < 1);
  assert.deepEqual(
    scene.takeLeaving(1100).map((each) => each.box.id),
    [2],
  );
  assert.equal(scene.isMoving(1100), true);
  assert.equal(scene.takeLeaving(2000).length, 0);
  assert.equal(scene.isMoving(2000), false);
});

test("without motion a new layout is there at once", () => {
  const root = makeTree();
  const scene = new Scene();
  scene.update(layoutTree(root), [], root, 0, { isMoving: false });
  root.apply([], [2]);
  const layout = layoutTree(root);
  scene.update(layout, [], root, 10, { isMoving: false });

  assert.equal(scene.placeOf(layout.byId.get(3), 10).x0, 0);
  assert.equal(scene.isMoving(10), false);
});

test("a conversation passes through the nodes on the way to its end, if that is still where it was noted", () => {
  const root = makeTree();
  const end = { messageId: "x", requestId: "r", node: 2, root: "", model: "m", offset: 30 };
  const through = (key, ends) =>
    conversationsThrough([{ id: "c", title: "t", ends }], root.get(key), { model: "m", root, requests: new Map() });

  assert.deepEqual(through(1, [end]), [{ id: "c", title: "t", messageId: "x" }]);
  assert.equal(through(2, [end]).length, 1);
  assert.equal(through(3, [end]).length, 0);
  assert.equal(through(1, [{ ...end, offset: 900 }]).length, 0); // the node is another one by now
  assert.equal(through(1, [{ ...end, model: "other" }]).length, 0);
});

test("a conversation marks the nodes of all its branches, and a newer place told by the stream counts", () => {
  const root = makeTree();
  const end = { messageId: "x", requestId: "r", node: 2, root: "", model: "m", offset: 30 };
  const other = { ...end, requestId: "s", node: null };
  const requests = new Map([["s", request("s", "done", { node: 3, offset: 20 })]]);

  const keys = keysThrough([end, other], { model: "m", root, requests });

  assert.deepEqual([...keys].sort(), [1, 2, 3]);
  assert.equal(keysThrough([], { model: "m", root, requests }).size, 0);
});

test("the last request that passed a node is found", () => {
  const root = makeTree();
  const requests = new Map([
    ["a", request("a", "done", { node: 2 })],
    ["b", request("b", "done", { node: 3 })],
    ["c", request("c", "computing", { node: 2 })],
  ]);

  assert.equal(lastRequestThrough(requests, root.get(1), { model: "m", root }).id, "b");
  assert.equal(lastRequestThrough(requests, root.get(2), { model: "m", root }).id, "a");
  assert.equal(lastRequestThrough(requests, root.get(4), { model: "m", root }), null);
});

test("a node has the tier of a lane, else the fastest that holds some of it", () => {
  assert.equal(mainTier(node(1, null, 0, 5, { in_use: true })), "lane");
  assert.equal(mainTier(node(1, null, 0, 5, { tiers: { host: 1, disk: 3 } })), "host");
  assert.equal(mainTier(node(1, null, 0, 5, { tiers: {} })), null);
});

test("labels show what cannot be seen, so that no text can change how others are shown", () => {
  assert.equal(toLabel("<|im_start|>user\nWhen?<|im_end|>\n"), "user: When?\u00a0·");
  assert.equal(toLabel("a\u202eb\u200bc\u0000d\ne"), "a▯b▯c▯d⏎e");
  const said = describeNode(node(1, null, 31, 64, { text: "When do you open?", hits: 3, kept: [64], points: [64] }));
  assert.equal(said, "tokens 31 to 64, 'When do you open?', device, 3 uses, kept");
});

test("a label is broken at spaces and cut with an ellipsis", () => {
  const fitter = new TextFitter((text) => 10 * text.length, 10);

  assert.deepEqual(fitter.fit("one two three", 80, 2), ["one two", "three"]);
  assert.deepEqual(fitter.fit("one two three", 80, 1), ["one two…"]);
  assert.deepEqual(fitter.fit("abcdefghijkl", 50, 3), ["abcde", "fghij", "kl"]);
  assert.deepEqual(fitter.fit("abc", 5, 1), []);
});
