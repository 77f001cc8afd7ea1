"""Policies: pure functions from a node to what may go from it, and in which order.

The heap in `memory` sorts by these; it pops the smallest. Classes come first: redundant restore points go before rows, and
rows that end in a kept restore point go last. Which of two policies is in force is decided in `shadow`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from bough.cache.node import Node, Point

Key = tuple[float, ...]


class Class(IntEnum):
    """What evicting a node would take, cheapest first."""

    REDUNDANT_POINT = 0
    TAIL = 1
    KEPT_TAIL = 2


def leaf_lru(node: Node) -> Key:
    """Least recently used first; of equals the deepest, then the largest."""
    return (node.last_used, -node.end, -len(node.edge))


def leaf_lru2(node: Node) -> Key:
    """By the use before the last: what never came back goes first. Of equals as `leaf_lru` says."""
    return (node.previous_used, *leaf_lru(node))


@dataclass(frozen=True)
class Policy:
    """An order in which leaves go, the smallest key first; page by page, or each as a whole.

    A key must not change but by something that offers the node anew: a use, a pin, a cut.
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
    """The restore point of this node that is worth least, if one may go before rows do."""
    adopting = {pin.offset for pin in node.pins if pin.is_adopting}
    points = (point for point in node.points.values() if point.is_redundant and point.offset not in adopting)
    return min(points, key=lambda point: (point.reason, point.offset), default=None)


def tail_start(node: Node, page_tokens: int, *, needs_points: bool, take_kept: bool) -> int:
    """Where a leaf would end if its least valuable tail went: its end if nothing may go, its start if all does.

    A tail reaches back to the last page border; where the model needs restore points, on to the deepest one at or below it,
    because rows beyond that serve nobody. What a busy lane stands on stays, and so do kept points unless they are meant.
    """
    border = max(node.start, (node.end - 1) // page_tokens * page_tokens)
    if needs_points:
        border = node.deepest_point(border) or node.start
    floor = node.pinned_to
    if not take_kept:
        floor = max(floor, node.deepest_point(node.end, kept=True) or 0)
    return min(node.end, max(border, floor))


def classify(node: Node, page_tokens: int, *, needs_points: bool) -> Class | None:
    """What would go next from this node, or None if nothing may."""
    if redundant_point(node) is not None:
        return Class.REDUNDANT_POINT
    if node.is_root or not node.is_leaf:
        return None
    for take_kept in (False, True):
        if tail_start(node, page_tokens, needs_points=needs_points, take_kept=take_kept) < node.end:
            return Class.KEPT_TAIL if take_kept else Class.TAIL
    return None
