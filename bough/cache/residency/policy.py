"""Policies: pure functions from a node to what may be evicted from it, and in which order.

The heaps in `order` sort by these and give the smallest. Classes come first: redundant restore points are evicted before
rows, and rows that end in a kept restore point last. `shadow` decides which of two policies is in force.

In a tier that has another below it, content is demoted (`tail_items`), wherever its node is in the tree. Where there is
none, it is dropped: a leaf is cut (`tail_start`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from bough.cache.tree.node import Node, Pin, Point
from bough.cache.tree.state import Item, Kind, Page, Tier

Key = tuple[float, ...]


class EvictionClass(IntEnum):
    """What would be evicted from a node, the cheapest first."""

    REDUNDANT_POINT = 0
    TAIL = 1
    KEPT_TAIL = 2


def leaf_lru(node: Node) -> Key:
    """Least recently used first; of equals the deepest, then the largest."""
    return (node.last_used, -node.end, -len(node.edge))


def leaf_lru2(node: Node) -> Key:
    """By the use before the last: what was used only once goes first. Of equals as `leaf_lru` says."""
    return (node.previous_used, *leaf_lru(node))


@dataclass(frozen=True)
class Policy:
    """An order in which leaves are evicted, the smallest key first; page by page, or each as a whole.

    A key may change only together with a new offer of the node: a use, a pin, a cut.
    """

    key: Callable[[Node], Key]
    is_whole: bool = False

    def step_tokens(self, page_tokens: int) -> int:
        """A leaf is trimmed back to a multiple of this."""
        return sys.maxsize if self.is_whole else page_tokens


LRU = Policy(leaf_lru)
LRU2 = Policy(leaf_lru2)
WHOLE_NODES = Policy(leaf_lru, is_whole=True)


def redundant_point(node: Node) -> Point | None:
    """The restore point of this node that is worth least, if one may be evicted before rows are."""
    adopting = {pin.offset for pin in node.pins if pin.is_adopting}
    points = (point for point in node.points.values() if point.is_redundant and point.offset not in adopting)
    return min(points, key=lambda point: (point.reason, point.offset), default=None)


def tail_start(node: Node, page_tokens: int, *, needs_points: bool, take_kept: bool) -> int:
    """Where a leaf would end without its least valuable tail: at its end if nothing may be cut, at its start if all is.

    A tail reaches back to the last page border; where the model needs restore points, on to the deepest one at or below it,
    because no request can use rows beyond that. What a busy lane stands on stays; so do kept points without `take_kept`.
    """
    border = max(node.start, (node.end - 1) // page_tokens * page_tokens)
    if needs_points:
        border = node.deepest_point(border) or node.start
    floor = node.pinned_to
    if not take_kept:
        floor = max(floor, node.deepest_point(node.end, kept=True) or 0)
    return min(node.end, max(border, floor))


def _is_any(item: Item) -> bool:
    return True


def tail_items(
    node: Node,
    tier: Tier,
    page_tokens: int,
    *,
    held_to: int,
    take_kept: bool,
    is_wanted: Callable[[Item], bool] = _is_any,
) -> list[Item]:
    """What may be demoted from a tier next: all of the last page of this node that has something wanted in that tier.

    Rows below `held_to` stay, because busy lanes stand on them, and so does what a lane is adopting; kept rows and points
    stay without `take_kept`.
    """
    floor = 0 if take_kept else node.deepest_point(node.end, kept=True) or 0
    end = max(_last_ends(node, tier, floor, held_to, is_wanted), default=0)
    border = (end - 1) // page_tokens * page_tokens
    tail = _tail_to(node, tier, max(floor, border)) if end else ()
    return [item for item in tail if is_wanted(item) and not _is_held(node, item, held_to)]


def _last_ends(
    node: Node, tier: Tier, floor: int, held_to: int, is_wanted: Callable[[Item], bool] = _is_any
) -> Iterator[int]:
    """Where the last wanted item of each kind ends that lies in a tier, above `floor`, and may be demoted."""
    for pages in node.pages.values():
        for page in reversed(pages):
            if page.end <= floor or (page.group.kind is Kind.FULL and page.start < held_to):
                break
            if page.tier is tier and is_wanted(page) and not _is_held(node, page, held_to):
                yield page.end
                break
    for point in node.points.values():
        for state in point.states.values():
            if point.offset <= floor or state.tier is not tier or not is_wanted(state):
                continue
            if not _is_held(node, state, held_to):
                yield point.offset


def _tail_to(node: Node, tier: Tier, border: int) -> Iterator[Item]:
    """What lies in a tier and ends after `border`."""
    for pages in node.pages.values():
        for page in reversed(pages):
            if page.end <= border:
                break
            if page.tier is tier:
                yield page
    for point in node.points.values():
        if point.offset > border:
            yield from (state for state in point.states.values() if state.tier is tier)


def items_at(node: Node, tier: Tier) -> Iterator[Item]:
    """Everything of a node that lies in a tier."""
    return (item for item in node.items() if item.tier is tier)


def _is_held(node: Node, item: Item, held_to: int) -> bool:
    if not isinstance(item, Page):
        return any(pin.is_adopting and pin.offset == item.offset for pin in node.pins)
    if item.group.kind is Kind.FULL:
        return item.start < held_to
    return any(isinstance(user, Pin) for user in item.users)


def classify_demotion(node: Node, tier: Tier) -> EvictionClass | None:
    """What would be demoted from a tier next, or None if nothing may."""
    point = redundant_point(node)
    if point is not None and any(state.tier is tier for state in point.states.values()):
        return EvictionClass.REDUNDANT_POINT
    if any(_last_ends(node, tier, node.deepest_point(node.end, kept=True) or 0, node.pinned_to)):
        return EvictionClass.TAIL
    return EvictionClass.KEPT_TAIL if any(_last_ends(node, tier, 0, node.pinned_to)) else None


def classify(node: Node, page_tokens: int, *, needs_points: bool) -> EvictionClass | None:
    """What would be dropped from this node next, or None if nothing may."""
    if redundant_point(node) is not None:
        return EvictionClass.REDUNDANT_POINT
    if node.is_root or not node.is_leaf:
        return None
    for take_kept in (False, True):
        if tail_start(node, page_tokens, needs_points=needs_points, take_kept=take_kept) < node.end:
            return EvictionClass.KEPT_TAIL if take_kept else EvictionClass.TAIL
    return None


def is_empty_leaf(node: Node) -> bool:
    """Whether the node is a leaf that holds nothing any more."""
    return node.is_leaf and not node.is_root and not any(True for _ in node.items())


def classify_files(node: Node) -> EvictionClass | None:
    """What of a node would be evicted from the disk next, or None if nothing may."""
    if not is_empty_leaf(node) and not any(item.files for item in node.items()):
        return None
    return EvictionClass.TAIL if node.deepest_point(node.end, kept=True) is None else EvictionClass.KEPT_TAIL
