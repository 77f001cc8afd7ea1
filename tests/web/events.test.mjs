// The reader of the event stream: what it keeps, and what it does when the connection is lost.

import assert from "node:assert/strict";
import { test } from "node:test";

import { LiveEvents } from "../../bough/server/web/live/events.js";
import { ServerError } from "../../bough/server/web/server/http.js";
import { node, request } from "./nodes.mjs";

const HELLO = ["hello", { version: 1, scope: "all" }];
const MODELS = ["models", { models: [{ model: "m", is_default: true }] }];
const TREE = [
  "tree",
  { model: "m", reset: true, more: false, roots: [{ root: "", nodes: [node(1, null, 0, 5)], gone: [] }] },
];

function makeLive(events) {
  const live = new LiveEvents({ schedule: (work) => work(), now: () => 0 });
  for (const [event, data] of events) live.apply(event, data);
  return live;
}

test("a listener is called once for all that has changed in a frame", () => {
  const frames = [];
  const live = new LiveEvents({ schedule: (work) => frames.push(work) });
  let calls = 0;
  const unsubscribe = live.subscribe(() => (calls += 1));

  for (const [event, data] of [HELLO, MODELS, TREE]) live.apply(event, data);
  frames.splice(0).forEach((work) => work());
  assert.equal(calls, 1);

  unsubscribe();
  live.apply(...MODELS);
  frames.splice(0).forEach((work) => work());
  assert.equal(calls, 1);
});

test("the tree and the figures of a model that was unloaded are forgotten", () => {
  const live = makeLive([HELLO, MODELS, TREE, ["figures", { model: "m", tiers: {} }]]);
  assert.equal(live.trees.get("m").numNodes, 1);

  live.apply("models", { models: [] });

  assert.equal(live.trees.size + live.figures.size, 0);
});

test("of the requests that have ended the last 300 are kept, and all that run", () => {
  const live = makeLive([HELLO, ["request", request("first", "computing")]]);

  for (let each = 0; each < 310; each += 1) live.apply("request", request(`r${each}`, "done"));

  assert.equal(live.requests.size, 301);
  assert.ok(live.requests.has("first"));
  assert.ok(!live.requests.has("r9"));
  assert.equal(live.historyOf("m").requests.length, 100);
});

test("after a reconnection, requests that are not told again no longer count as running", () => {
  const live = makeLive([HELLO, ["request", request("a", "computing")], ["request", request("b", "answering")]]);

  live.apply(...HELLO);
  live.apply("request", request("b", "answering"));

  assert.deepEqual(
    [...live.requests.values()].map((each) => each.state),
    ["lost", "answering"],
  );
});

test("a lost connection is opened again, and the state is told anew", async () => {
  let opened = 0;
  const done = Promise.withResolvers ? Promise.withResolvers() : makeResolvers();
  async function* open() {
    opened += 1;
    yield { event: "hello", data: HELLO[1] };
    yield { event: "tree", data: TREE[1] };
    if (opened === 1) throw new ServerError(0, "the connection to the server was lost");
    done.resolve();
    await new Promise(() => {});
  }
  const live = new LiveEvents({ open, schedule: (work) => work() });
  const problems = new Set();
  live.subscribe(() => problems.add(live.problem));

  live.start();
  await done.promise;

  assert.equal(opened, 2);
  assert.ok(problems.has("the connection to the server was lost"));
  assert.deepEqual([live.isConnected, live.problem, live.trees.get("m").resets], [true, null, 2]);
  live.stop();
});

test("a server that asks for a key is not asked again until start is called", async () => {
  let opened = 0;
  async function* open() {
    opened += 1;
    throw new ServerError(401, "a key is missing");
  }
  const live = new LiveEvents({ open, schedule: (work) => work() });
  const asked = new Promise((resolve) => live.subscribe(() => live.needsKey && resolve()));

  live.start();
  await asked;

  assert.deepEqual([opened, live.problem, live.isConnected], [1, "a key is missing", false]);
});

function makeResolvers() {
  const made = {};
  made.promise = new Promise((resolve) => (made.resolve = resolve));
  return made;
}
