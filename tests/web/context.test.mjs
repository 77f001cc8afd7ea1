// What goes with the next message: how much of the context it takes, and files.

import assert from "node:assert/strict";
import { test } from "node:test";

import { MOST_FILE_BYTES, readTextFile, writeMessage } from "../../bough/server/web/chat/attachments.js";
import { describeFull, isFull, measureContext } from "../../bough/server/web/chat/context.js";
import { addMessage, createConversation, createMessage } from "../../bough/server/web/chat/conversation.js";
import { readDefaults } from "../../bough/server/web/chat/models.js";

function talk(settings, ...said) {
  return said.reduce(
    (conversation, [role, content, figures]) =>
      addMessage(
        conversation,
        createMessage({ parent: conversation.active, role, content, now: 1, ...(figures ? { figures } : {}) }),
      ),
    createConversation({ settings, now: 1 }),
  );
}

test("the used context is what the server has counted, and an estimate of what came since and is being written", () => {
  const figures = { prompt_tokens: 150, completion_tokens: 50 };
  const conversation = talk(
    {},
    ["user", "x".repeat(300)],
    ["assistant", "y".repeat(100), figures],
    ["user", "z".repeat(20)],
  );

  const measured = measureContext(conversation, "w".repeat(10), 8192);

  assert.deepEqual(measured, { used: 210, coming: 5, answer: 1024, context: 8192 });
  assert.deepEqual(measureContext(talk({}), "four", 8192), { used: 0, coming: 1, answer: 1024, context: 8192 });
});

test("the next turn does not fit when the conversation and the limit of the answer are more than the context", () => {
  const figures = { prompt_tokens: 700, completion_tokens: 50 };
  const measure = (num_predict) => measureContext(talk({ num_predict }, ["assistant", "y", figures]), "", 1000);

  assert.equal(isFull(measure("250")), false);
  assert.equal(isFull(measure("251")), true);
  assert.equal(measure("").answer, 125);
  assert.match(
    describeFull(measure("300"), true),
    /^About 750 tokens .* answer of 300 are more than the 1,000 .*left out/,
  );
});

test("files are written below what was said, between fences that they do not have", () => {
  const written = writeMessage(" Read this. ", [{ name: "a.md", text: "```\ncode\n```\n" }]);

  assert.equal(written, "Read this.\n\na.md:\n````\n```\ncode\n```\n````");
  assert.equal(writeMessage("", [{ name: "b.txt", text: "x" }]), "b.txt:\n```\nx\n```");
  assert.equal(writeMessage("  ", []), "");
});

test("a file is taken if it is a text of a bounded size, and the error says the sizes", async () => {
  assert.deepEqual(await readTextFile(new File(["Grüße"], "a.txt")), { name: "a.txt", text: "Grüße" });
  await assert.rejects(readTextFile(new File([new Uint8Array([65, 0, 66])], "b.bin")), /b\.bin is not a text file/);
  await assert.rejects(readTextFile(new File([new Uint8Array([0xff, 0xfe])], "c.txt")), /c\.txt is not a text file/);
  const large = new File(["x".repeat(MOST_FILE_BYTES + 1)], "d.txt");
  await assert.rejects(readTextFile(large), /d\.txt has 257 kB, and at most 256 kB are taken/);
});

test("the model's own options are read from its parameters", () => {
  assert.deepEqual(readDefaults("num_ctx                        8192\ntemperature                    0.2"), {
    num_ctx: "8192",
    temperature: "0.2",
  });
});
