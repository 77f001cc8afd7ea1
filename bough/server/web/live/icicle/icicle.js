/** The tree as an icicle: a canvas that people see, and tree items for keyboards and screen readers. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "../../vendor/preact-htm.js";
import { isRunning } from "../events.js";
import { Breadcrumb, HiddenItems, Tooltip, itemId } from "./companions.js";
import { describeNode, formatCount } from "./labels.js";
import { layoutTree } from "./layout.js";
import { isChoosable, moveByKey } from "./navigation.js";
import { Pointer } from "./pointer.js";
import { readRequests } from "./scene.js";
import { Stage } from "./stage.js";

const SHOWN_NAME = "bough.shown";
const CHOICES = { conversation: "This conversation", everything: "Everything" };
const STEP = 1.5; // of zooming by keys and buttons

/** What keys do besides moving. */
const KEYS = {
  Enter: ({ node, onChoose }) => onChoose(node),
  " ": ({ node, onChoose }) => onChoose(node),
  "+": ({ stage }) => stage.zoom(STEP),
  "=": ({ stage }) => stage.zoom(STEP),
  "-": ({ stage }) => stage.zoom(1 / STEP),
  0: ({ fit }) => fit(),
  z: ({ box, zoomTo }) => zoomTo(box),
  k: ({ node, onKeep }) => onKeep(node),
  K: ({ node, onKeep }) => onKeep(node),
  Delete: ({ node, onEvict }) => onEvict(node),
  Escape: ({ fit, onChoose }) => (fit(), onChoose(null)),
};

/**
 * The canvas with its bar. `tree` is {model, root: RootMirror, resets}; `current` has the keys of the nodes on the branches
 * of the current conversation, and `active` those of the branch that the chat shows.
 */
export function Icicle({ live, tree, chosenKey, current, active, onChoose, onKeep, onEvict }) {
  const canvas = useRef(null);
  const stage = useRef(null);
  const ended = useRef(new EndTimes());
  const shown = useRef({ name: "", signature: "" });
  const [counts, setCounts] = useState({ numShown: 0, numMerged: 0 });
  const [choice, setChoice] = useShownChoice();
  const isPartial = choice === "conversation" && current.size > 0;
  const [focusKey, setFocusKey] = useState(null);
  const [hover, setHover] = useState(null);
  const [isFocused, setFocused] = useState(false);
  const [zoomKey, setZoomKey] = useState(null);
  const [layout, setLayout] = useState(null);
  const latest = useRef();
  latest.current = { onChoose, onRest: () => setChoice("everything") };

  useLayoutEffect(() => {
    stage.current = new Stage(canvas.current, ({ numShown, numMerged }) => setCounts({ numShown, numMerged }));
    const pointer = new Pointer(canvas.current, stage.current, {
      onHover: (item, x, y) => setHover(item && !item.count ? { box: item.box, x, y } : item ? { item, x, y } : null),
      onChoose: (box) => (setHover(null), setFocusKey(box.node.node), latest.current.onChoose(box.node)),
      onRest: () => latest.current.onRest(),
      onZoom: (box) => setZoomKey(box?.node?.node ?? null),
    });
    return () => (pointer.close(), stage.current.close());
  }, []);

  useLayoutEffect(() => {
    if (updateStage(stage.current, live, tree, isPartial ? { keys: current, active } : null, ended.current, shown.current))
      setLayout(stage.current.layout);
  });

  const focused = layout?.byId.get(focusKey) ?? layout?.top.find(isChoosable) ?? null;
  useEffect(() => {
    const { byId } = stage.current.layout;
    const hovered = byId.get(hover?.box?.id) ?? null;
    const chosen = byId.get(isFocused ? focused?.id : chosenKey) ?? null;
    stage.current.mark({ path: pathOf(hovered ?? (isFocused ? chosen : null)), hovered, chosen, isFocused, current: active });
  }, [hover, chosenKey, isFocused, focused, active]);

  const fit = () => (setZoomKey(null), stage.current.fit());
  const zoomTo = (box) => (setZoomKey(box.node.node), stage.current.zoomTo(box));
  const goTo = (box) => {
    setFocusKey(box.id);
    stage.current.reveal(box);
    if (chosenKey !== null) onChoose(box.node); // the details go along
  };
  const onKeyDown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !focused) return;
    setFocused(true);
    const next = moveByKey(event.key, focused, stage.current.layout);
    const action = KEYS[event.key];
    if (next) goTo(next);
    else if (action)
      action({ node: focused.node, box: focused, stage: stage.current, fit, zoomTo, onChoose, onKeep, onEvict });
    else return;
    event.preventDefault();
  };

  return html`<section class="icicle" aria-label="Tree of prefixes">
    <div class="icicle-bar">
      <${Breadcrumb} box=${layout?.byId.get(zoomKey)} onFit=${fit} onZoom=${zoomTo} />
      <fieldset class="icicle-choice">
        <legend class="visually-hidden">Show in the tree</legend>
        ${Object.entries(CHOICES).map(
          ([name, label]) => html`<label key=${name}><input type="radio" name="shown" value=${name}
            checked=${choice === name} onChange=${() => setChoice(name)} />${label}</label>`,
        )}
      </fieldset>
      <span class="icicle-buttons">
        <button type="button" title="Zoom out (-)" aria-label="Zoom out"
          onClick=${() => stage.current.zoom(1 / STEP)}>−</button>
        <button type="button" title="Zoom in (+)" aria-label="Zoom in"
          onClick=${() => stage.current.zoom(STEP)}>+</button>
        <button type="button" title="Whole tree (0)" onClick=${fit}>Fit</button>
      </span>
    </div>
    <div class="icicle-canvas" role="tree" tabindex="0" aria-orientation="horizontal" aria-label="Tree of prefixes: arrows move, Enter shows details"
      aria-activedescendant=${focused ? itemId(focused) : undefined} onKeyDown=${onKeyDown}
      onFocus=${(event) => setFocused(event.target.matches(":focus-visible"))} onBlur=${() => setFocused(false)}>
      <canvas ref=${canvas} aria-hidden="true"></canvas>
      <${HiddenItems} focused=${focused} layout=${layout} chosenKey=${chosenKey} />
      <${Tooltip} hover=${hover} size=${stage.current?.size} />
    </div>
    <p class="icicle-note">${isFocused && focused ? describeNode(focused.node) : describeCounts(counts, layout, { isPartial, isEmpty: choice === "conversation" && !isPartial })}</p>
  </section>`;
}

/** Give the stage a new layout if something that it shows has changed; tells whether it has. */
function updateStage(stage, live, { model, root, resets }, wanted, ended, shown) {
  const now = performance.now();
  ended.note(live.requests, now);
  const { ghosts, glows } = readRequests(live.requests, model, root.name, ended.times, now);
  const name = JSON.stringify([model, root.name, resets]);
  const news = [
    name,
    root.version,
    wanted && [[...wanted.keys], [...wanted.active]],
    ghosts,
    glows.map(({ node, reach, isLoading, age }) => [node, reach, isLoading, age > 0]),
  ];
  const signature = JSON.stringify(news);
  if (signature === shown.signature) return false;
  stage.show(layoutTree(root, ghosts, wanted), glows, root, { isSame: shown.name === name });
  shown.name = name;
  shown.signature = signature;
  return true;
}

/** When requests were first seen to have ended, so that their paths can fade. */
class EndTimes {
  constructor() {
    this.times = new Map();
    this._running = new Set();
  }

  note(requests, now) {
    for (const [id, each] of requests) {
      if (isRunning(each)) this._running.add(id);
      else if (this._running.delete(id)) this.times.set(id, now);
    }
    for (const id of this.times.keys()) if (!requests.has(id)) this.times.delete(id);
  }
}

function pathOf(box) {
  const path = new Set();
  for (let each = box; each; each = each.parent) path.add(each);
  return path;
}

function describeCounts({ numShown, numMerged }, layout, { isPartial, isEmpty }) {
  const total = layout?.numNodes ?? 0;
  const all = total === 1 ? "1 node" : `${formatCount(total)} nodes`;
  if (numMerged > 0) return `Showing the ${formatCount(numShown)} largest of ${all}. Zoom in to see the others.`;
  if (isPartial && numShown < total) return `${formatCount(numShown)} of ${all}: this conversation, and where others leave it`;
  if (numShown < total) return `${formatCount(numShown)} of ${all} in view`;
  return isEmpty ? `${all}, none of them of this conversation yet` : all;
}

/** What is drawn: this conversation with what leaves it, or everything. Kept in this browser. */
function useShownChoice() {
  const [choice, setChoice] = useState(() => {
    const stored = localStorage.getItem(SHOWN_NAME);
    return stored in CHOICES ? stored : "conversation";
  });
  const choose = (name) => {
    localStorage.setItem(SHOWN_NAME, name);
    setChoice(name);
  };
  return [choice, choose];
}
