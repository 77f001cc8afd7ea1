"""Events as JSON: nodes, requests and figures, in the words of the documented stream.

Nodes are written in a thread, because decoding their texts takes time; each record is written once for all readers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from bough.cache.admin.view import PAUSE_NODES, PAUSE_S, explain_reuse
from bough.cache.admin.watch import TreeChanges
from bough.cache.tree.census import NodeRecord
from bough.cache.tree.state import Tier
from bough.cache.tree.tokens import cut, pack
from bough.server.serving.model.look import TEXT_TOKENS, Seen
from bough.server.serving.progress import RequestProgress, Totals
from bough.types import Usage

TEXT_CHARACTERS = 200
"""Of a long edge only the beginning is told; `/api/cache/nodes` tells all of it."""

_AROUND = 12  # tokens that are shown of where a prompt leaves the tree

Decode = Callable[[bytes], str]
NodePieces = dict[str, dict[int, str | None]]
"""The JSON of nodes by root and key; None: the node is gone."""


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def write_nodes(changes: TreeChanges, decode: Decode) -> NodePieces:
    """The JSON of every node that has changed. It pauses now and then, so that other threads can go on."""
    written: NodePieces = {}
    for root, changed in changes.roots.items():
        pieces = written.setdefault(root, {})
        for number, (key, record) in enumerate(changed.nodes.items(), start=1):
            pieces[key] = None if record is None else _write_node(record, decode, changes.wall_offset)
            if number % PAUSE_NODES == 0:
                time.sleep(PAUSE_S)
    return written


def _write_node(record: NodeRecord, decode: Decode, wall_offset: float) -> str:
    text = decode(cut(record.edge, 0, TEXT_TOKENS))
    is_cut = record.end - record.start > TEXT_TOKENS or len(text) > TEXT_CHARACTERS
    return to_json(
        {
            "node": record.key,
            "parent": record.parent,
            "start": record.start,
            "end": record.end,
            "text": text[:TEXT_CHARACTERS],
            **({"is_cut": True} if is_cut else {}),
            "bytes": record.nbytes,
            "pages": record.num_pages,
            "tiers": {tier.name.lower(): record.tiers[tier] for tier in Tier if record.tiers[tier]},
            "points": record.points,
            "kept": record.kept,
            "in_use": record.is_pinned,
            "hits": record.hits,
            "last_used": round(record.last_used + wall_offset, 3) if record.last_used else None,
        }
    )


def usage_of(progress: RequestProgress) -> Usage:
    """What a request has reused and computed so far, or in all if it has ended."""
    record = progress.record
    return progress.usage if record is None or record.usage is None else record.usage


def describe_request(progress: RequestProgress, seen: Seen, reason: str, now: float) -> dict[str, Any]:
    """A request as it is now."""
    record, usage = progress.record, usage_of(progress)
    prompt_tokens = usage.prompt_tokens or len(progress.prompt_ids)
    first_s = max(0.0, progress.first_s - progress.waited_s) if progress.first_s else None
    described = {
        "id": progress.request_id,
        "model": progress.model,
        "root": progress.root,
        "state": _state_of(progress, seen),
        "prompt_tokens": prompt_tokens,
        "matched_tokens": usage.matched_tokens,
        "cached_tokens": usage.cached_tokens,
        "done_tokens": max(progress.done_tokens, usage.cached_tokens if progress.has_lane else 0),
        "completion_tokens": progress.num_generated,
        "node": seen.place.node,
        "offset": seen.place.offset,
        "queue_s": round(progress.waited_s, 4),
        "first_token_s": _rounded(first_s),
        "total_s": round(record.total_s if record is not None else now - progress.opened_s, 4),
        "host_bytes": record.host_bytes if record is not None else 0,
        "disk_bytes": record.disk_bytes if record is not None else 0,
        "store_bytes": record.store_bytes if record is not None else 0,
        "recomputed_tokens": record.recomputed_tokens if record is not None else 0,
        "without_s": _rounded(first_s + seen.reused_s if first_s is not None and seen.reused_s is not None else None),
        "reason": reason,
    }
    return described | ({"error": record.error} if record is not None and record.error else {})


def _state_of(progress: RequestProgress, seen: Seen) -> str:
    if progress.end is not None:
        return progress.end
    if not progress.has_lane:
        return "waiting"
    if seen.is_loading or (progress.request is not None and progress.request.is_loading):
        return "loading"
    return "answering" if progress.num_generated else "computing"


def explain_request(progress: RequestProgress, *, is_enabled: bool, decode: Decode) -> str:
    """Why a request reuses so much and not more, in words; "" while it waits for a lane."""
    if not progress.has_lane:
        return ""
    usage, ids = usage_of(progress), progress.prompt_ids
    total = usage.prompt_tokens or len(ids)
    reason = explain_reuse(total, usage.matched_tokens, usage.cached_tokens, is_enabled=is_enabled)
    if usage.matched_tokens >= total:
        return reason
    goes_on = decode(pack(ids[usage.matched_tokens : usage.matched_tokens + _AROUND]))
    return f"{reason}; it goes on there with {goes_on!r}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def describe_figures(
    model: str, snapshot: Mapping[str, Any], totals: Totals, prefill_tokens_per_s: float | None
) -> dict[str, Any]:
    """The figures of a whole model, for those who see all."""
    tiers = {"device": {"bytes": snapshot["used_bytes"], "budget_bytes": snapshot["budget_bytes"]}}
    for tier in ("host", "disk"):
        if f"{tier}_bytes" in snapshot:
            tiers[tier] = {"bytes": snapshot[f"{tier}_bytes"], "budget_bytes": snapshot[f"{tier}_budget_bytes"]}
    names = ("lane_bytes", "lanes", "busy_lanes", "queue", "running", "evicted_tokens")
    counts = {name: snapshot[name] for name in ("nodes", "tokens")}
    rest = {name: snapshot[name] for name in names}
    return {"model": model, **counts, "tiers": tiers, **rest, **_write_totals(totals, prefill_tokens_per_s)}


def describe_own_figures(
    model: str, stats: Mapping[str, int], totals: Totals, prefill_tokens_per_s: float | None
) -> dict[str, Any]:
    """The figures of one salt, for those who see nothing else."""
    tiers = {"device": {"bytes": stats["tree_bytes"]}}
    counts = {name: stats[name] for name in ("nodes", "tokens")}
    return {"model": model, **counts, "tiers": tiers, **_write_totals(totals, prefill_tokens_per_s)}


def _write_totals(totals: Totals, prefill_tokens_per_s: float | None) -> dict[str, Any]:
    rate = None if prefill_tokens_per_s is None else round(prefill_tokens_per_s, 1)
    return {**vars(totals), "prefill_tokens_per_s": rate}
