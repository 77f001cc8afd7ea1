/**
 * Answers under way: each is one request to `/api/chat`, whose text goes into a message as it comes.
 *
 * Always true: a message of this tab with the state "answering" has an entry here. At most MOST_STREAMS requests run at a time,
 * because a browser opens six connections to a server and the page needs some for other things; further ones wait.
 */

import { readLines } from "../server/http.js";
import {
  addMessage,
  changeMessage,
  compare,
  createMessage,
  findMessage,
  titleOf,
  toChatMessages,
} from "./conversation.js";
import { figuresOf, figuresOfRequest, writeCounted } from "./figures.js";
import { Flush, Turns } from "./pacing.js";
import { readSettings, withSeedOf } from "./settings.js";

const MOST_STREAMS = 4;
const FLUSH_MS = 60;
const MOST_UNTOLD = 300;
const ENDS = ["done", "cancelled", "failed"];

export class Answers {
  constructor({ conversations, live, access, models, notices }) {
    this._conversations = conversations;
    this._live = live;
    this._access = access;
    this._models = models;
    this._notices = notices;
    this._running = new Map(); // message id → Answer
    this._turns = new Turns(MOST_STREAMS);
    this._untold = new Map(); // request id → {conversationId, messageId}: of which the event stream has not told the end
    live.subscribe(() => this._takeFigures());
  }

  isRunning(messageId) {
    return this._running.has(messageId);
  }

  /** Whether an answer waits until other answers of this tab have ended. */
  isWaiting(messageId) {
    return this._running.get(messageId)?.hasBegun === false;
  }

  /** The messages of a conversation that are being answered. */
  runningIn(conversationId) {
    return [...this._running.values()]
      .filter((each) => each.conversationId === conversationId)
      .map((each) => each.messageId);
  }

  /** Answer a message, `count` times side by side. */
  ask(conversationId, parentId, count = 1) {
    const messages = [];
    this._conversations.change(conversationId, (conversation, now) => {
      const fields = {
        parent: parentId,
        role: "assistant",
        content: "",
        state: "answering",
        owner: this._conversations.tab,
      };
      const model = this._models.nameFor(conversation);
      for (let number = 0; number < count; number++)
        messages.push(createMessage({ ...fields, model, now: now + number }));
      const asked = messages.reduce(addMessage, conversation);
      return count > 1 ? compare({ ...asked, active: messages[0].id }, parentId, now) : asked;
    });
    messages.forEach((message, number) => this._start({ conversationId, messageId: message.id, parentId, number }));
  }

  /** Go on with an answer that was stopped, from where it is; from its beginning if it has no text. */
  goOn(conversationId, messageId) {
    const message = findMessage(this._conversations.get(conversationId), messageId);
    const said = message.content ? whatIsSaid(message) : whatIsSaid({});
    this._change(conversationId, messageId, { state: "answering", error: "", owner: this._conversations.tab, ...said });
    this._start({ conversationId, messageId, parentId: said.content ? messageId : message.parent, ...said });
  }

  /** Stop an answer. The server stops computing; the text stays. */
  stop(messageId) {
    this._running.get(messageId)?.abort.abort();
  }

  stopAll(conversationId) {
    for (const id of this.runningIn(conversationId)) this.stop(id);
  }

  _start(asked) {
    const answer = { number: 0, hasBegun: false, ...whatIsSaid(asked), ...asked, abort: new AbortController() };
    this._running.set(answer.messageId, answer);
    this._run(answer);
  }

  async _run(answer) {
    try {
      await this._turns.run(answer.abort.signal, () => this._read(answer));
    } catch (error) {
      this._fail(answer, error);
    } finally {
      this._running.delete(answer.messageId);
      this._takeFigures();
      this._conversations.save();
    }
  }

  async _read(answer) {
    answer.hasBegun = true;
    this._notices.announce("Answering");
    const body = this._writeBody(answer);
    const response = await this._access.request("/api/chat", { body, signal: answer.abort.signal });
    this._noteRequest(answer, response.headers.get("x-request-id"));
    const flush = new Flush(() => this._flush(answer), FLUSH_MS);
    try {
      for await (const line of readLines(response)) {
        take(answer, line.message ?? {});
        if (line.done) return this._finish(answer, line);
        flush.soon();
      }
    } finally {
      flush.cancel();
    }
    throw new Error("the server ended the answer too early");
  }

  _writeBody(answer) {
    const conversation = this._conversations.get(answer.conversationId);
    const { fields } = readSettings(conversation.settings);
    const model = this._models.nameFor(conversation);
    return { model, messages: toChatMessages(conversation, answer.parentId), ...withSeedOf(fields, answer.number) };
  }

  _noteRequest({ conversationId, messageId }, requestId) {
    if (!requestId) return;
    this._change(conversationId, messageId, { requestId, figures: null, place: null });
    this._untold.set(requestId, { conversationId, messageId });
    if (this._untold.size > MOST_UNTOLD) this._untold.delete(this._untold.keys().next().value);
    const title = titleOf(this._conversations.get(conversationId));
    this._live.noteAnswer(requestId, { conversationId, messageId, title });
  }

  _flush(answer) {
    this._change(answer.conversationId, answer.messageId, whatIsSaid(answer));
  }

  _finish(answer, last) {
    const figures = figuresOf(last);
    this._change(answer.conversationId, answer.messageId, { ...whatIsSaid(answer), state: "done", figures });
    this._notices.announce(`Done, ${writeCounted(figures.completion_tokens, "token")}`);
  }

  _fail(answer, error) {
    const isStopped = error.name === "AbortError";
    const fields = isStopped ? { state: "stopped" } : { state: "failed", error: error.message };
    this._change(answer.conversationId, answer.messageId, { ...whatIsSaid(answer), ...fields });
    this._notices.announce(isStopped ? "Stopped" : `The answer broke off: ${error.message}`);
  }

  _change(conversationId, messageId, fields) {
    this._conversations.change(conversationId, (conversation, now) =>
      changeMessage(conversation, messageId, fields, now),
    );
  }

  /** Keep what the event stream tells of requests that have ended: it is gone after a reload. */
  _takeFigures() {
    for (const [requestId, { conversationId, messageId }] of this._untold) {
      const request = this._live.requests.get(requestId);
      if (this.isRunning(messageId) || !ENDS.includes(request?.state)) continue;
      this._untold.delete(requestId);
      const conversation = this._conversations.get(conversationId);
      const message = conversation && findMessage(conversation, messageId);
      if (message?.requestId !== requestId) continue;
      const place = { model: request.model, root: request.root, node: request.node, offset: request.offset };
      this._change(conversationId, messageId, { figures: { ...message.figures, ...figuresOfRequest(request) }, place });
    }
  }
}

/** Add what one line of a stream says to an answer. */
function take(answer, { content, thinking, tool_calls }) {
  if (content) answer.content += content;
  if (thinking) {
    answer.thinking += thinking;
    answer.thinking_tokens++; // a line has one token
  }
  if (tool_calls) answer.tool_calls = [...answer.tool_calls, ...tool_calls];
}

/** The fields of an answer that its stream fills. */
function whatIsSaid({ content = "", thinking = "", thinking_tokens = 0, tool_calls = [] }) {
  return { content, thinking, thinking_tokens, tool_calls };
}
