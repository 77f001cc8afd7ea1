"""Statistics of the cache as plain figures."""

from __future__ import annotations

from bough.cache.residency import Residency, SaltForest
from bough.cache.residency.census import TreeCounts
from bough.cache.tree.state import Tier

Stats = dict[str, int | str | None]


def stats(forest: SaltForest, residency: Residency) -> Stats:
    """Counts and bytes of the whole cache, tier by tier, and of evictions so far. Walks nothing."""
    counts, room = residency.evictor.counts, residency.room
    return {
        "roots": len(forest.tries),
        **_counts(residency.memory.census.counts),
        "tree_bytes": residency.memory.tree_bytes,
        "lane_bytes": residency.lanes.nbytes,
        "used_bytes": room.used_bytes,
        "budget_bytes": room.budget_bytes,
        "lanes": len(residency.lanes.slots),
        "busy_lanes": residency.lanes.num_busy,
        "evicted_points": counts.points,
        "evicted_tokens": counts.tokens,
        **_host(residency),
        **_disk(residency),
        **_store(residency),
    }


def salt_stats(forest: SaltForest, salt: str) -> dict[str, int]:
    """Counts and bytes of one salt in memory, by the same names."""
    trie = forest.find(salt)
    held = trie.memory.num_bytes
    return {**_counts(trie.memory.census.counts), "tree_bytes": held[Tier.DEVICE] + held[Tier.HOST]}


def _counts(counts: TreeCounts) -> dict[str, int]:
    return {
        "nodes": counts.nodes,
        "tokens": counts.tokens,
        "pages": counts.pages,
        "restore_points": counts.points,
        "kept": counts.kept,
    }


def _host(residency: Residency) -> Stats:
    """The figures of the host tier, where there is one."""
    memory = residency.memory
    if not memory.host_budget_bytes:
        return {}
    return {
        "host_bytes": memory.num_bytes[Tier.HOST],
        "host_budget_bytes": memory.host_budget_bytes,
        "host_taken_bytes": memory.content.host_bytes(),
        "demoted_bytes": residency.evictor.counts.host_bytes,
    }


def _store(residency: Residency) -> Stats:
    """The figures of the store that machines share, where there is one or one was wanted."""
    shared, tiers = residency.memory.shared, residency.memory.tiers
    if shared is None:
        return {"store_problem": tiers.shared_problem} if tiers is not None and tiers.shared_problem else {}
    counts = shared.counts
    found: Stats = {
        "store_bytes": shared.uploader.held_bytes,
        "store_budget_bytes": shared.budget_bytes,
        "store_waiting_bytes": shared.uploader.waiting_bytes,
        "store_sent": counts.sent,
        "store_sent_bytes": counts.sent_bytes,
        "store_already_there": counts.already_there,
        "store_refreshed": counts.refreshed,
        "store_dropped": counts.dropped + counts.gone + counts.refused,
        "store_loaded": counts.loaded,
        "store_loaded_bytes": counts.loaded_bytes,
        "store_not_found": counts.not_found,
        "store_misses": sum(counts.misses.values()),
        "store_errors": counts.errors,
        "store_swept_bytes": counts.swept_bytes,
        "store_is_failing": bool(shared.problem),
    }
    return found | ({"store_problem": shared.problem} if shared.problem else {})


def _disk(residency: Residency) -> Stats:
    """The figures of the disk tier, where there is one or one was wanted."""
    found: Stats = {}
    disk, tiers = residency.memory.disk, residency.memory.tiers
    if disk is not None:
        found |= {
            "disk_bytes": disk.used_bytes,
            "disk_budget_bytes": disk.budget_bytes,
            "disk_pending_bytes": disk.pending_bytes,
            "disk_files": disk.num_files,
            "disk_loaded_bytes": disk.counts.loaded_bytes,
            "disk_failed_writes": disk.counts.failed_writes,
            "disk_misses": sum(disk.counts.misses.values()),
            "disk_bad_rows": disk.counts.bad_rows,
            "disk_is_failing": disk.is_failing,
            "disk_is_read_only": bool(disk.read_only),
        }
        if disk.problem:
            found["disk_problem"] = disk.problem
    if tiers is not None and tiers.problem:
        found["disk_problem"] = tiers.problem
    if tiers is not None:
        found["failed_loads"] = residency.loader.counts.failed_loads
    return found
