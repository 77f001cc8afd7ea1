"""Changes to the tree from outside: keep a prefix, or keep it no longer."""

from __future__ import annotations

from collections.abc import Sequence

from bough.cache.prefix_cache import PrefixCache
from bough.cache.tree.node import Reason
from bough.cache.tree.tokens import num_tokens, pack

_ONE_MORE = pack([0])  # the last token of a prompt is always computed


def keep(cache: PrefixCache, ids: Sequence[int] | bytes, kept: bool, salt: str = "") -> bool:
    """Let a prefix outlive its unkept peers, or no longer; False if it cannot be restored at its end.

    Where the model needs restore points there has to be one at that end; full attention can be restored anywhere.
    """
    packed = pack(ids)
    end = num_tokens(packed)
    trie = cache.forest.find(salt)
    found = trie.match(packed)
    point = found.node.points.get(end) if found.length == end else None
    if kept and cache.count_reusable(packed + _ONE_MORE, salt) < end:
        return False  # something on the path was lost
    if point is None and kept and found.length == end > 0 and not cache.costs.needs_points:
        point = trie.add_point(found.node, end, Reason.END)
    if point is None:
        return False
    trie.keep_point(found.node, point, kept)
    cache.residency.evictor.offer(trie, found.node)
    return True
