/** Conversations as files: what goes out comes in again, and what is wrong is named. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { mergeArchive, readArchive, writeArchive } from "../../bough/server/web/chat/archive.js";
import { addMessage, createConversation, createMessage } from "../../bough/server/web/chat/conversation.js";

function chat() {
  const call = { id: "c1", function: { name: "add", arguments: { a: 1 } } };
  const question = createMessage({ parent: null, role: "user", content: "hello", now: 1 });
  const answer = createMessage({
    parent: question.id,
    role: "assistant",
    content: "hi",
    now: 2,
    state: "stopped",
    thinking: "hm",
    thinking_tokens: 1,
    tool_calls: [call],
    requestId: "r1",
    model: "m",
    figures: { cached_tokens: 3 },
    place: { node: 1 },
  });
  return addMessage(addMessage(createConversation({ model: "m", settings: { seed: "1" }, now: 0 }), question), answer);
}

/** The text of an export, after a change to what it has. */
function written(change) {
  const file = JSON.parse(writeArchive([chat()], 0));
  change(file);
  return JSON.stringify(file);
}

test("an export is read again as it was", () => {
  const made = chat();
  assert.deepEqual(readArchive(writeArchive([made], 0)), [made]);
});

test("fields that nobody knows do not come in", () => {
  const text = written(({ conversations: [each] }) => ((each.onload = "x"), (each.messages[0].html = "<b>")));
  const [read] = readArchive(text);
  assert.equal(read.onload, undefined);
  assert.equal(read.messages[0].html, undefined);
});

const WRONG = [
  ["nonsense", () => "{", /not JSON/],
  ["another file", () => '{"kind": "other"}', /kind is "other"/],
  ["a newer version", () => written((file) => (file.version = 2)), /version 2, and this page reads 1/],
  [
    "a role",
    () => written((file) => (file.conversations[0].messages[1].role = "root")),
    /conversations\[0\]\.messages\[1\]\.role is "root"/,
  ],
  [
    "a parent",
    () => written((file) => (file.conversations[0].messages[1].parent = "x")),
    /messages\[1\]\.parent is "x", and no earlier/,
  ],
  [
    "a circle",
    () => written((file) => (file.conversations[0].messages[0].parent = file.conversations[0].messages[1].id)),
    /messages\[0\]\.parent/,
  ],
  [
    "a message twice",
    () => written(({ conversations: [each] }) => each.messages.push(each.messages[1])),
    /messages\[2\]\.id is/,
  ],
  [
    "a text",
    () => written((file) => (file.conversations[0].messages[0].content = 5)),
    /messages\[0\]\.content is 5, not a text/,
  ],
  [
    "calls",
    () => written((file) => (file.conversations[0].messages[1].tool_calls = [{}])),
    /tool_calls\[0\] has no object/,
  ],
  ["a time", () => written((file) => delete file.conversations[0].changed), /conversations\[0\]\.changed is missing/],
];

for (const [what, make, message] of WRONG) {
  test(`a file with a wrong part is refused by name: ${what}`, () => {
    assert.throws(() => readArchive(make()), message);
  });
}

test("an end that is none is replaced by one", () => {
  const text = written(({ conversations: [each] }) => (each.active = each.messages[0].id));
  const [read] = readArchive(text);
  assert.equal(read.active, read.messages[1].id);
});

test("an import adds new conversations, and to known ones only what they lack", () => {
  const known = chat();
  const more = addMessage(known, createMessage({ parent: known.active, role: "user", content: "more", now: 3 }));
  const changed = {
    ...more,
    title: "theirs",
    messages: more.messages.map((each) => ({ ...each, content: `${each.content}!` })),
  };
  const other = chat();

  const [merged, added] = mergeArchive([known], [changed, other]);

  assert.deepEqual(
    merged.messages.map((each) => each.content),
    ["hello", "hi", "more!"],
  );
  assert.equal(merged.title, "");
  assert.equal(added, other);
});
