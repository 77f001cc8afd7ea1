"""Copying: the store that all replicas share brings a prefix to a replica that lacks it, where that is sooner.

A replica sends whole pages to the store as it computes them. So what one holds can be had at once, and what is coming when
the work that waits at its replica is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bough.cache.tree.state import Tier
from bough.routing.prediction import Candidate, Copy, Prediction, reach


def copy_where_sooner(
    num_tokens: int, page_tokens: int, candidates: Sequence[Candidate], predictions: list[Prediction], price: float
) -> None:
    """Replace predictions of replicas that have their first token sooner if the store brings them a prefix."""
    reaches = [reach(each, page_tokens) for each in candidates]
    numbers = range(len(candidates))
    held = max(numbers, key=lambda number: reaches[number][0])
    later = max(numbers, key=lambda number: (reaches[number][1], -candidates[number].waiting_s))
    sources = [
        _Source(candidates[held].replica, reaches[held][0]),
        _Source(candidates[later].replica, reaches[later][1], candidates[later].waiting_s, is_coming=True),
    ]
    for number, candidate in enumerate(candidates):
        if candidate.rates.store_page_tokens:
            copied = [_copy(num_tokens, candidate, predictions[number], source, price) for source in sources]
            predictions[number] = min([predictions[number], *filter(None, copied)], key=lambda each: each.total_s)


@dataclass(frozen=True, slots=True)
class _Source:
    """A replica that has a prefix of `depth` tokens after so many seconds."""

    replica: str
    depth: int
    ready_s: float = 0.0
    is_coming: bool = False


def _copy(num_tokens: int, candidate: Candidate, alone: Prediction, source: _Source, price: float) -> Prediction | None:
    """The prediction with a prefix from a source; None if that brings nothing more. The store has whole pages only."""
    rates = candidate.rates
    depth = min(source.depth, num_tokens - 1) // rates.store_page_tokens * rates.store_page_tokens
    if depth <= alone.depth or source.replica == candidate.replica:
        return None
    waiting_s = max(alone.waiting_s, source.ready_s)
    load_s = alone.load_s + rates.load_s(Tier.STORE, depth - alone.depth)
    compute_s = rates.prefill_s(depth, num_tokens)
    total_s = waiting_s + load_s + compute_s
    return Prediction(
        alone.replica,
        waiting_s,
        load_s,
        compute_s,
        total_s,
        total_s + price * (load_s + compute_s),
        depth,
        alone.load_bytes + (depth - alone.depth) * rates.bytes_per_token,
        alone.coming,
        alone.matched,
        Copy(source.replica, depth, alone.total_s - load_s - compute_s, source.is_coming, alone.depth),
    )
