// The messages in an edge as spans, and the layout of what is shown beside what is not.

import assert from "node:assert/strict";
import { test } from "node:test";

import { labelSpan } from "../../bough/server/web/live/icicle/labels.js";
import { LONG_TOKENS, layoutTree } from "../../bough/server/web/live/icicle/layout.js";
import { NOTHING, lastMessage, spansOf } from "../../bough/server/web/live/icicle/spans.js";
import { RootMirror } from "../../bough/server/web/live/tree_mirror.js";
import { node } from "./nodes.mjs";

function makeRoot(...nodes) {
  const root = new RootMirror("");
  root.apply(nodes, []);
  return root;
}

const after = (role) => ({ role, hasWords: true });
const told = (spans) => spans.map(({ start, end, role, text }) => [start, end, role, text]);

test("an edge has a span for each message, and what an earlier edge has begun goes on with its role", () => {
  const messages = [
    [10, null, "rest of a question"],
    [20, "assistant", "An answer."],
  ];
  const edge = node(1, null, 10, 50, { messages });

  assert.deepEqual(told(spansOf([edge], after("user"), 5)), [
    [10, 20, "user", "rest of a question"],
    [20, 50, "assistant", "An answer."],
  ]);
  assert.deepEqual(lastMessage([edge], after("user")), { role: "assistant", hasWords: true });
  const bare = node(2, 1, 0, 9, { text: " so it is.<|im_end|>\n" });
  assert.deepEqual(told(spansOf([bare], after("assistant"), 5)), [[0, 9, "assistant", " so it is."]]);
});

test("marks of messages, of under four tokens, belong to the span beside them", () => {
  const messages = [
    [0, null, "\n"],
    [2, "user", "A question"],
    [20, "assistant", ""],
  ];

  assert.deepEqual(told(spansOf([node(1, null, 0, 23, { messages })], after("assistant"), 5)), [
    [0, 23, "user", "A question"],
  ]);
});

test("words that follow the mark of their message in another edge are not said to go on", () => {
  const mark = lastMessage([node(1, null, 0, 9, { messages: [[0, "user", ""]] })], NOTHING);
  const [span] = spansOf([node(2, 1, 9, 20, { text: "Which trees?" })], mark, 5);

  assert.equal(labelSpan(span, false), "User: Which trees?");
});

test("a label says who speaks, and of what goes on with an earlier edge only the words", () => {
  const spans = spansOf(
    [
      node(1, null, 9, 90, {
        messages: [
          [9, null, ", if the winter\n"],
          [30, "assistant", "Then\nwait."],
        ],
      }),
    ],
    after("user"),
    5,
  );

  assert.deepEqual(
    spans.map((span) => labelSpan(span, false)),
    ["… , if the winter", "Answer: Then⏎wait."],
  );
});

test("a role that was cut from its mark is read where the text goes on", () => {
  const head = node(1, null, 0, 3, { messages: [[0, "", ""]] });
  const tail = node(2, 1, 3, 30, { messages: [[3, null, "user\nWhich trees?"]] });

  assert.deepEqual(told(spansOf([head, tail], NOTHING, 5)), [[0, 30, "user", "Which trees?"]]);
});

test("of an edge with many messages the first and the last are drawn, and a gap with its tokens", () => {
  const messages = Array.from({ length: 12 }, (_, at) => [10 * at, at % 2 ? "assistant" : "user", `said ${at}`]);
  const spans = spansOf([node(1, null, 0, 120, { messages })], NOTHING, 5);

  assert.deepEqual(
    spans.map(({ start, end, isGap }) => [start, end, isGap]),
    [
      [0, 10, false],
      [10, 20, false],
      [20, 100, true],
      [100, 110, false],
      [110, 120, false],
    ],
  );
  assert.equal(labelSpan(spans[2], false), "… 80 tokens …");
});

test("a very long edge is as high as one of the longest drawn, and says how long it is", () => {
  const root = makeRoot(
    node(1, null, 0, 8167, { messages: [[0, "system", "Answer from this"]] }),
    node(2, 1, 8167, 8190),
  );
  const { byId } = layoutTree(root);
  const [long, short] = [byId.get(1), byId.get(2)];

  assert.equal(long.y1 - long.y0, Math.log2(LONG_TOKENS));
  assert.ok(long.y1 - long.y0 < 4 * (short.y1 - short.y0));
  assert.equal(labelSpan(long.spans[0], true), "System, 8,167 tokens: Answer from this");
});

test("an edge of under four tokens is drawn as the beginning of those after it", () => {
  const said = (text) => ({ messages: [[0, null, text]] });
  const root = makeRoot(
    node(1, null, 0, 3, { messages: [[0, "system", ""]] }),
    node(2, 1, 3, 5, said("You are a")),
    node(3, 2, 5, 20, said(" gardener.")),
    node(4, 2, 5, 30, said(" librarian.")),
  );
  const layout = layoutTree(root);

  assert.deepEqual(
    layout.boxes.map((box) => box.id),
    [3, 4],
  );
  assert.equal(layout.numNodes, 4);
  assert.equal(layout.byId.get(1), layout.byId.get(3));
  assert.deepEqual(told(layout.byId.get(4).spans), [[0, 30, "system", "You are a librarian."]]);
});

test("a leaf of under four tokens keeps its box, and so does a tiny edge with a ghost at its end", () => {
  const root = makeRoot(node(1, null, 0, 3), node(2, 1, 3, 5), node(3, 1, 3, 30));
  const ghost = { id: "r", node: 1, offset: 3, tokens: 9 };

  assert.deepEqual(
    layoutTree(root).boxes.map((box) => box.id),
    [2, 3],
  );
  assert.deepEqual(
    layoutTree(root, [ghost]).boxes.map((box) => box.id),
    [1, 2, 3, "r"],
  );
});

/** A prefix that 9 branches continue, each of two nodes; the first is used last. */
function makeWide() {
  const nodes = [node(1, null, 0, 50)];
  for (let at = 0; at < 9; at += 1) {
    nodes.push(node(10 + at, 1, 50, 60, { last_used: 100 - at }), node(20 + at, 10 + at, 60, 70));
  }
  return makeRoot(...nodes);
}

test("beside what is shown, each fork has the two branches that were used last, and the rest as one box", () => {
  const layout = layoutTree(makeWide(), [], { keys: new Set([1, 15, 25]), active: new Set([1, 15, 25]) });

  assert.deepEqual(
    layout.boxes.map((box) => box.id),
    [1, 10, 11, 15, 25, "rest-1"],
  );
  assert.equal(layout.numNodes, 19);
  assert.deepEqual([layout.byId.get(10).hidden, layout.byId.get(10).isBeside], [1, true]);
  assert.deepEqual(layout.byId.get("rest-1").rest, { branches: 6, nodes: 12 });
  assert.ok(layout.byId.get(25).columns > 3 * layout.byId.get(10).columns);
  assert.equal(layoutTree(makeWide()).boxes.length, 19);
});

test("a request in a branch that is not drawn has its ghost at the box of that branch", () => {
  const ghost = { id: "r", node: 28, offset: 66, tokens: 9 };
  const layout = layoutTree(makeWide(), [ghost], { keys: new Set([1, 15, 25]), active: new Set([1, 15, 25]) });

  assert.equal(layout.byId.get("r").parent.id, 18);
  assert.equal(layout.byId.get("rest-1").rest.branches, 6);
});
