"""One node of the tree, found by its key: read it, keep it, evict it with all below it.

Keys are those of `NodeRecord`, roots have the names that views show. Finding a node costs a walk over its trie, so
everything here is done in steps. The tree may change between two of them, and a node that is gone by then is not found.
"""

from __future__ import annotations

from dataclasses import dataclass

from bough.cache.admin.upkeep import keep
from bough.cache.admin.view import name_root
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency import SaltForest, SaltTrie
from bough.cache.steps import Steps
from bough.cache.tree.census import NodeRecord
from bough.cache.tree.node import Node
from bough.cache.tree.tokens import common_prefix, cut, num_tokens
from bough.errors import NodeNotFound, RequestError


@dataclass(frozen=True)
class NodeDetails:
    """A node as it is now, and the packed tokens from the root to its end."""

    record: NodeRecord
    path: bytes
    num_children: int
    idle_s: float


@dataclass(frozen=True)
class KeptNode:
    """Whether restore points of a node are kept now, and up to which offset."""

    is_kept: bool
    end: int


@dataclass(frozen=True)
class EvictedNodes:
    """What was dropped of a node and of those below it, and how many nodes stay because running requests use them."""

    num_nodes: int
    num_tokens: int
    num_left: int


def read_node(cache: PrefixCache, root: str, key: int) -> Steps[NodeDetails]:
    """A node with the tokens that lead to it. Raises NodeNotFound."""
    _, node = yield from _find(cache.forest, root, key)
    idle_s = max(0.0, cache.clock.now() - node.last_used)
    return NodeDetails(NodeRecord.of(node), _path_tokens(node), len(node.children), idle_s)


def keep_node(cache: PrefixCache, root: str, key: int, kept: bool) -> Steps[KeptNode]:
    """Keep a node's path up to its end, or up to its last restore point where the model needs one; or keep it no longer.

    Raises NodeNotFound, and RequestError if the path cannot be restored there.
    """
    trie, node = yield from _find(cache.forest, root, key)
    if not kept:
        for point in [point for point in node.points.values() if point.kept]:
            trie.keep_point(node, point, False)
        cache.residency.evictor.offer(trie, node)
        return KeptNode(is_kept=False, end=node.end)
    end = (node.deepest_point(node.end) or node.start) if cache.costs.needs_points else node.end
    if end <= node.start:
        raise RequestError(f"the tokens {node.start} to {node.end} have no restore point, and this model needs one")
    if not keep(cache, cut(_path_tokens(node), 0, end), True, _salt_of(cache.forest, trie)):
        raise RequestError(f"the first {end} tokens of this path cannot be restored: something of them was lost")
    return KeptNode(is_kept=True, end=end)


def evict_node(cache: PrefixCache, root: str, key: int) -> Steps[EvictedNodes]:
    """Drop a node and all below it that no running request uses, in memory and on disk. Raises NodeNotFound.

    Idle lanes that hold a part of it are cleared: else a request could still go on from there.
    """
    trie, top = yield from _find(cache.forest, root, key)
    _clear_lanes(cache, trie, cut(_path_tokens(top), 0, top.start + 1))
    nodes, dropped_tokens = _below(top), 0
    for node in reversed(nodes):
        dropped_tokens += _drop(cache, trie, node, is_last=node is top)
        yield
    num_left = sum(trie.holds(node) for node in nodes)
    return EvictedNodes(len(nodes) - num_left, dropped_tokens, num_left)


def _drop(cache: PrefixCache, trie: SaltTrie, node: Node, *, is_last: bool) -> int:
    """Drop what no busy lane stands on of a node, if it is a leaf now; returns how many tokens the trie has lost.

    With the last one go the parts of its parents that no request can use without it.
    """
    evictor, tokens_before = cache.residency.evictor, trie.counts.tokens
    if is_last and trie.holds(node) and node.is_leaf and not node.pins:
        evictor.remove(trie, node)
    elif trie.clear_leaf(node):
        evictor.offer(trie, node)
    return tokens_before - trie.counts.tokens


def _find(forest: SaltForest, root: str, key: int) -> Steps[tuple[SaltTrie, Node]]:
    trie = next((trie for salt, trie in forest.tries.items() if name_root(salt, trie) == root), None)
    trie = trie or forest.find_known(root)
    if trie is not None:
        for node in trie.walk():
            if node.key == key and not node.is_root:
                return trie, node
            yield
    raise NodeNotFound(f"the tree has no node {key} any more")


def _below(top: Node) -> list[Node]:
    """A node and all below it, parents first."""
    found, stack = list[Node](), [top]
    while stack:
        node = stack.pop()
        found.append(node)
        stack.extend(node.children.values())
    return found


def _path_tokens(node: Node) -> bytes:
    return b"".join(each.edge for each in node.path())


def _salt_of(forest: SaltForest, trie: SaltTrie) -> str:
    return next(salt for salt, each in forest.tries.items() if each is trie)


def _clear_lanes(cache: PrefixCache, trie: SaltTrie, prefix: bytes) -> None:
    """Clear the idle lanes of a trie whose tokens begin with these."""
    for slot in cache.lanes.idle():
        if slot.salt == trie.salt and common_prefix(slot.tokens, prefix) == num_tokens(prefix):
            slot.clear()
