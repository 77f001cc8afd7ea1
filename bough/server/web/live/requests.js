/** The requests under way: a line with progress for each. */

import { html } from "../vendor/preact-htm.js";
import { isRunning } from "./events.js";
import { formatCount, formatSeconds, shorten, toLabel } from "./icicle/labels.js";

const MOST_LINES = 6;

/** The requests of a model that are under way, the oldest first. */
export function runningOf(requests, model) {
  return [...requests.values()]
    .filter((each) => each.model === model && isRunning(each))
    .sort((a, b) => b.total_s - a.total_s);
}

/** How far the prompt is, and in which words: {share, text}. */
export function describeProgress(request) {
  const { state, prompt_tokens, cached_tokens, done_tokens, completion_tokens } = request;
  const computed = Math.max(0, done_tokens - cached_tokens);
  const share = prompt_tokens ? Math.min(1, done_tokens / prompt_tokens) : 0;
  const wanted = Math.max(0, prompt_tokens - cached_tokens);
  const text = `${formatCount(cached_tokens)} cached, ${formatCount(computed)} of ${formatCount(wanted)} computed`;
  if (state === "waiting")
    return { share: 0, text: `${formatCount(prompt_tokens)} prompt tokens, waiting for its turn` };
  return { share, text: state === "answering" ? `${text}, ${formatCount(completion_tokens)} answered` : text };
}

export function RunningRequests({ live, model }) {
  const running = runningOf(live.requests, model);
  if (!running.length) return null;
  return html`<ul class="running" aria-label="Requests under way">
    ${running
      .slice(0, MOST_LINES)
      .map((each) => html`<${Line} key=${each.id} request=${each} title=${live.answers.get(each.id)?.title} />`)}
    ${running.length > MOST_LINES && html`<li class="muted">and ${running.length - MOST_LINES} more</li>`}
  </ul>`;
}

function Line({ request, title }) {
  const { share, text } = describeProgress(request);
  const cachedShare = request.prompt_tokens ? request.cached_tokens / request.prompt_tokens : 0;
  return html`<li>
    <span class="running-state">${request.state}</span>
    <span class="running-bar" role="progressbar" aria-label="Prompt" aria-valuemin="0" aria-valuemax="100"
      aria-valuenow=${Math.round(100 * share)} aria-valuetext=${text}>
      <span class="running-done" style=${{ width: `${100 * share}%` }}></span>
      <span class="running-cached" style=${{ width: `${100 * cachedShare}%` }}></span>
    </span>
    <span class="running-text">${title && html`<bdi>${shorten(toLabel(title), 30)}</bdi>: `}${text}${
      request.first_token_s !== null && `, first after ${formatSeconds(request.first_token_s)}`
    }</span>
  </li>`;
}
