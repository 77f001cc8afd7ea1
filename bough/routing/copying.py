"""Copying: the store that all replicas share brings a prefix to a replica that lacks it, where that is sooner.

A replica sends whole pages to the store as it computes them. So what one holds can be had at once, and what is coming when
the work that waits at its replica is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bough.cache.tree.state import Tier
from bough.routing.prediction import Candidate, Copy, Prediction, reach


@dataclass(frozen=True, slots=True)
class Source:
    """A replica that has a prefix of `depth` tokens after so many seconds, computed under its `fingerprint`."""

    replica: str
    fingerprint: str
    depth: int
    ready_s: float = 0.0
    is_coming: bool = False


def find_sources(candidates: Sequence[Candidate], page_tokens: int) -> list[Source]:
    """The replicas with the longest prefixes: what one has, and what one will have computed. None without a store."""
    if not any(each.rates.store_page_tokens for each in candidates) or not any(each.runs for each in candidates):
        return []
    reaches = [reach(each, page_tokens) for each in candidates]
    numbers = range(len(candidates))
    held = max(numbers, key=lambda number: reaches[number][0])
    later = max(numbers, key=lambda number: (reaches[number][1], -candidates[number].waiting_s))
    sources = [_source(candidates[held], reaches[held][0])]
    if reaches[later][1] > reaches[held][0]:
        sources.append(_source(candidates[later], reaches[later][1], candidates[later].waiting_s, is_coming=True))
    return sources


def _source(candidate: Candidate, depth: int, ready_s: float = 0.0, is_coming: bool = False) -> Source:
    return Source(candidate.replica, candidate.rates.fingerprint, depth, ready_s, is_coming)


def work_with_copy(
    num_tokens: int, candidate: Candidate, load_s: float, depth: int, source: Source
) -> tuple[float, float, float, int] | None:
    """What a prefix from a source makes of a replica's least work: seconds to wait, to load and to compute, and the depth.

    None if it brings nothing more, or if other weights or code computed it. The store has whole pages only.
    """
    rates = candidate.rates
    size = rates.store_page_tokens
    if not size or source.depth <= depth or source.replica == candidate.replica or source.fingerprint != rates.fingerprint:
        return None
    end = min(source.depth, num_tokens - 1) // size * size
    if end <= depth:
        return None
    load_s += rates.load_s(Tier.STORE, end - depth)
    return max(candidate.waiting_s, source.ready_s), load_s, rates.prefill_s(end, num_tokens), end


def copy_if_sooner(
    num_tokens: int, candidate: Candidate, alone: Prediction, sources: Sequence[Source], price: float
) -> Prediction:
    """The prediction with what a source can bring, if that is sooner than without."""
    best = alone
    for source in sources:
        found = work_with_copy(num_tokens, candidate, alone.load_s, alone.depth, source)
        if found is None or sum(found[:3]) >= best.total_s:
            continue
        waiting_s, load_s, compute_s, depth = found
        total_s = waiting_s + load_s + compute_s
        best = replace(
            alone,
            waiting_s=waiting_s,
            load_s=load_s,
            compute_s=compute_s,
            total_s=total_s,
            cost_s=total_s + price * (load_s + compute_s),
            depth=depth,
            load_bytes=alone.load_bytes + (depth - alone.depth) * candidate.rates.bytes_per_token,
            copy=Copy(source.replica, depth, alone.total_s - load_s - compute_s, source.is_coming, alone.depth),
        )
    return best
