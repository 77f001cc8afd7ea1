"""The choice of a replica: the one with the lowest predicted cost. A pure function of what is known of each replica.

The time to the first token at a replica is the work that waits there, loading what is below the device tier, and computing
the rest. Where loading is slower than computing, the prediction recomputes, as the replica will. The cost adds a share of
the request's own work, because the next requests wait for it; the share is larger when more replicas are busy. So of two
replicas that answer nearly at the same time, the one with less to compute is chosen. Costs that differ by little are ties;
a number that is passed in decides.

A page may be coming: another request with the same prefix was just sent to a replica, and is computing it. Its work counts
as waiting there. A follower joins its leader until that replica's queue costs more than computing the prefix elsewhere.
Then it goes elsewhere. A replica sends whole pages to the shared store as it computes them, so the store can copy a prefix
that another replica holds at once, and one that is being computed when the work that waits at its replica is done: if that
is sooner than computing it, it is copied first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bough.cache.tree.state import Tier
from bough.routing.index import COMING, Run
from bough.routing.page_reports import STANDS, TIER_BITS, TIERS
from bough.routing.rates import ReplicaRates

LEAST_PRICE = 0.1
"""The least that a second of a replica's work adds to the cost: even if all replicas are idle, a follower waits for its
leader rather than compute the same again."""

TIE_SHARE = 0.01
TIE_S = 1e-4
"""Costs that exceed the smallest by at most this share and these seconds are ties."""

_TIER_OF = {1 + tier: tier for tier in TIERS}


@dataclass(slots=True)
class ReplicaCandidate:
    """One replica as seen by one request: the work that waits there, and the runs of the prompt's pages it holds."""

    replica: str
    rates: ReplicaRates
    waiting_s: float = 0.0
    runs: Sequence[Run] = ()


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A replica that has a prefix of `depth` tokens after `ready_s`, computed under its `fingerprint`."""

    replica: str
    fingerprint: str
    depth: int
    ready_s: float = 0.0
    is_coming: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """A prefix that the store copies from the replica `source`, which is still computing it if it `is_coming`.

    Waiting longer than `within_s` takes more time than computing it. The first `held` tokens are there already.
    """

    source: str
    num_tokens: int
    within_s: float
    is_coming: bool = False
    held: int = 0


@dataclass(slots=True)
class Prediction:
    """The time to the first token at one replica. `depth` tokens are reused; with a `copy`, some come from the store."""

    replica: str
    waiting_s: float
    load_s: float
    compute_s: float
    depth: int = 0
    copy: Copy | None = None

    @property
    def total_s(self) -> float:
        return self.waiting_s + self.load_s + self.compute_s


def choose(num_tokens: int, page_tokens: int, candidates: Sequence[ReplicaCandidate], uniform: float) -> Prediction:
    """Choose the replica for a prompt of `num_tokens`. `uniform` in [0, 1) decides between ties. O(candidates)."""
    assert candidates and num_tokens > 0
    price = max(LEAST_PRICE, sum([each.waiting_s > 0 for each in candidates]) / len(candidates))
    sources = _find_sources(candidates, page_tokens)
    predicted = [predict(num_tokens, page_tokens, each, sources) for each in candidates]
    costs = [each.total_s + price * (each.load_s + each.compute_s) for each in predicted]
    limit = min(costs) * (1 + TIE_SHARE) + TIE_S
    ties = [each for each, cost in zip(predicted, costs, strict=True) if cost <= limit]
    return ties[int(uniform * len(ties))]


def _find_sources(candidates: Sequence[ReplicaCandidate], page_tokens: int) -> list[PrefixSource]:
    """The longest prefix that a replica holds, and the longest that one will have computed. None without a store."""
    if not any(each.rates.store_page_tokens for each in candidates) or not any(each.runs for each in candidates):
        return []
    reaches = [_reach(each, page_tokens) for each in candidates]
    numbers = range(len(candidates))
    held = max(numbers, key=lambda number: reaches[number][0])
    later = max(numbers, key=lambda number: (reaches[number][1], -candidates[number].waiting_s))
    holder, leader = candidates[held], candidates[later]
    depth, later_depth = reaches[held][0], reaches[later][1]
    sources = [PrefixSource(holder.replica, holder.rates.fingerprint, depth)]
    if later_depth > depth:
        fingerprint = leader.rates.fingerprint
        sources.append(PrefixSource(leader.replica, fingerprint, later_depth, leader.waiting_s, is_coming=True))
    return sources


def _reach(candidate: ReplicaCandidate, page_tokens: int) -> tuple[int, int]:
    """How many tokens of the prompt a replica has and can restore, and how many with those that are coming."""
    held = later = 0
    for run in candidate.runs:
        if run.code == COMING:
            later = run.end
        elif run.code & STANDS:
            held = later = run.end
    return held * page_tokens, later * page_tokens


def predict(
    num_tokens: int, page_tokens: int, candidate: ReplicaCandidate, sources: Sequence[PrefixSource] = ()
) -> Prediction:
    """Predict the least time: compute everything, reuse up to the end of some run, or have the store copy a prefix."""
    alone = _predict_alone(num_tokens, page_tokens, candidate)
    return _predict_copied(num_tokens, candidate, alone, sources) if sources else alone


def _predict_alone(num_tokens: int, page_tokens: int, candidate: ReplicaCandidate) -> Prediction:
    """The least time without a copy. Of equals it is the one that reuses most."""
    rates, load_s, start = candidate.rates, 0.0, 0
    everything_s = least_s = rates.prefill_to_s(num_tokens)
    best = Prediction(candidate.replica, candidate.waiting_s, 0.0, everything_s)
    for run in candidate.runs:
        end = min(run.end * page_tokens, num_tokens - 1)  # at least one token is computed
        if run.code != COMING:
            tier = _TIER_OF[run.code & TIER_BITS]
            if tier is not Tier.DEVICE:
                load_s += rates.load_s(tier, end - start)
            if not run.code & STANDS:
                start = end
                continue
        start = end
        compute_s = everything_s - rates.prefill_to_s(end)
        if load_s + compute_s <= least_s:
            least_s = load_s + compute_s
            best.load_s, best.compute_s, best.depth = load_s, compute_s, end
    return best


def _predict_copied(
    num_tokens: int, candidate: ReplicaCandidate, alone: Prediction, sources: Sequence[PrefixSource]
) -> Prediction:
    """The least time with a copied prefix that is longer than what is reused `alone`; or else that prediction.

    The store has whole pages only, and only those of the same weights and code can be used.
    """
    rates, best = candidate.rates, alone
    page_tokens = rates.store_page_tokens
    for source in sources:
        if not page_tokens or source.replica == candidate.replica or source.fingerprint != rates.fingerprint:
            continue
        end = min(source.depth, num_tokens - 1) // page_tokens * page_tokens
        if end <= alone.depth:
            continue
        waiting_s = max(candidate.waiting_s, source.ready_s)
        load_s, compute_s = alone.load_s + rates.load_s(Tier.STORE, end - alone.depth), rates.prefill_s(end, num_tokens)
        if waiting_s + load_s + compute_s < best.total_s:
            copy = Copy(source.replica, end, alone.total_s - load_s - compute_s, source.is_coming, alone.depth)
            best = Prediction(candidate.replica, waiting_s, load_s, compute_s, end, copy)
    return best
