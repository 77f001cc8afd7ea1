/**
 * A conversation: a tree of messages, of which one path is shown.
 *
 * Conversations are plain data: they are stored and exported as they are. Nothing here changes one in place; each function
 * returns a new one. Always true:
 * - the parent of a message is null or a message that stands before it in the list;
 * - `active` is a message without children, or null if there are no messages;
 * - the ids in `deleted` are of no message, so that another tab's older copy cannot bring a deleted one back.
 */

export const FORMAT = 1;
export const ROLES = ["system", "user", "assistant", "tool"];
export const STATES = ["done", "answering", "stopped", "failed"];

const TITLE_CHARACTERS = 60;

/** A new id. `crypto.randomUUID` is missing on pages that come by plain HTTP from another machine. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(10)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A conversation without messages. A model of null means the server's default. */
export function createConversation({ id = newId(), model = null, settings = {}, now }) {
  const empty = { messages: [], active: null, compared: null, deleted: [] };
  return { format: FORMAT, id, title: "", model, settings, ...empty, created: now, changed: now };
}

/** A message that can be added to a conversation. `more` are further fields. */
export function createMessage({ parent, role, content, now, ...more }) {
  return { id: newId(), parent, role, content, state: "done", created: now, changed: now, ...more };
}

const indexes = new WeakMap();

/** Messages by id and children by parent, made once for each list of messages. */
function indexOf(conversation) {
  const known = indexes.get(conversation.messages);
  if (known) return known;
  const index = { byId: new Map(), children: new Map() };
  for (const message of conversation.messages) {
    index.byId.set(message.id, message);
    if (!index.children.has(message.parent)) index.children.set(message.parent, []);
    index.children.get(message.parent).push(message);
  }
  for (const children of index.children.values()) children.sort((a, b) => a.created - b.created);
  indexes.set(conversation.messages, index);
  return index;
}

/** The message with an id, or undefined. */
export function findMessage(conversation, id) {
  return indexOf(conversation).byId.get(id);
}

/** The messages after one, the oldest first. The children of null begin the conversation. */
export function childrenOf(conversation, id) {
  return indexOf(conversation).children.get(id) ?? [];
}

/** A message and those beside it, the oldest first. */
export function siblingsOf(conversation, id) {
  return childrenOf(conversation, findMessage(conversation, id).parent);
}

/** The messages from the beginning to one of them. */
export function pathTo(conversation, id) {
  const path = [];
  for (let at = findMessage(conversation, id); at; at = findMessage(conversation, at.parent)) path.push(at);
  return path.reverse();
}

/** The path that is shown. */
export function activePath(conversation) {
  return pathTo(conversation, conversation.active);
}

/** The messages without children, the oldest first. */
export function leavesOf(conversation) {
  return conversation.messages.filter((message) => !childrenOf(conversation, message.id).length);
}

/** The newest leaf at or below a message; with null, the newest of all, or null if there is none. */
export function newestLeaf(conversation, id) {
  let newest =
    findMessage(conversation, id) && !childrenOf(conversation, id).length ? findMessage(conversation, id) : null;
  const waiting = [...childrenOf(conversation, id)];
  while (waiting.length) {
    const message = waiting.pop();
    const children = childrenOf(conversation, message.id);
    waiting.push(...children);
    if (!children.length && (!newest || message.created >= newest.created)) newest = message;
  }
  return newest;
}

/** Add a message, and show the path to it. */
export function addMessage(conversation, message) {
  const messages = [...conversation.messages, message];
  return { ...conversation, messages, active: message.id, compared: null, changed: message.changed };
}

/** Change fields of one message. Nothing happens if it was deleted. */
export function changeMessage(conversation, id, fields, now) {
  const change = (message) => (message.id === id ? { ...message, ...fields, changed: now } : message);
  return { ...conversation, messages: conversation.messages.map(change), changed: now };
}

/** Show the path through a message, to the newest leaf below it. */
export function activate(conversation, id, now) {
  const leaf = newestLeaf(conversation, id);
  return leaf ? { ...conversation, active: leaf.id, compared: null, changed: now } : conversation;
}

/** Show the sibling that is `step` places after a message; at the end nothing happens. */
export function switchSibling(conversation, id, step, now) {
  const siblings = siblingsOf(conversation, id);
  const target = siblings[siblings.findIndex((each) => each.id === id) + step];
  return target ? activate(conversation, target.id, now) : conversation;
}

/** Show all answers to a message side by side; null shows only the active one. */
export function compare(conversation, parentId, now) {
  return { ...conversation, compared: parentId, changed: now };
}

/** Delete a message and all below it. The path that is shown then ends as near as possible. */
export function deleteBranch(conversation, id, now) {
  const parent = findMessage(conversation, id).parent;
  const gone = new Set([id]);
  for (const message of conversation.messages) if (gone.has(message.parent)) gone.add(message.id);
  const messages = conversation.messages.filter((message) => !gone.has(message.id));
  const kept = { ...conversation, messages, deleted: [...conversation.deleted, ...gone], changed: now };
  if (!gone.has(conversation.active)) return kept;
  return { ...kept, active: newestLeaf(kept, parent)?.id ?? null, compared: null };
}

/**
 * Write a message anew beside the old one. Returns the conversation and, if an answer should follow, the id of the message
 * to be answered (`toAnswer`, else null). What the user has said after a system prompt is said again after the new one.
 */
export function editMessage(conversation, id, content, now) {
  const old = findMessage(conversation, id);
  const { role, parent, tool_name } = old;
  const message = createMessage({ parent, role, content, now, ...(tool_name ? { tool_name } : {}) });
  const edited = addMessage(conversation, message);
  if (role === "assistant") return { conversation: edited, toAnswer: null };
  if (role !== "system") return { conversation: edited, toAnswer: message.id };
  return repeatQuestion(edited, message.id, activePath(conversation)[1], now);
}

/** Write the system prompt of the path that is shown: in place while nothing follows it, else as a new branch. */
export function writeSystemPrompt(conversation, content, now) {
  const [first] = activePath(conversation);
  const system = first?.role === "system" ? first : null;
  if (system && system.content === content) return { conversation, toAnswer: null };
  if (system && content && childrenOf(conversation, system.id).length)
    return editMessage(conversation, system.id, content, now);
  if (system && content)
    return { conversation: changeMessage(conversation, system.id, { content }, now), toAnswer: null };
  const question = system ? activePath(conversation)[1] : first;
  if (system && !question) return { conversation: deleteBranch(conversation, system.id, now), toAnswer: null };
  if (!content) return system ? repeatQuestion(conversation, null, question, now) : { conversation, toAnswer: null };
  const message = createMessage({ parent: null, role: "system", content, now });
  return repeatQuestion(addMessage(conversation, message), message.id, question, now);
}

function repeatQuestion(conversation, parent, question, now) {
  if (question?.role !== "user") return { conversation, toAnswer: null };
  const again = createMessage({ parent, role: "user", content: question.content, now: now + 1 });
  return { conversation: addMessage(conversation, again), toAnswer: again.id };
}

/** The title that the user gave, else the beginning of the first paragraph that the user said. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const said = conversation.messages.find((message) => message.role === "user")?.content ?? "";
  const [paragraph] = dropMarkdown(said)
    .trim()
    .split(/\n\s*\n/);
  const line = paragraph.replace(/\s+/g, " ");
  if (!line) return "New conversation";
  const characters = Array.from(line);
  return characters.length > TITLE_CHARACTERS ? `${characters.slice(0, TITLE_CHARACTERS - 1).join("")}…` : line;
}

/** A text without the marks of headings, lists, quotes, emphasis, code and links. */
function dropMarkdown(text) {
  return text
    .replace(/^\s*(?:#{1,6}\s+|>\s*|[-*+]\s+|`{3,}\S*\s*$)/gm, "")
    .replace(/!?\[([^\]]*)\]\([^)]*\)/g, "$1")
    .replace(/(\*\*|__|`)(.+?)\1/g, "$2")
    .replace(/(^|\s)[*_](\S.*?\S|\S)[*_](?=\s|[.,;:!?]|$)/g, "$1$2");
}

/** Give a title; an empty one stands for the beginning of the conversation. */
export function rename(conversation, title, now) {
  return { ...conversation, title: title.trim().slice(0, 200), changed: now };
}

/** The messages up to one, as `/api/chat` takes them. */
export function toChatMessages(conversation, id) {
  return pathTo(conversation, id).map(({ role, content, thinking, tool_calls, tool_name }) => ({
    role,
    content,
    ...(thinking ? { thinking } : {}),
    ...(tool_calls?.length ? { tool_calls } : {}),
    ...(tool_name ? { tool_name } : {}),
  }));
}

/** Mark answers as stopped whose tab is not there any more. Returns the same conversation if there are none. */
export function stopOrphans(conversation, isAlive, now) {
  const isOrphan = (message) => message.state === "answering" && !isAlive(message.owner);
  if (!conversation.messages.some(isOrphan)) return conversation;
  const stop = (message) => (isOrphan(message) ? { ...message, state: "stopped", changed: now } : message);
  return { ...conversation, messages: conversation.messages.map(stop), changed: now };
}

/** Two copies of one conversation, of two tabs: all messages of both; of one message the version that changed last. */
export function merge(mine, theirs) {
  const deleted = [...new Set([...mine.deleted, ...theirs.deleted])];
  const newest = new Map(mine.messages.map((message) => [message.id, message]));
  for (const message of theirs.messages) {
    const known = newest.get(message.id);
    if (!known || message.changed > known.changed) newest.set(message.id, message);
  }
  const newer = theirs.changed > mine.changed ? theirs : mine;
  return settle({ ...newer, messages: keepConnected([...newest.values()], new Set(deleted)), deleted });
}

/** Add the messages of an imported copy that are not here. What is here stays as it is. */
export function addFrom(mine, imported) {
  const known = new Set(mine.messages.map((message) => message.id));
  const added = imported.messages.filter((message) => !known.has(message.id));
  const back = new Set(added.map((message) => message.id));
  const messages = [...mine.messages, ...added];
  return settle({ ...mine, messages, deleted: mine.deleted.filter((id) => !back.has(id)) });
}

function keepConnected(messages, deleted) {
  const kept = new Set([null]);
  return messages.filter((message) => {
    if (deleted.has(message.id) || !kept.has(message.parent)) return false;
    kept.add(message.id);
    return true;
  });
}

/** Let `active` be a leaf again. */
function settle(conversation) {
  const isThere = findMessage(conversation, conversation.active);
  const leaf = newestLeaf(conversation, isThere ? conversation.active : null);
  return { ...conversation, active: leaf?.id ?? null };
}
