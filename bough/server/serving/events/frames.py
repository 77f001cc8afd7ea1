"""Events as JSON: nodes, requests and figures.

Nodes are written in a thread, because decoding their texts takes time; each record is written once for all readers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bough.cache.admin.view import PAUSE_NODES, PAUSE_S, explain_reuse
from bough.cache.admin.watch import TreeChanges
from bough.cache.residency.census import NodeRecord
from bough.cache.tree.state import Tier
from bough.server.serving.events.messages import EdgeMessage
from bough.server.serving.loaded.progress import RequestProgress, Totals
from bough.server.serving.model.contract import TEXT_TOKENS, RequestPosition
from bough.tokens import cut
from bough.types import Usage

TEXT_CHARACTERS = 200  # the start of a long edge that is shown; `/api/cache/nodes` has all of it

_AROUND = 12  # tokens that are shown behind the point where a prompt leaves the tree

_OF_MODELS = ("lane_bytes", "lanes", "busy_lanes", "queue", "running", "evicted_tokens")
_RECORDED = ("host_bytes", "disk_bytes", "store_bytes", "recomputed_tokens")  # 0 until a request has ended

Decode = Callable[[bytes], str]
FindMessages = Callable[[bytes], Sequence[EdgeMessage]]
NodePieces = dict[str, dict[int, str | None]]
"""The JSON of nodes by root and key; None: the node is gone."""


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def write_nodes(changes: TreeChanges, decode: Decode, find_messages: FindMessages) -> NodePieces:
    """The JSON of every changed node. It pauses now and then for other threads."""
    written: NodePieces = {}
    for root, changed in changes.roots.items():
        pieces = written.setdefault(root, {})
        for number, (key, record) in enumerate(changed.nodes.items(), start=1):
            offset = changes.wall_offset
            pieces[key] = None if record is None else _write_node(record, decode, find_messages, offset)
            if number % PAUSE_NODES == 0:
                time.sleep(PAUSE_S)
    return written


def _write_node(record: NodeRecord, decode: Decode, find_messages: FindMessages, wall_offset: float) -> str:
    text = decode(cut(record.edge, 0, TEXT_TOKENS))
    messages = [(record.start + at, role, words) for at, role, words in find_messages(record.edge)]
    is_cut = record.end - record.start > TEXT_TOKENS or len(text) > TEXT_CHARACTERS
    return to_json(
        {
            "node": record.key,
            "parent": record.parent,
            "start": record.start,
            "end": record.end,
            "text": text[:TEXT_CHARACTERS],
            **({"is_cut": True} if is_cut else {}),
            "messages": messages,
            "bytes": record.nbytes,
            "pages": record.num_pages,
            "tiers": {tier.name.lower(): record.tiers[tier] for tier in Tier if record.tiers[tier]},
            "points": record.points,
            "kept": record.kept,
            "in_use": record.is_in_use,
            "hits": record.hits,
            "last_used": round(record.last_used + wall_offset, 3) if record.last_used else None,
        }
    )


def usage_of(progress: RequestProgress) -> Usage:
    """The tokens that a request has reused and computed so far."""
    record = progress.record
    return progress.usage if record is None or record.usage is None else record.usage


def describe_request(progress: RequestProgress, seen: RequestPosition, reason: str, now: float) -> dict[str, Any]:
    record, usage = progress.record, usage_of(progress)
    prompt_tokens = usage.prompt_tokens or len(progress.prompt)
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
        **{name: getattr(record, name) if record is not None else 0 for name in _RECORDED},
        "without_s": _rounded(first_s + seen.reused_s if first_s is not None and seen.reused_s is not None else None),
        "reason": reason,
    }
    return described | ({"error": record.error} if record is not None and record.error else {})


def _state_of(progress: RequestProgress, seen: RequestPosition) -> str:
    if progress.end is not None:
        return progress.end
    if not progress.has_lane:
        return "waiting"
    if seen.is_loading or (progress.request is not None and progress.request.is_loading):
        return "loading"
    return "answering" if progress.num_generated else "computing"


def explain_request(progress: RequestProgress, *, is_enabled: bool, decode: Decode) -> str:
    """Why a request reuses no more; "" while it waits for a lane."""
    if not progress.has_lane:
        return ""
    usage, prompt = usage_of(progress), progress.prompt
    total = usage.prompt_tokens or len(prompt)
    reason = explain_reuse(total, usage.matched_tokens, usage.cached_tokens, is_enabled=is_enabled)
    if usage.matched_tokens >= total:
        return reason
    continuation = decode(prompt[usage.matched_tokens : usage.matched_tokens + _AROUND].input)
    return f"{reason}; it continues with {continuation!r}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def describe_figures(
    model: str, figures: Mapping[str, Any], totals: Totals, prefill_tokens_per_s: float | None
) -> dict[str, Any]:
    """The figures of a model, or of one salt, which has neither budgets nor lanes of its own."""
    return {
        "model": model,
        "nodes": figures["nodes"],
        "tokens": figures["tokens"],
        "tiers": _describe_tiers(figures),
        **{name: figures[name] for name in _OF_MODELS if name in figures},
        **vars(totals),
        "prefill_tokens_per_s": None if prefill_tokens_per_s is None else round(prefill_tokens_per_s, 1),
    }


def _describe_tiers(figures: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    if "budget_bytes" not in figures:
        return {"device": {"bytes": figures["tree_bytes"]}}
    tiers = {"device": {"bytes": figures["used_bytes"], "budget_bytes": figures["budget_bytes"]}}
    for tier in ("host", "disk"):
        if f"{tier}_bytes" in figures:
            tiers[tier] = {"bytes": figures[f"{tier}_bytes"], "budget_bytes": figures[f"{tier}_budget_bytes"]}
    return tiers
