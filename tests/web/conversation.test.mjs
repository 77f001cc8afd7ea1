/** Conversations as trees of messages: branches, edits, deletion, and two copies of one. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { layOutBranches, describeEnds } from "../../bough/server/web/chat/branches.js";
import {
  activate,
  activePath,
  addFrom,
  addMessage,
  changeMessage,
  createConversation,
  createMessage,
  deleteBranch,
  editMessage,
  findMessage,
  leavesOf,
  merge,
  rename,
  siblingsOf,
  stopOrphans,
  switchSibling,
  titleOf,
  toChatMessages,
  writeSystemPrompt,
} from "../../bough/server/web/chat/conversation.js";

let clock = 0;

/** Add a message below another one (null: at the beginning); its content is its name in the tests. */
function say(conversation, parent, role, content, more = {}) {
  const message = createMessage({ parent: parent && idOf(conversation, parent), role, content, now: ++clock, ...more });
  return addMessage(conversation, message);
}

function idOf(conversation, content) {
  return conversation.messages.find((message) => message.content === content).id;
}

/** hello → hi → (what? → this, what? → that) */
function chat() {
  let made = createConversation({ now: ++clock });
  made = say(made, null, "user", "hello");
  made = say(made, "hello", "assistant", "hi");
  made = say(made, "hi", "user", "what?");
  made = say(made, "what?", "assistant", "this");
  return say(made, "what?", "assistant", "that");
}

const shown = (conversation) => activePath(conversation).map((message) => message.content);

/** What the module says is always true. */
function check(conversation) {
  const seen = new Set([null]);
  for (const message of conversation.messages) {
    assert.ok(seen.has(message.parent), `${message.content} stands before its parent`);
    seen.add(message.id);
  }
  const leaves = leavesOf(conversation).map((message) => message.id);
  assert.ok(conversation.active === null ? !leaves.length : leaves.includes(conversation.active));
  for (const id of conversation.deleted) assert.ok(!seen.has(id));
}

test("an answer beside another one is shown, and switching goes back and stops at the ends", () => {
  const made = chat();
  assert.deepEqual(shown(made), ["hello", "hi", "what?", "that"]);

  const back = switchSibling(made, idOf(made, "that"), -1, ++clock);

  assert.deepEqual(shown(back), ["hello", "hi", "what?", "this"]);
  assert.equal(switchSibling(back, idOf(back, "this"), -1, ++clock), back);
  check(back);
});

test("a path through a message goes on to the newest leaf below it", () => {
  let made = chat();
  made = say(made, null, "user", "other");
  assert.deepEqual(shown(made), ["other"]);
  assert.deepEqual(shown(activate(made, idOf(made, "hello"), ++clock)), ["hello", "hi", "what?", "that"]);
});

test("editing a user's message makes a branch that wants an answer, and keeps the old one", () => {
  const made = chat();
  const { conversation, toAnswer } = editMessage(made, idOf(made, "what?"), "why?", ++clock);

  assert.deepEqual(shown(conversation), ["hello", "hi", "why?"]);
  assert.equal(toAnswer, idOf(conversation, "why?"));
  assert.equal(siblingsOf(conversation, toAnswer).length, 2);
  assert.equal(conversation.messages.length, made.messages.length + 1);
  check(conversation);
});

test("editing an answer makes a branch that wants none", () => {
  const made = chat();
  const { conversation, toAnswer } = editMessage(made, idOf(made, "that"), "those", ++clock);
  assert.deepEqual(shown(conversation), ["hello", "hi", "what?", "those"]);
  assert.equal(toAnswer, null);
});

test("a system prompt that is written later asks the first question again, in a branch of its own", () => {
  const made = chat();
  const { conversation, toAnswer } = writeSystemPrompt(made, "be short", ++clock);
  assert.deepEqual(shown(conversation), ["be short", "hello"]);
  assert.equal(findMessage(conversation, toAnswer).role, "user");

  const edited = editMessage(conversation, idOf(conversation, "be short"), "be long", ++clock);
  assert.deepEqual(shown(edited.conversation), ["be long", "hello"]);
  const without = writeSystemPrompt(edited.conversation, "", ++clock);
  assert.deepEqual(shown(without.conversation), ["hello"]);
  check(without.conversation);
});

test("before the first question a system prompt is written in place", () => {
  const empty = createConversation({ now: ++clock });
  const first = writeSystemPrompt(empty, "be short", ++clock).conversation;
  const second = writeSystemPrompt(first, "be long", ++clock).conversation;
  assert.deepEqual(
    second.messages.map((message) => message.content),
    ["be long"],
  );
  assert.deepEqual(writeSystemPrompt(second, "", ++clock).conversation.messages, []);
});

test("deleting a branch deletes all below it, and shows what is nearest", () => {
  const made = chat();
  const without = deleteBranch(made, idOf(made, "that"), ++clock);
  assert.deepEqual(shown(without), ["hello", "hi", "what?", "this"]);
  const beginning = deleteBranch(without, idOf(without, "hi"), ++clock);
  assert.deepEqual(shown(beginning), ["hello"]);
  const empty = deleteBranch(beginning, idOf(beginning, "hello"), ++clock);
  assert.equal(empty.active, null);
  for (const each of [without, beginning, empty]) check(each);
});

test("the title is the user's first words, cut between characters, unless one was given", () => {
  const made = say(createConversation({ now: ++clock }), null, "user", ` a\n${"🌳".repeat(100)}`);
  assert.equal(titleOf(made), `a ${"🌳".repeat(57)}…`);
  assert.equal(titleOf(rename(made, " Trees ", ++clock)), "Trees");
  assert.equal(titleOf(createConversation({ now: ++clock })), "New conversation");
});

test("a request has the path to a message, with thoughts, calls and results, and nothing of the page's own", () => {
  const call = { function: { name: "add", arguments: { a: 1 } } };
  let made = say(createConversation({ now: ++clock }), null, "user", "sum");
  made = say(made, "sum", "assistant", "calling", { thinking: "hm", tool_calls: [call], requestId: "r", figures: {} });
  made = say(made, "calling", "tool", "3", { tool_name: "add" });
  assert.deepEqual(toChatMessages(made, made.active), [
    { role: "user", content: "sum" },
    { role: "assistant", content: "calling", thinking: "hm", tool_calls: [call] },
    { role: "tool", content: "3", tool_name: "add" },
  ]);
});

test("two tabs that add to one conversation lose nothing, and what one has deleted stays deleted", () => {
  const made = chat();
  const mine = say(deleteBranch(made, idOf(made, "this"), ++clock), "that", "user", "mine");
  const theirs = changeMessage(say(made, "that", "user", "theirs"), idOf(made, "hi"), { content: "hey" }, ++clock);

  const merged = merge(mine, theirs);

  assert.deepEqual(merged.messages.map((each) => each.content).sort(), [
    "hello",
    "hey",
    "mine",
    "that",
    "theirs",
    "what?",
  ]);
  assert.deepEqual(shown(merged).at(-1), "theirs");
  check(merged);
  check(merge(theirs, mine));
});

test("what another tab has added below a deleted message goes with it", () => {
  const made = chat();
  const mine = deleteBranch(made, idOf(made, "what?"), ++clock);
  const merged = merge(mine, say(made, "this", "user", "more"));
  assert.deepEqual(
    merged.messages.map((each) => each.content),
    ["hello", "hi"],
  );
  check(merged);
});

test("an import adds what is missing, also what was deleted, and changes nothing that is here", () => {
  const made = chat();
  const mine = changeMessage(
    deleteBranch(made, idOf(made, "this"), ++clock),
    idOf(made, "hi"),
    { content: "hey" },
    ++clock,
  );
  const merged = addFrom(mine, made);
  assert.deepEqual(merged.messages.map((each) => each.content).sort(), ["hello", "hey", "that", "this", "what?"]);
  check(merged);
});

test("answers of tabs that are gone are marked as stopped, and their text stays", () => {
  const made = say(chat(), "that", "assistant", "half", { state: "answering", owner: "gone" });
  assert.equal(
    stopOrphans(made, () => true, ++clock),
    made,
  );
  assert.equal(
    findMessage(
      stopOrphans(made, () => false, ++clock),
      made.active,
    ).state,
    "stopped",
  );
});

test("the drawing has a row for each piece between forks, and marks the path that is shown", () => {
  let made = chat();
  made = say(made, "this", "user", "and");
  made = say(made, "hello", "assistant", "hey");
  const rows = layOutBranches(made);
  assert.deepEqual(
    rows.map(({ label, depth, isLast, isActive, end }) => [label, depth, isLast, isActive, Boolean(end)]),
    [
      ["hi", 0, false, false, false],
      ["this", 1, false, false, true],
      ["that", 1, true, false, true],
      ["hey", 0, true, true, true],
    ],
  );
  assert.deepEqual(rows[1].guides, [true]);
  assert.equal(rows[1].end, idOf(made, "and"));
  assert.deepEqual(layOutBranches(say(createConversation({ now: ++clock }), null, "user", "one")), []);
});

test("the tree's pane is told where the answer at each end lies", () => {
  const place = { model: "m", root: "", node: 7, offset: 3 };
  const made = say(chat(), "this", "assistant", "end", { requestId: "r1", place });
  assert.deepEqual(describeEnds(made).ends, [
    { messageId: made.active, isActive: true, requestId: "r1", model: "m", node: 7, root: "", offset: 3 },
  ]);
});

test("a title is the beginning of what was said, without the marks of markdown", () => {
  const titled = (content) => titleOf(say(createConversation({ now: 1 }), null, "user", content));

  assert.equal(titled("# A **bold** [plan](https://example.org) for `main.py`"), "A bold plan for main.py");
  assert.equal(titled("- *one* of\n> many"), "one of many");
  assert.equal(titled("2 * 3 * 4 and snake_case_name"), "2 * 3 * 4 and snake_case_name");
});
