/** The pane that shows the tree at work: what runs, the icicle, details of a node, plots. */

import { html, useEffect, useMemo, useReducer, useRef, useState } from "../vendor/preact-htm.js";
import { Details, keepNode } from "./details.js";
import { Icicle } from "./icicle/icicle.js";
import { formatCount } from "./icicle/labels.js";
import { keysThrough } from "./passing.js";
import { Plots } from "./plots.js";
import { RunningRequests } from "./requests.js";
import { mainTier } from "./tiers.js";

/** `conversations`: [{id, title, ends: [{messageId, isActive, requestId, node, root, model, offset}]}]. */
export function LivePane({ live, model, conversations = [], currentId = null, onOpen }) {
  const [, changed] = useReducer((count) => count + 1, 0);
  useEffect(() => live.subscribe(changed), [live]);
  const [wantedModel, setWantedModel] = useState(null);
  const [wantedRoot, setWantedRoot] = useState(null);
  useEffect(() => setWantedModel(null), [model]);

  const names = live.models.map((each) => each.model);
  const name = chooseModel(names, wantedModel, model, live.models);
  const mirror = live.trees.get(name);
  const roots = mirror ? [...mirror.roots.values()].sort((a, b) => b.nodes.size - a.nodes.size) : [];
  const root = roots.find((each) => each.name === wantedRoot) ?? roots[0] ?? null;

  return html`<section class=${`live ${live.isConnected ? "" : "is-stale"}`} aria-label="The tree at work">
    <header class="live-head">
      <h2>Tree</h2>
      ${
        names.length > 1 &&
        html`<${Choice} label="Model" value=${name} onChange=${setWantedModel}
          options=${names.map((each) => [each, each])} />`
      }
      ${
        roots.length > 1 &&
        html`<${Choice} label="Root" value=${root.name} onChange=${setWantedRoot}
        options=${roots.map((each) => [each.name, `${each.name || "(no salt)"} · ${formatCount(each.nodes.size)}`])} />`
      }
      <${Totals} figures=${live.figures.get(name)} />
    </header>
    <${Connection} live=${live} />
    ${
      root
        ? html`<${TreeView} key=${`${name} ${root.name}`} live=${live} conversations=${conversations}
          tree=${{ model: name, root, resets: mirror.resets }} currentId=${currentId} onOpen=${onOpen} />`
        : html`<${Empty} live=${live} name=${name} mirror=${mirror} />
            <${RunningRequests} live=${live} model=${name} />`
    }
    ${name && html`<${PlotsBox} live=${live} name=${name} />`}
  </section>`;
}

/** The model whose tree is shown: the chosen one, the chat's, the default one, else any. */
function chooseModel(names, wanted, model, models) {
  const plain = (model ?? "").replace(/:latest$/, "");
  const standard = models.find((each) => each.is_default)?.model;
  return [wanted, plain, standard].find((each) => names.includes(each)) ?? names[0] ?? null;
}

function Choice({ label, value, options, onChange }) {
  return html`<label class="live-choice">${label}
    <select value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${options.map(([each, text]) => html`<option key=${each} value=${each}>${text}</option>`)}
    </select></label>`;
}

function Totals({ figures }) {
  if (!figures) return null;
  const share = figures.prompt_tokens ? Math.round((100 * figures.cached_tokens) / figures.prompt_tokens) : null;
  return html`<span class="live-totals">${formatCount(figures.tokens)} tokens in ${figures.nodes === 1 ? "1 node" : `${formatCount(figures.nodes)} nodes`}${
    share !== null && ` · ${share} % of prompts reused`
  }</span>`;
}

function Connection({ live }) {
  if (live.isConnected) return null;
  const text = live.needsKey
    ? "The server asks for a key."
    : live.problem
      ? `Reconnecting: ${live.problem}.`
      : "Connecting…";
  return html`<p class="live-connection" role="status">${text}</p>`;
}

function Empty({ live, name, mirror }) {
  const text =
    !live.isConnected && !mirror
      ? "The tree appears when the server is there."
      : name === null
        ? "No model is loaded. Its tree appears with the first message."
        : !mirror
          ? "Reading the tree…"
          : "Nothing is in the tree yet: send a message.";
  return html`<p class="live-empty">${text}</p>`;
}

const READING =
  "Read it from the top. Text that chats share is computed once and drawn once; where they differ, they stand side by side.";

/** The icicle with its legend, and the details of the chosen node. */
function TreeView({ live, tree, conversations, currentId, onOpen }) {
  const [chosenKey, setChosenKey] = useState(null);
  const [asks, setAsks] = useState(null);
  const [problem, setProblem] = useState(null);
  const box = useRef(null);
  const ends = conversations.find((each) => each.id === currentId)?.ends ?? [];
  const where = { ...tree, requests: live.requests };
  const node = tree.root.get(chosenKey);
  const tiers = useMemo(() => new Set([...tree.root.nodes.values()].map(mainTier)), [tree.root, tree.root.version]);
  useEffect(() => choose(null), [tree.resets]); // keys may mean other nodes now
  const choose = (each, question = null) => {
    setChosenKey(each?.node ?? null);
    setAsks(question);
    setProblem(null);
  };
  const leave = () => {
    choose(null);
    box.current?.querySelector("[role=tree]")?.focus();
  };
  const keep = (each) =>
    keepNode(tree, each, each.kept.length === 0).then(
      () => setProblem(null),
      (error) => setProblem(error.message),
    );
  return html`<div class="live-tree" ref=${box}>
    <p class="hint">${READING}</p>
    <${Icicle} live=${live} tree=${tree} chosenKey=${chosenKey}
      current=${keysThrough(ends, where)} active=${keysThrough(ends.filter((each) => each.isActive), where)}
      onChoose=${choose} onKeep=${keep} onEvict=${(each) => choose(each, "evict")} />
    <${Legend} tiers=${tiers} />
    <${RunningRequests} live=${live} model=${tree.model} />
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${
      node &&
      html`<${Details} live=${live} tree=${tree} node=${node} asks=${asks} conversations=${conversations}
      currentId=${currentId} onOpen=${onOpen} onClose=${leave} onAsk=${setAsks} />`
    }
  </div>`;
}

const ROLES = { system: "system", user: "user", assistant: "answer", tool: "tool" };
const TEXTURES = { host: "in host memory", disk: "on disk" };

/** `tiers`: those of the nodes. A texture is listed if it is drawn. */
function Legend({ tiers }) {
  return html`<ul class="legend" aria-label="Legend">
    ${Object.entries(ROLES).map(
      ([role, name]) =>
        html`<li key=${role}><span class=${`legend-role is-${role}`} aria-hidden="true"></span>${name}</li>`,
    )}
    <li><span class="legend-lane" aria-hidden="true"></span>in use</li>
    <li><span class="legend-ghost" aria-hidden="true"></span>computing</li>
    <li><span class="legend-current" aria-hidden="true"></span>the messages that you see</li>
    <li><span class="legend-break" aria-hidden="true"></span>longer than drawn</li>
    <li><span class="legend-pin" aria-hidden="true"></span>kept</li>
    ${Object.entries(TEXTURES)
      .filter(([tier]) => tiers.has(tier))
      .map(
        ([tier, name]) =>
          html`<li key=${tier}><span class=${`legend-tier is-${tier}`} aria-hidden="true"></span>${name}</li>`,
      )}
  </ul>`;
}

/** The plots, folded when the window is narrow until they are opened. */
function PlotsBox({ live, name }) {
  const [isOpen, setOpen] = useState(() => matchMedia("(min-width: 900px)").matches);
  const theme = useTheme();
  return html`<details class="live-plots" open=${isOpen} onToggle=${(event) => setOpen(event.target.open)}>
    <summary>Plots</summary>
    ${isOpen && html`<${Plots} history=${live.historyOf(name)} figures=${live.figures.get(name)} theme=${theme} />`}
  </details>`;
}

/** A number that changes with the colours of the page. */
function useTheme() {
  const [theme, changed] = useReducer((count) => count + 1, 0);
  useEffect(() => {
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const themes = new MutationObserver(changed);
    scheme.addEventListener("change", changed);
    themes.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme", "class"] });
    return () => (scheme.removeEventListener("change", changed), themes.disconnect());
  }, []);
  return theme;
}
