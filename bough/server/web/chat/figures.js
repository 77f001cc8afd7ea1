/** What an answer has cost and what the tree has saved, in words. */

const whole = new Intl.NumberFormat("en");

/** A count with separators: 12,345. */
export function writeCount(value) {
  return whole.format(value);
}

/** A count and its noun: 1 token, 2 tokens. */
export function writeCounted(value, noun) {
  return `${writeCount(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** A duration: 48 ms, 1.25 s, 310 s. */
export function writeSeconds(seconds) {
  if (seconds < 0.0995) return `${Number((seconds * 1000).toPrecision(2))} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  return `${Number(seconds.toPrecision(3))} s`;
}

/** A size: 640 MB. Powers of 1,000, as downloads have them. */
export function writeBytes(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const power = bytes >= 1 ? Math.min(units.length - 1, Math.floor(Math.log10(bytes) / 3)) : 0;
  const value = bytes / 1000 ** power;
  return `${value >= 100 || power === 0 ? Math.round(value) : value.toFixed(1)} ${units[power]}`;
}

/** The figures of an answer, of the last object of its stream. */
export function figuresOf(last) {
  const tokens = last.eval_count ?? 0;
  const decode_s = (last.eval_duration ?? 0) / 1e9;
  return {
    prompt_tokens: last.prompt_eval_count ?? 0,
    cached_tokens: last.prompt_eval_cached_count ?? 0,
    completion_tokens: tokens,
    prefill_s: (last.prompt_eval_duration ?? 0) / 1e9,
    tokens_per_s: tokens > 1 && decode_s > 0 ? tokens / decode_s : null,
    end: last.done_reason ?? "",
    messages_left_out: last.messages_left_out ?? 0,
  };
}

/** What the event stream adds to the figures when a request has ended. */
export function figuresOfRequest({
  prompt_tokens,
  cached_tokens,
  completion_tokens,
  first_token_s,
  without_s,
  reason,
}) {
  return { prompt_tokens, cached_tokens, completion_tokens, first_token_s, without_s, reason };
}

/** The parts of the sentence below an answer. */
export function describeFigures(figures) {
  const parts = [];
  const { prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0, tokens_per_s, without_s } = figures;
  if (prompt_tokens) {
    parts.push(
      `${writeCounted(cached_tokens, "token")} reused`,
      `${writeCount(prompt_tokens - cached_tokens)} computed`,
    );
  }
  const first_s = figures.first_token_s ?? figures.prefill_s;
  if (first_s)
    parts.push(`first token after ${writeSeconds(first_s)}${describeSaving(first_s, without_s, cached_tokens)}`);
  const rate = tokens_per_s ? ` at ${tokens_per_s < 10 ? tokens_per_s.toFixed(1) : Math.round(tokens_per_s)}/s` : "";
  if (completion_tokens) parts.push(`${writeCounted(completion_tokens, "token")}${rate}`);
  return parts;
}

function describeSaving(first_s, without_s, cached_tokens) {
  if (!cached_tokens || !without_s || without_s < 1.05 * first_s) return "";
  return ` (about ${writeSeconds(without_s)} without the cache)`;
}

/** What the model was not given to read; "" if it was given everything. */
export function describeLeftOut({ messages_left_out = 0 }) {
  if (!messages_left_out) return "";
  const what =
    messages_left_out === 1 ? "The oldest message was" : `The ${writeCount(messages_left_out)} oldest messages were`;
  return `${what} left out: the chat is longer than the context.`;
}

/** Why an answer ended where it did, if that needs a word; else "". */
export function describeEnd(end) {
  if (end === "length") return "It reached the limit of tokens.";
  if (end === "loop") return "It repeated itself and was ended.";
  return "";
}

/** How far a request is: `request` is the newest of its events, if there is one. */
export function describeProgress(request, hasText) {
  const state = request?.state;
  if (hasText || state === "answering") {
    return request?.completion_tokens ? `answering, ${writeCounted(request.completion_tokens, "token")}` : "answering";
  }
  if (state === "waiting") return "waiting for a lane";
  if (state === "loading") return `loading ${writeCounted(request.matched_tokens, "token")} into memory`;
  if (state !== "computing") return "asking the server";
  return `computing ${writeCount(request.done_tokens)} of ${writeCounted(request.prompt_tokens, "token")}`;
}

/** The share of a prompt that is done, from 0 to 1; null if there is nothing to wait for. */
export function shareDone(request) {
  if (request?.state !== "computing" || !request.prompt_tokens) return null;
  return Math.min(1, request.done_tokens / request.prompt_tokens);
}
