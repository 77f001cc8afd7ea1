/**
 * What the plots show: the figures of a model over time, and its last requests.
 * Bounded, so that a page may stay open for days.
 */

export const MOST_SAMPLES = 600;
export const MOST_REQUESTS = 100;

/** The last figures and the last ended requests of one model, the oldest first. */
export class History {
  constructor() {
    this.samples = []; // {time_s, figures}
    this.requests = []; // ended requests that had a prompt
    this.version = 0;
  }

  addFigures(figures, time_s) {
    this.samples.push({ time_s, figures });
    if (this.samples.length > MOST_SAMPLES) this.samples.shift();
    this.version += 1;
  }

  addRequest(request) {
    if (!request.prompt_tokens) return;
    this.requests = this.requests.filter((each) => each.id !== request.id).slice(1 - MOST_REQUESTS);
    this.requests.push(request);
    this.version += 1;
  }
}

/** The tiers that figures tell of, in order. */
export function tiersOf(samples) {
  const newest = samples.at(-1)?.figures.tiers ?? {};
  return ["device", "host", "disk"].filter((tier) => tier in newest);
}

/** For each of the last requests: its number from the oldest, and the percentage of its prompt that was reused. */
export function reuseSeries(requests) {
  return [requests.map((_, at) => at + 1), requests.map((each) => (100 * each.cached_tokens) / each.prompt_tokens)];
}

/** For each of the last requests: seconds to its first token, and what that would have been without reuse. */
export function firstTokenSeries(requests) {
  return [
    requests.map((_, at) => at + 1),
    requests.map((each) => each.first_token_s ?? null),
    requests.map((each) => each.without_s ?? null),
  ];
}

/** Bytes of each tier over time. */
export function bytesSeries(samples) {
  const times = samples.map((each) => each.time_s);
  return [times, ...tiersOf(samples).map((tier) => samples.map((each) => each.figures.tiers[tier]?.bytes ?? null))];
}

/** Busy lanes and waiting requests over time; null where the server does not tell them. */
export function laneSeries(samples) {
  const pick = (name) => samples.map((each) => each.figures[name] ?? null);
  return [samples.map((each) => each.time_s), pick("busy_lanes"), pick("queue")];
}

/** The share of all prompt tokens of these requests that was reused; null if there are none. */
export function shareReused(requests) {
  const prompt = requests.reduce((sum, each) => sum + each.prompt_tokens, 0);
  return prompt ? requests.reduce((sum, each) => sum + each.cached_tokens, 0) / prompt : null;
}

/** The middle one of some numbers; null if there are none. */
export function median(numbers) {
  const sorted = numbers.filter((each) => each !== null && each !== undefined).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : null;
}
