/** Which conversations and requests pass through a node. */

import { isRunning } from "./events.js";

/**
 * The conversations that pass through a node: [{id, title, messageId}], each once, by its last end that does.
 *
 * An end may have been noted long ago: its node counts only if the end's offset still lies in it. What the event stream
 * tells of the request is newer than what the conversation has noted.
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
  return isThere(end, model, root) && root.passesThrough(end.node, node.node);
}

function isThere(end, model, root) {
  const last = end.model === model && end.root === root.name ? root.get(end.node) : undefined;
  return last !== undefined && end.offset > last.start && end.offset <= last.end;
}

/** The keys of all nodes on the way to these ends of a conversation. */
export function keysThrough(ends, { model, root, requests }) {
  const keys = new Set();
  for (const each of ends) {
    const end = newest(each, requests);
    if (!isThere(end, model, root)) continue;
    for (const node of root.pathTo(end.node)) keys.add(node.node);
  }
  return keys;
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
