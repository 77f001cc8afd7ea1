"""What the cache holds and has done, as plain figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.cache.tree.state import Place

if TYPE_CHECKING:
    from bough.cache.prefix_cache import PrefixCache

Stats = dict[str, int | str | None]


def stats(cache: PrefixCache) -> Stats:
    """Counts and bytes of everything that is kept, place by place, and what was let go so far."""
    nodes = [node for trie in cache.tries.values() for node in trie.walk() if not node.is_root]
    counts = cache.evictor.counts
    return {
        "roots": len(cache.tries),
        "nodes": len(nodes),
        "tokens": sum(node.end - node.start for node in nodes),
        "pages": sum(len(pages) for node in nodes for pages in node.pages.values()),
        "restore_points": sum(len(node.points) for node in nodes),
        "kept": sum(point.kept for node in nodes for point in node.points.values()),
        "tree_bytes": cache.memory.tree_bytes,
        "lane_bytes": cache.room.lane_bytes,
        "used_bytes": cache.room.used_bytes,
        "budget_bytes": cache.room.budget_bytes,
        "lanes": len(cache.slots),
        "busy_lanes": sum(slot.is_busy for slot in cache.slots),
        "evicted_points": counts.points,
        "evicted_tokens": counts.tokens,
        **_below(cache),
    }


def _below(cache: PrefixCache) -> Stats:
    """The figures of the places below the device, where there are any."""
    found: Stats = {}
    if cache.tiers is not None and cache.tiers.has_host:
        found |= {
            "host_bytes": cache.memory.num_bytes[Place.HOST],
            "host_budget_bytes": cache.tiers.host_bytes,
            "host_taken_bytes": cache.tiers.store.host_bytes(),
            "demoted_bytes": cache.evictor.counts.host_bytes,
        }
    if cache.memory.disk is not None:
        disk = cache.memory.disk
        found |= {
            "disk_bytes": disk.used_bytes,
            "disk_budget_bytes": disk.budget_bytes,
            "disk_pending_bytes": disk.pending_bytes,
            "disk_files": disk.num_copies,
            "disk_loaded_bytes": disk.counts.loaded_bytes,
            "disk_failed_writes": disk.counts.failed_writes,
            "disk_misses": sum(disk.counts.misses.values()),
            "disk_bad_rows": disk.counts.bad_rows,
            "disk_is_failing": disk.is_failing,
        }
    if cache.tiers is not None and cache.tiers.problem:
        found["disk_problem"] = cache.tiers.problem
    if cache.tiers is not None:
        found["failed_loads"] = cache.counts.failed_loads
    return found
