/** Which conversations and requests pass through a node. */

import { isRunning } from "./events.js";

/**
 * The conversations that pass through a node: [{id, title, messageId}], each once, by its last end that does.
 *
 * An end may have been noted long ago: its node counts only if the end's offset still lies in it. What the event stream tells
 * of the request is newer than what the conversation has noted.
 */
export function conversationsThrough(conversations, node, { model, root, requests }) {
  const found = [];
  for (const { id, title, ends } of conversations) {
    const end = ends.findLast((each) => endsBelow(newest(each, requests), node, model, root));
    if (end) found.push({ id, title, messageId: end.messageId });
  }
  return found;
}

function newest(end, requests) {
  const request = requests.get(end.requestId);
  return request && request.node !== null ? { ...end, ...request } : end;
}

function endsBelow(end, node, model, root) {
  const last = root.get(end.node);
  const isThere =
    last && end.model === model && (end.root ?? "") === root.name && end.offset > last.start && end.offset <= last.end;
  return Boolean(isThere && end.offset > node.start && root.passesThrough(end.node, node.node));
}

/** The newest request that ended in a node or passed it; null if none is known. */
export function lastRequestThrough(requests, node, { model, root }) {
  return (
    [...requests.values()].findLast(
      (each) =>
        !isRunning(each) && each.model === model && each.root === root.name && root.passesThrough(each.node, node.node),
    ) ?? null
  );
}
