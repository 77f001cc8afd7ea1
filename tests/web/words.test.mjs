/** What the chat sends and says: settings as fields of a request, figures as sentences, blocks of an answer, turns. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { BlockSplitter } from "../../bough/server/web/chat/blocks.js";
import {
  describeFigures,
  describeLeftOut,
  describeProgress,
  figuresOf,
  shareDone,
  writeBytes,
  writeSeconds,
} from "../../bough/server/web/chat/figures.js";
import { Turns } from "../../bough/server/web/chat/pacing.js";
import { LEAVE_OUT, readSettings, withSeedOf } from "../../bough/server/web/chat/settings.js";

test("empty settings send only that no message may be left out", () => {
  const empty = { temperature: " ", stop: "", tools: "", format: "" };
  assert.deepEqual(readSettings(empty), { fields: { truncate: false }, problems: {} });
  assert.equal(readSettings({ full: LEAVE_OUT }).fields.truncate, true);
});

test("settings become the fields of a request", () => {
  const { fields, problems } = readSettings({
    temperature: "0.5",
    top_k: "0",
    seed: "7",
    num_predict: "−1",
    stop: "END\n\\n\\n",
    format: "schema",
    schema: '{"type": "object"}',
    think: "off",
    tools: '[{"type": "function", "function": {"name": "f"}}]',
  });
  assert.deepEqual(problems, {});
  assert.deepEqual(fields, {
    options: { temperature: 0.5, top_k: 0, seed: 7, num_predict: -1, stop: ["END", "\n\n"] },
    format: { type: "object" },
    think: false,
    tools: [{ type: "function", function: { name: "f" } }],
    truncate: false,
  });
  assert.equal(withSeedOf(fields, 2).options.seed, 9);
  assert.equal(withSeedOf(fields, 0), fields);
});

test("each wrong setting has a sentence with what was typed", () => {
  const { fields, problems } = readSettings({
    temperature: "hot",
    top_p: "1.5",
    top_k: "1.5",
    format: "schema",
    schema: "{",
    tools: "{}",
  });
  assert.deepEqual(fields, { truncate: false });
  assert.match(problems.temperature, /“hot”/);
  assert.match(problems.top_p, /1\.5, and must be from 0 to 1/);
  assert.match(problems.top_k, /whole number/);
  assert.match(problems.schema, /not JSON/);
  assert.match(problems.tools, /not a list/);
  assert.match(readSettings({ tools: "[{}]" }).problems.tools, /Tool 1 has no function/);
  assert.match(readSettings({ format: "schema" }).problems.schema, /empty/);
});

test("an answer says what was reused, computed and saved, and how quick it was", () => {
  const last = {
    prompt_eval_count: 41,
    prompt_eval_cached_count: 36,
    prompt_eval_duration: 48e6,
    eval_count: 42,
    eval_duration: 42e9 / 110,
    done_reason: "stop",
  };
  const figures = { ...figuresOf(last), first_token_s: 0.048, without_s: 0.31 };
  assert.equal(
    describeFigures(figures).join(", "),
    "36 tokens reused, 5 computed, first token after 48 ms (about 310 ms without the cache), 42 tokens at 110/s",
  );
  assert.equal(describeFigures({ ...figures, cached_tokens: 0 })[2], "first token after 48 ms");
  assert.deepEqual(describeFigures({}), []);
});

test("a request says how far it is", () => {
  assert.equal(describeProgress(undefined, false), "asking the server");
  assert.equal(describeProgress({ state: "waiting" }, false), "waiting for a lane");
  const computing = { state: "computing", done_tokens: 512, prompt_tokens: 2000 };
  assert.equal(describeProgress(computing, false), "computing 512 of 2,000 tokens");
  assert.equal(shareDone(computing), 0.256);
  assert.equal(describeProgress({ state: "answering", completion_tokens: 1 }, true), "answering, 1 token");
});

test("an answer says which messages the model was not given", () => {
  const figures = figuresOf({ done_reason: "stop", messages_left_out: 4 });

  assert.equal(describeLeftOut(figures), "The 4 oldest messages were left out: the chat is longer than the context.");
  assert.equal(describeLeftOut(figuresOf({})), "");
});

test("times and sizes have few digits", () => {
  assert.deepEqual([0.0004, 0.048, 0.31, 0.9999, 12.345].map(writeSeconds), [
    "0.4 ms",
    "48 ms",
    "310 ms",
    "1 s",
    "12.3 s",
  ]);
  assert.deepEqual([0, 1023, 98_400_000, 640_011_438].map(writeBytes), ["0 bytes", "1.0 kB", "98.4 MB", "640 MB"]);
});

const DOCUMENT = [
  "# Title\n\nA paragraph\nof two lines.\n\n",
  "1. one\n\n2. two\n   more\n\n",
  "```py\nif x:\n\n    # no heading\n```\n\n",
  "| a | b |\n|---|--:|\n| 1 | 2 |\n\n",
  "> quote\n\nThe end",
].join("");

test("blocks that have been closed never change, however the text comes, and nothing is lost", () => {
  const whole = new BlockSplitter().update(DOCUMENT);
  for (const step of [1, 3, 17]) {
    const splitter = new BlockSplitter();
    let closed = [];
    for (let end = step; end < DOCUMENT.length + step; end += step) {
      const blocks = splitter.update(DOCUMENT.slice(0, end));
      assert.equal(blocks.join(""), DOCUMENT.slice(0, end));
      assert.deepEqual(blocks.slice(0, closed.length), closed);
      closed = blocks.slice(0, -1);
    }
    assert.deepEqual(splitter.update(DOCUMENT), whole);
  }
  assert.equal(whole.length, 6); // what has no whole line yet belongs to the last
  assert.match(whole[2], /^1\. one[^]*more\n\n$/);
  assert.match(whole[3], /^```py[^]*```\n\n$/);
});

test("a text that is another one is split anew", () => {
  const splitter = new BlockSplitter();
  splitter.update("one\n\ntwo\n\nthree\n");
  assert.deepEqual(splitter.update("four\n\nfive\n"), ["four\n\n", "five\n"]);
  assert.deepEqual(splitter.update("x"), ["x"]);
});

test("at most so many turns run at a time, in order, and one that is aborted while it waits never begins", async () => {
  const turns = new Turns(1);
  const order = [];
  const ends = [];
  const take = (name, signal) =>
    turns.run(signal, () => (order.push(name), new Promise((resolve) => ends.push(resolve))));
  const never = new AbortController().signal;
  const aborted = new AbortController();
  const first = take("first", never);
  const second = take("second", aborted.signal);
  const third = take("third", never);
  await Promise.resolve();
  assert.deepEqual(order, ["first"]);

  aborted.abort();
  await assert.rejects(second, { name: "AbortError" });
  ends[0]();
  await first;
  await new Promise(setImmediate);
  assert.deepEqual(order, ["first", "third"]);
  ends[1]();
  await third;
});
