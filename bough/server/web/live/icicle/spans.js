/**
 * The spans of an edge: one for each message in it, so that each can have the colour of its role and its own label.
 *
 * A span is {start, end, role, text, isGap, isContinued}; one that is continued began in an earlier edge. Roles are "system", "user", "assistant", "tool", or "" for text of no chat.
 * Of an edge with many messages the first and the last are spans; those in between are one gap.
 */

export const TINY_TOKENS = 4; // a shorter span is joined with the one beside it
const MARK_TOKENS = 12; // a span without words may have so many: it is the mark of a message
const KEPT_FIRST = 2;

/** What stands before the first edge. */
export const NOTHING = Object.freeze({ role: "", hasWords: false });

const SPECIAL = /<\|\w+\|>\s*/g;
const ROLE_WORD = /^(system|user|assistant|tool)\b\s*/;

/** The spans of an edge, or of several that follow each other: at most so many. `before`: the message before them. */
export function spansOf(nodes, before, most) {
  const spans = joinTiny(readMessages(nodes, before));
  if (spans.length <= most) return spans;
  const [first, last] = [spans.slice(0, KEPT_FIRST), spans.slice(KEPT_FIRST + 1 - most)];
  return [
    ...first,
    { start: first.at(-1).end, end: last[0].start, role: "", text: "", isGap: true, isContinued: false },
    ...last,
  ];
}

/** The message with which edges end: {role, hasWords}, as `before` of the edges after them. */
export function lastMessage(nodes, before) {
  const { role, text, isContinued } = readMessages(nodes, before).at(-1);
  return { role, hasWords: isContinued || text.trim() !== "" };
}

function readMessages(nodes, before) {
  const spans = [];
  for (const { start, end, messages, text: whole } of nodes) {
    const known = messages.length ? messages : [[start, null, whole.replace(SPECIAL, "")]];
    known.forEach(([offset, role, text], at) => {
      const last = spans.at(-1);
      const span = { start: offset, end: known[at + 1]?.[0] ?? end, role, text, isGap: false, isContinued: false };
      if (role !== null) spans.push(span);
      else if (!last) spans.push({ ...span, ...continued(before.role, text, before.hasWords) });
      else Object.assign(last, continued(last.role, last.text + text, last.isContinued), { end: span.end });
    });
  }
  return spans;
}

/** What goes on with a message that began before. Where the edge before ended in its mark, the text begins with the role. */
function continued(before, text, isContinued) {
  const [word, role] = ROLE_WORD.exec(text) ?? [];
  if (before === "" && role) return { role, text: text.slice(word.length), isContinued: false };
  return { role: before, text, isContinued };
}

/** A span of few tokens belongs to the next one, or at the end to the one before: the mark of a message, or its end. */
function joinTiny(spans) {
  const joined = [];
  let start = spans[0].start;
  for (const span of spans) {
    const isTiny = span.end - start < (span.text.trim() ? TINY_TOKENS : MARK_TOKENS);
    if (isTiny && span !== spans.at(-1)) continue;
    if (isTiny && joined.length) joined.at(-1).end = span.end;
    else joined.push({ ...span, start });
    start = span.end;
  }
  return joined;
}
