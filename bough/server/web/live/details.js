/** The details of one node: its text, what it holds, who uses it; keep it, or evict it. */

import { requestJson } from "../server/http.js";
import { writeBytes } from "../chat/figures.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact-htm.js";
import { formatAgo, formatCount, formatSeconds, nameTier, shorten, toLabel } from "./icicle/labels.js";
import { conversationsThrough, lastRequestThrough } from "./passing.js";
import { TIERS } from "./tiers.js";

const NODES = "/api/cache/nodes";

/** Keep a node's path, or keep it no longer. */
export function keepNode({ model, root }, node, kept) {
  return requestJson(`${NODES}/keep`, { body: { model, root: root.name, node: node.node, kept } });
}

/** Drop a node and all below it that no running request uses. */
export function evictNode({ model, root }, node) {
  return requestJson(`${NODES}/evict`, { body: { model, root: root.name, node: node.node } });
}

/** `asks` is "evict" if the user has asked to evict it by a key: then the question is open from the start. */
export function Details({ live, tree, node, asks, conversations, currentId, onOpen, onClose, onAsk }) {
  const [problem, setProblem] = useState(null);
  const [isBusy, setBusy] = useState(false);
  useEffect(() => setProblem(null), [node.node]);

  const run = async (work) => {
    setBusy(true);
    setProblem(null);
    await work().catch((error) => setProblem(error.message));
    setBusy(false);
  };
  const evict = async () => {
    const { left_nodes } = await evictNode(tree, node);
    if (left_nodes === 0) return onClose();
    onAsk(null);
    setProblem(
      `${left_nodes === 1 ? "1 node stays" : `${formatCount(left_nodes)} nodes stay`}: running requests use it`,
    );
  };
  const isKept = node.kept.length > 0;

  return html`<section class="details" aria-label="Details of a node">
    <header>
      <h3>Tokens ${formatCount(node.start)} to ${formatCount(node.end)}</h3>
      <button type="button" class="details-close" aria-label="Close details" onClick=${onClose}>×</button>
    </header>
    <${NodeText} tree=${tree} node=${node} />
    <${Facts} node=${node} />
    <p class="details-buttons">
      <button type="button" disabled=${isBusy} aria-pressed=${isKept ? "true" : "false"}
        title="Keep this prefix longer than others"
        onClick=${() => run(() => keepNode(tree, node, !isKept))}>${isKept ? "Keep no longer" : "Keep"}</button>
      <button type="button" disabled=${isBusy || asks === "evict"} onClick=${() => onAsk("evict")}>Evict…</button>
    </p>
    ${
      asks === "evict" &&
      html`<${EvictQuestion} tree=${tree} node=${node} isBusy=${isBusy}
      onYes=${() => run(evict)} onNo=${() => onAsk(null)} />`
    }
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <${WhyNotMore} request=${lastRequestThrough(live.requests, node, tree)} />
    <${Through} currentId=${currentId} onOpen=${onOpen}
      found=${conversationsThrough(conversations, node, { ...tree, requests: live.requests })} />
  </section>`;
}

/** The text of the edge. The stream tells only the beginning of a long one; the rest is asked for. */
function NodeText({ tree, node }) {
  const [whole, setWhole] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    setWhole(null);
    setProblem(null);
    if (!node.is_cut) return undefined;
    const abort = new AbortController();
    const query = new URLSearchParams({ model: tree.model, root: tree.root.name, node: node.node });
    requestJson(`${NODES}?${query}`, { signal: abort.signal })
      .then((found) => setWhole(found.text))
      .catch((error) => error.name !== "AbortError" && setProblem(error.message));
    return () => abort.abort();
  }, [tree.model, tree.root.name, node.node, node.start, node.end]);
  const text = whole ?? node.text + (node.is_cut ? "…" : "");
  return html`<pre class="details-text" dir="auto" tabindex="0" aria-label="Text of this node">${text}</pre>
    ${problem && html`<p class="problem" role="alert">The rest of the text is missing: ${problem}</p>`}`;
}

function Facts({ node }) {
  const tiers = TIERS.filter((tier) => node.tiers[tier]).map((tier) => `${formatCount(node.tiers[tier])} ${tier}`);
  const facts = [
    ["tokens", `${formatCount(node.end - node.start)} (${formatCount(node.start)}–${formatCount(node.end)})`],
    ["memory", writeBytes(node.bytes)],
    ["content", tiers.length ? `${tiers.join(", ")}${node.in_use ? "; in a lane" : ""}` : nameTier(node)],
    ["pages", formatCount(node.pages)],
    ["restore points", describeOffsets(node.points)],
    ["kept", node.kept.length ? `up to ${describeOffsets(node.kept)}` : "no"],
    ["in use", node.in_use ? "by a running request" : "no"],
    ["uses", formatCount(node.hits)],
    ["last use", node.hits ? formatAgo(node.last_used, Date.now() / 1000) : "never reused"],
  ];
  return html`<dl class="details-facts">
    ${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

function describeOffsets(offsets) {
  if (!offsets.length) return "none";
  const shown = offsets.slice(-6).map(formatCount).join(", ");
  return offsets.length > 6 ? `${offsets.length}: …, ${shown}` : shown;
}

function EvictQuestion({ tree, node, isBusy, onYes, onNo }) {
  const button = useRef(null);
  useLayoutEffect(() => button.current?.focus(), [node.node]);
  const { nodes, tokens } = tree.root.countBelow(node.node);
  const what = nodes === 1 ? "this node" : `${formatCount(nodes)} nodes, this one and all to its right,`;
  return html`<div class="details-question" role="group" aria-label="Evict?">
    <p>Evict ${what} with ${formatCount(tokens)} tokens, in memory and on disk? What a running request uses stays.</p>
    <button type="button" ref=${button} class="danger" disabled=${isBusy} onClick=${onYes}>Evict</button>
    <button type="button" disabled=${isBusy} onClick=${onNo}>Cancel</button>
  </div>`;
}

/** What the last request that came by has reused, and the server's words on why not more. */
function WhyNotMore({ request }) {
  if (!request) return null;
  const { prompt_tokens, matched_tokens, cached_tokens, first_token_s, reason } = request;
  return html`<div class="details-why">
    <h4>Last request here: why not more?</h4>
    <p>${formatCount(cached_tokens)} of ${formatCount(prompt_tokens)} prompt tokens reused,
      ${" "}${formatCount(matched_tokens)} matched${
        first_token_s !== null && `, first token after ${formatSeconds(first_token_s)}`
      }.</p>
    ${reason && html`<p class="details-reason" dir="auto">${shorten(toLabel(reason), 400)}</p>`}
  </div>`;
}

function Through({ found, currentId, onOpen }) {
  if (!found.length) return null;
  return html`<div class="details-through">
    <h4>${found.length === 1 ? "1 conversation passes" : `${formatCount(found.length)} conversations pass`} through</h4>
    <ul>${found.slice(0, 50).map(
      ({ id, title, messageId }) => html`<li key=${id}>
      <button type="button" class="link" aria-current=${id === currentId ? "true" : undefined}
        onClick=${() => onOpen(id, messageId)}>
        <bdi>${shorten(toLabel(title || "untitled"), 60)}</bdi></button></li>`,
    )}</ul>
  </div>`;
}
