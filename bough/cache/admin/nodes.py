"""Changes to the tree from outside: keep a prefix; read, keep or evict one node, found by its key.

Keys are those of `NodeRecord`, roots have the names that views show. Finding a node costs a walk over its trie, so it is
done in steps. The tree may change between two of them, and a node that is gone by then is not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bough.cache.admin.view import name_root
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency import SaltForest, SaltTrie
from bough.cache.residency.census import NodeRecord
from bough.cache.steps import Steps
from bough.cache.tree.node import Node, Reason
from bough.errors import NodeNotFound, RequestError
from bough.tokens import common_prefix, cut, num_tokens, pack

_ONE_MORE = pack([0])  # the last token of a prompt is always computed


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
    """How many nodes and tokens were dropped, and how many nodes stay because running requests use them."""

    num_nodes: int
    num_tokens: int
    num_left: int


def keep(cache: PrefixCache, ids: Sequence[int] | bytes, kept: bool, salt: str = "") -> bool:
    """Keep a prefix, which then outlives its unkept peers, or end that; False if it cannot be restored at its end.

    Where the model needs restore points there has to be one at that end; full attention can be restored anywhere.
    """
    packed = pack(ids)
    end = num_tokens(packed)
    trie = cache.forest.find(salt)
    found = trie.match(packed)
    point = found.node.points.get(end) if found.length == end else None
    if kept and cache.count_reusable(packed + _ONE_MORE, salt) < end:
        return False  # a part of the path was lost
    if point is None and kept and found.length == end > 0 and not cache.memory.needs_points:
        point = trie.add_point(found.node, end, Reason.END)
    if point is None:
        return False
    trie.keep_point(found.node, point, kept)
    cache.residency.evictor.offer(trie, found.node)
    return True


def read_node(cache: PrefixCache, root: str, key: int) -> Steps[NodeDetails]:
    """A node with the tokens that lead to it. Raises NodeNotFound."""
    _, node = yield from _find(cache.forest, root, key)
    idle_s = max(0.0, cache.clock.now() - node.last_used)
    return NodeDetails(NodeRecord.of(node), node.path_tokens(), len(node.children), idle_s)


def keep_node(cache: PrefixCache, root: str, key: int, kept: bool) -> Steps[KeptNode]:
    """Keep a node's path up to its end, or up to its last restore point where the model needs one; or end that.

    Raises NodeNotFound, and RequestError if the path cannot be restored there.
    """
    trie, node = yield from _find(cache.forest, root, key)
    if not kept:
        for point in [point for point in node.points.values() if point.kept]:
            trie.keep_point(node, point, False)
        cache.residency.evictor.offer(trie, node)
        return KeptNode(is_kept=False, end=node.end)
    end = (node.deepest_point(node.end) or node.start) if cache.memory.needs_points else node.end
    if end <= node.start:
        raise RequestError(f"the tokens {node.start} to {node.end} have no restore point, and this model needs one")
    salt = next(salt for salt, each in cache.forest.tries.items() if each is trie)
    if not keep(cache, cut(node.path_tokens(), 0, end), True, salt):
        raise RequestError(f"the first {end} tokens of this path cannot be restored: something of them was lost")
    return KeptNode(is_kept=True, end=end)


def evict_node(cache: PrefixCache, root: str, key: int) -> Steps[EvictedNodes]:
    """Drop a node and all below it that no running request uses, in memory and on disk. Raises NodeNotFound.

    Idle lanes that hold a part of it are cleared: else a request could still go on from there.
    """
    trie, top = yield from _find(cache.forest, root, key)
    prefix = cut(top.path_tokens(), 0, top.start + 1)
    for slot in cache.lanes.idle():
        if slot.salt == trie.salt and common_prefix(slot.tokens, prefix) == num_tokens(prefix):
            slot.clear()
    nodes = list(trie.walk(top))
    num_tokens_dropped = yield from cache.residency.evictor.clear(trie, top)
    num_left = sum(trie.has(node) for node in nodes)
    return EvictedNodes(len(nodes) - num_left, num_tokens_dropped, num_left)


def _find(forest: SaltForest, root: str, key: int) -> Steps[tuple[SaltTrie, Node]]:
    trie = next((trie for salt, trie in forest.tries.items() if name_root(salt, trie) == root), None)
    trie = trie or forest.find_known(root)
    if trie is not None:
        for node in trie.walk():
            if node.key == key and not node.is_root:
                return trie, node
            yield
    raise NodeNotFound(f"the tree has no node {key} any more")
