/** Moving through a layout by keys. Each function gives the box to go to, the same one if there is none. */

/** Boxes that can be chosen: nodes by their last part, never ghosts. */
export function isChoosable(box) {
  return box.node !== null && box.id === box.node.node;
}

/** The siblings of a box, itself included. A part of an edge that is cut by a ghost is passed over. */
export function siblingsOf(box, layout) {
  const parent = parentOf(box);
  return parent ? childrenOf(parent) : layout.top.flatMap(reach).filter(isChoosable);
}

export function parentOf(box) {
  let parent = box.parent;
  while (parent && !isChoosable(parent)) parent = parent.parent;
  return parent;
}

export function childrenOf(box) {
  return box.children.flatMap(reach);
}

/** The box itself if it can be chosen, else those of its children that can. */
function reach(box) {
  if (isChoosable(box)) return [box];
  return box.children.flatMap(reach);
}

/** The box that a key goes to from here; null for keys that do not move. */
export function moveByKey(key, box, layout) {
  const siblings = siblingsOf(box, layout);
  const at = siblings.indexOf(box);
  if (key === "ArrowUp") return parentOf(box) ?? box;
  if (key === "ArrowDown") return childrenOf(box)[0] ?? box;
  if (key === "ArrowLeft") return siblings[at - 1] ?? nextColumn(box, layout, -1);
  if (key === "ArrowRight") return siblings[at + 1] ?? nextColumn(box, layout, 1);
  if (key === "Home") return layout.top.flatMap(reach)[0] ?? box;
  if (key === "End") return lastOf(layout) ?? box;
  return null;
}

/** The nearest box to the left or right that is not further from the root than this one. */
function nextColumn(box, layout, step) {
  for (let parent = parentOf(box); ; parent = parentOf(parent)) {
    if (!parent) return box;
    const siblings = siblingsOf(parent, layout);
    const other = siblings[siblings.indexOf(parent) + step];
    if (other) return other;
  }
}

function lastOf(layout) {
  let box = layout.top.flatMap(reach).at(-1);
  while (box && childrenOf(box).length) box = childrenOf(box).at(-1);
  return box;
}
