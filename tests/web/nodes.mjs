// Nodes and requests as the event stream tells them.

/** A node of a tree. */
export function node(key, parent, start, end, more = {}) {
  const rest = { text: `text ${key}`, bytes: 100, pages: 1, tiers: { device: 1 }, points: [], kept: [], in_use: false };
  return { node: key, parent, start, end, messages: [], ...rest, hits: 0, last_used: 0, ...more };
}

/** A request of the model "m" on the root "". */
export function request(id, state, more = {}) {
  const tokens = { prompt_tokens: 100, matched_tokens: 0, cached_tokens: 0, done_tokens: 0, completion_tokens: 0 };
  const times = { queue_s: 0, first_token_s: null, total_s: 1, without_s: null };
  return { id, model: "m", root: "", state, ...tokens, node: null, offset: 0, ...times, reason: "", ...more };
}
