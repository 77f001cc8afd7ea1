/** The branches of a conversation as rows of a drawing: a row for each piece between two forks. */

import { activePath, childrenOf, leavesOf, titleOf } from "./conversation.js";

const LABEL_CHARACTERS = 300; // a row shows what it has room for
const COMMON_WORDS = 3;

/**
 * The rows, from top to bottom; none if there is only one branch. Each has the `id` of its first message, `end` (its leaf, or
 * null if it forks), a `label`, its `depth` from 0, whether it `isLast` of its siblings, `guides` (for each depth above,
 * whether a line passes by), and whether it `isActive`: on the path that is shown.
 */
export function layOutBranches(conversation) {
  if (leavesOf(conversation).length < 2) return [];
  const active = new Set(activePath(conversation).map((message) => message.id));
  const rows = [];
  const waiting = piecesAfter(conversation, forkBelow(conversation, null), 0, []);
  while (waiting.length) {
    const row = waiting.shift();
    rows.push({ ...row, isActive: active.has(row.id) });
    if (!row.end) waiting.unshift(...piecesAfter(conversation, row.fork, row.depth + 1, [...row.guides, !row.isLast]));
  }
  return rows.map(({ fork: _, ...row }) => row);
}

function piecesAfter(conversation, id, depth, guides) {
  const children = childrenOf(conversation, id);
  const labels = dropCommonWords(children.map(labelOf));
  return children.map((message, number) => {
    const fork = forkBelow(conversation, message.id);
    const end = childrenOf(conversation, fork).length ? null : fork;
    return { id: message.id, label: labels[number], fork, end, depth, guides, isLast: number === children.length - 1 };
  });
}

/** Labels that begin alike are shown from the word where they differ. */
function dropCommonWords(labels) {
  const words = labels.map((label) => label.split(" "));
  let same = 0;
  while (words.every((each) => same < each.length - 1 && each[same] === words[0][same])) same++;
  return labels.length < 2 || same < COMMON_WORDS ? labels : words.map((each) => `… ${each.slice(same).join(" ")}`);
}

/** The first message at or below one that has not exactly one child. */
function forkBelow(conversation, id) {
  let at = id;
  for (let next = childrenOf(conversation, at); next.length === 1; next = childrenOf(conversation, at)) at = next[0].id;
  return at;
}

function labelOf(message) {
  const calls = (message.tool_calls ?? []).map((call) => call.function.name).join(", ");
  const text =
    message.content
      .trim()
      .slice(0, 4 * LABEL_CHARACTERS)
      .replace(/\s+/g, " ") || calls;
  if (text) return Array.from(text).slice(0, LABEL_CHARACTERS).join("");
  return message.state === "answering" ? "…" : "(empty)";
}

const told = new WeakMap();

/** A conversation for the pane with the tree: its title, and where the answer at the end of each branch lies. */
export function describeEnds(conversation) {
  const known = told.get(conversation);
  if (known) return known;
  const ends = leavesOf(conversation)
    .filter((message) => message.requestId)
    .map(({ id, requestId, place, model }) => ({
      messageId: id,
      isActive: id === conversation.active,
      requestId,
      model: place?.model ?? model,
      node: place?.node ?? null,
      root: place?.root ?? "",
      offset: place?.offset ?? 0,
    }));
  const described = { id: conversation.id, title: titleOf(conversation), ends };
  told.set(conversation, described);
  return described;
}
