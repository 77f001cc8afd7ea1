/** Conversations as a JSON file, out and in. What comes in is checked; an error says where and what. */

import { addFrom, FORMAT, ROLES, STATES } from "./conversation.js";

const KIND = "bough-conversations";
const MOST_CHARACTERS = 64 * 1024 * 1024;

/** The file's text. */
export function writeArchive(conversations, now) {
  const exported = new Date(now).toISOString();
  return `${JSON.stringify({ kind: KIND, version: FORMAT, exported, conversations }, null, 1)}\n`;
}

/** The conversations of a file's text. Throws Error, which says what is wrong, if one of them is not as it should be. */
export function readArchive(text) {
  if (text.length > MOST_CHARACTERS)
    fail(`the file has ${text.length} characters, and at most ${MOST_CHARACTERS} are read`);
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    fail(`the file is not JSON: ${error.message}`);
  }
  if (file?.kind !== KIND)
    fail(`the file is not an export of conversations: its kind is ${show(file?.kind)}, not "${KIND}"`);
  if (file.version !== FORMAT) fail(`the file has version ${show(file.version)}, and this page reads ${FORMAT}`);
  if (!Array.isArray(file.conversations)) fail("the file has no list `conversations`");
  return file.conversations.map((each, number) => readConversation(each, `conversations[${number}]`));
}

/** The conversations after an import: new ones are added, known ones get the messages that they lack. */
export function mergeArchive(known, imported) {
  const byId = new Map(known.map((each) => [each.id, each]));
  for (const each of imported) byId.set(each.id, byId.has(each.id) ? addFrom(byId.get(each.id), each) : each);
  return imported.map((each) => byId.get(each.id));
}

/** One conversation, checked. `where` is its place for errors. Also used for what comes from the browser's storage. */
export function readConversation(value, where) {
  if (!isObject(value)) fail(`${where} is ${show(value)}, not an object`);
  if (value.format !== FORMAT) fail(`${where}.format is ${show(value.format)}, and this page reads ${FORMAT}`);
  for (const name of ["id", "title"]) requireText(value[name], `${where}.${name}`);
  for (const name of ["created", "changed"]) requireNumber(value[name], `${where}.${name}`);
  if (value.model !== null) requireText(value.model, `${where}.model`);
  if (!isObject(value.settings)) fail(`${where}.settings is ${show(value.settings)}, not an object`);
  if (!Array.isArray(value.messages)) fail(`${where}.messages is ${show(value.messages)}, not a list`);
  const { format, id, title, model, settings, created, changed } = value;
  const messages = readMessages(value.messages, `${where}.messages`);
  const parents = new Set(messages.map((message) => message.parent));
  const leaves = messages.filter((message) => !parents.has(message.id)).map((message) => message.id);
  const active = leaves.includes(value.active) ? value.active : (leaves.at(-1) ?? null);
  const deleted = Array.isArray(value.deleted) ? value.deleted.filter((each) => typeof each === "string") : [];
  return { format, id, title, model, settings, messages, active, compared: null, deleted, created, changed };
}

function readMessages(list, where) {
  const ids = new Set();
  return list.map((value, number) => {
    const message = readMessage(value, `${where}[${number}]`);
    if (ids.has(message.id)) fail(`${where}[${number}].id is ${show(message.id)}, which an earlier message has`);
    if (message.parent !== null && !ids.has(message.parent)) {
      fail(`${where}[${number}].parent is ${show(message.parent)}, and no earlier message has that id`);
    }
    ids.add(message.id);
    return message;
  });
}

function readMessage(value, where) {
  if (!isObject(value)) fail(`${where} is ${show(value)}, not an object`);
  for (const name of ["id", "content"]) requireText(value[name], `${where}.${name}`);
  for (const name of ["created", "changed"]) requireNumber(value[name], `${where}.${name}`);
  requireOneOf(value.role, ROLES, `${where}.role`);
  requireOneOf(value.state, STATES, `${where}.state`);
  if (value.parent !== null) requireText(value.parent, `${where}.parent`);
  const { id, parent, role, content, state, created, changed } = value;
  return { id, parent, role, content, state, created, changed, ...readOptional(value, where) };
}

function readOptional(value, where) {
  const found = {};
  for (const name of ["thinking", "tool_name", "requestId", "model", "error", "owner"]) {
    if (value[name] === undefined) continue;
    requireText(value[name], `${where}.${name}`);
    found[name] = value[name];
  }
  if (Number.isFinite(value.thinking_tokens)) found.thinking_tokens = value.thinking_tokens;
  for (const name of ["figures", "place"]) {
    if (isObject(value[name])) found[name] = value[name];
  }
  if (value.tool_calls !== undefined) found.tool_calls = readCalls(value.tool_calls, `${where}.tool_calls`);
  return found;
}

function readCalls(calls, where) {
  if (!Array.isArray(calls)) fail(`${where} is ${show(calls)}, not a list`);
  calls.forEach((call, number) => {
    if (!isObject(call) || !isObject(call.function)) fail(`${where}[${number}] has no object \`function\``);
    requireText(call.function.name, `${where}[${number}].function.name`);
  });
  return calls;
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function requireText(value, where) {
  if (typeof value !== "string") fail(`${where} is ${show(value)}, not a text`);
}

function requireNumber(value, where) {
  if (!Number.isFinite(value)) fail(`${where} is ${show(value)}, not a number`);
}

function requireOneOf(value, allowed, where) {
  if (!allowed.includes(value)) fail(`${where} is ${show(value)}, not one of ${allowed.join(", ")}`);
}

function show(value) {
  return value === undefined ? "missing" : JSON.stringify(value).slice(0, 60);
}

function fail(message) {
  throw new Error(message);
}
