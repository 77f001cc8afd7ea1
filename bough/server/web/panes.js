/** The panes: side by side where there is room, folded and resized by the user; else one at a time. */

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const NARROW = "(max-width: 859px)";
const STORED_NAME = "bough.panes";
const BOUNDS = { left: [180, 480], right: [260, 900] };
const KEY_STEP = 24;

/** The state of the panes: which are shown, how wide the side panes are, and functions to change that. */
export function usePanes() {
  const [widths, setWidths] = useState(readWidths);
  const [shown, setShown] = useState("chat");
  const isNarrow = useMedia(NARROW);
  useEffect(() => localStorage.setItem(STORED_NAME, JSON.stringify(widths)), [widths]);
  const { left, right, isLeftFolded, isRightFolded } = widths;
  const columns = `${isLeftFolded ? 0 : left}px auto minmax(0, 1fr) auto ${isRightFolded ? 0 : right}px`;
  return {
    isNarrow,
    widths,
    style: isNarrow ? {} : { gridTemplateColumns: columns },
    show: setShown,
    isShown: (name) => (isNarrow ? shown === name : !{ conversations: isLeftFolded, tree: isRightFolded }[name]),
    fold: (side) =>
      setWidths((each) =>
        side === "left"
          ? { ...each, isLeftFolded: !each.isLeftFolded }
          : { ...each, isRightFolded: !each.isRightFolded },
      ),
    resize: (side, width) => setWidths((each) => ({ ...each, [side]: clamp(width, BOUNDS[side]) })),
  };
}

/** The line between two panes. It is dragged, or moved by the arrow keys. */
export function Divider({ side, panes }) {
  const start = useRef(null);
  const isFolded = side === "left" ? panes.widths.isLeftFolded : panes.widths.isRightFolded;
  if (panes.isNarrow || isFolded) return html`<span></span>`;
  const sign = side === "left" ? 1 : -1;
  const width = panes.widths[side];
  const onKeyDown = ({ key }) => {
    const step = { ArrowLeft: -KEY_STEP, ArrowRight: KEY_STEP }[key];
    if (step) panes.resize(side, width + sign * step);
  };
  const onPointerDown = (event) => {
    event.preventDefault();
    event.currentTarget.setPointerCapture(event.pointerId);
    start.current = { x: event.clientX, width };
  };
  const onPointerMove = (event) =>
    start.current && panes.resize(side, start.current.width + sign * (event.clientX - start.current.x));
  const onPointerUp = () => (start.current = null);
  const [least, most] = BOUNDS[side];
  return html`<div
    class="divider"
    role="separator"
    aria-orientation="vertical"
    tabindex="0"
    aria-label=${side === "left" ? "Width of the conversations" : "Width of the tree"}
    aria-valuenow=${Math.round(width)}
    aria-valuemin=${least}
    aria-valuemax=${most}
    ...${{ onKeyDown, onPointerDown, onPointerMove, onPointerUp }}
  ></div>`;
}

function readWidths() {
  const usual = { left: 260, right: 420, isLeftFolded: false, isRightFolded: false };
  try {
    const { left, right, isLeftFolded, isRightFolded } = {
      ...usual,
      ...JSON.parse(localStorage.getItem(STORED_NAME) ?? "{}"),
    };
    return { left: clamp(left, BOUNDS.left), right: clamp(right, BOUNDS.right), isLeftFolded, isRightFolded };
  } catch {
    return usual;
  }
}

function clamp(value, [least, most]) {
  return Math.min(most, Math.max(least, Number(value) || least));
}

function useMedia(query) {
  const [isTrue, setTrue] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const list = matchMedia(query);
    const update = () => setTrue(list.matches);
    list.addEventListener("change", update);
    return () => list.removeEventListener("change", update);
  }, [query]);
  return isTrue;
}
