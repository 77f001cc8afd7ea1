/** What stands beside the canvas: the way back after a zoom, items for screen readers, and words beside the pointer. */

import { html } from "../../vendor/preact-htm.js";
import { describeNode, formatCount, nameTier, shorten, toLabel } from "./labels.js";
import { childrenOf, parentOf, siblingsOf } from "./navigation.js";

const MOST_ITEMS = 30; // siblings and children that a screen reader is told of

/** The way from the root to what was zoomed to. */
export function Breadcrumb({ box, onFit, onZoom }) {
  const path = [];
  for (let each = box; each; each = parentOf(each)) path.unshift(each);
  if (!path.length) return null;
  return html`<nav class="icicle-crumbs" aria-label="Zoomed to">
    <button type="button" onClick=${onFit}>root</button>
    ${path.length > 3 && html`<span aria-hidden="true">› …</span>`}
    ${path.slice(-3).map(
      (each) => html`<span aria-hidden="true">›</span>
      <button type="button" key=${each.id} onClick=${() => onZoom(each)}>
        <bdi>${shorten(toLabel(each.node.text), 16)}</bdi></button>`,
    )}
  </nav>`;
}

/** What a screen reader is told of: the focused node, its parent, siblings and children. */
export function HiddenItems({ focused, layout, chosenKey }) {
  if (!focused || !layout) return null;
  const siblings = siblingsOf(focused, layout);
  const parent = parentOf(focused);
  const at = Math.max(0, siblings.indexOf(focused) - MOST_ITEMS / 2);
  const near = siblings.slice(at, at + MOST_ITEMS);
  const children = childrenOf(focused).slice(0, MOST_ITEMS);
  const item = (box, all) => html`<div key=${box.id} id=${itemId(box)} role="treeitem" class="visually-hidden"
    aria-level=${levelOf(box)} aria-posinset=${all.indexOf(box) + 1} aria-setsize=${all.length}
    aria-selected=${box.id === chosenKey ? "true" : "false"} aria-expanded=${box.children.length ? "true" : undefined}
    aria-label=${describeNode(box.node)}></div>`;
  const own = near.flatMap((box) => [
    item(box, siblings),
    ...(box === focused ? children.map((each) => item(each, children)) : []),
  ]);
  return [parent && item(parent, siblingsOf(parent, layout)), ...own];
}

function levelOf(box) {
  let level = 1;
  for (let each = parentOf(box); each; each = parentOf(each)) level += 1;
  return level;
}

/** The id of a box's item in the page. */
export function itemId(box) {
  return `icicle-item-${box.id}`;
}

/** A few words beside the pointer. */
export function Tooltip({ hover, size }) {
  if (!hover || !size) return null;
  const isRight = hover.x > size.width / 2;
  const isLow = hover.y > size.height / 2;
  const style = {
    [isRight ? "right" : "left"]: `${isRight ? size.width - hover.x + 12 : hover.x + 12}px`,
    [isLow ? "bottom" : "top"]: `${isLow ? size.height - hover.y + 12 : hover.y + 12}px`,
  };
  return html`<div class="icicle-tip" style=${style} aria-hidden="true">${describeHover(hover)}</div>`;
}

function describeHover({ item, box }) {
  if (item) return html`<p>${formatCount(item.count)} nodes that are too small to be drawn: click to zoom in</p>`;
  if (box.ghost) return describeGhost(box.ghost);
  if (box.rest) return describeRest(box.rest);
  const { node } = box;
  return html`<p class="icicle-tip-text" dir="auto">${shorten(toLabel(node.text), 160)}</p>
    <p>tokens ${formatCount(node.start)}–${formatCount(node.end)} · ${nameTier(node)}
      ${" "}· ${node.hits} ${node.hits === 1 ? "use" : "uses"}
      ${node.kept.length > 0 && " · kept"}</p>`;
}

function describeRest({ branches, nodes }) {
  return html`<p>${formatCount(branches)} other branches with ${formatCount(nodes)} nodes: click to show everything</p>`;
}

function describeGhost({ state, doneTokens, promptTokens, answer }) {
  const done = `${formatCount(doneTokens)} of ${formatCount(promptTokens)} prompt tokens`;
  return html`<p>a request that is ${state}: ${done}, ${formatCount(answer)} answered</p>`;
}
