"""The choice of a replica: a pure function of what is known of each. The one that answers soonest takes the request.

The predicted time to the first token is the work that waits there, loading what lies below the device, and computing the
rest. Each replica loads or recomputes, whichever is sooner, as it will decide itself. Predictions that differ by little are
ties, and are spread by a random number that the caller passes in.

A page may be coming: another request with the same prefix was just sent to a replica, and is computing it. Its work counts
as waiting there. So a follower joins its leader until that replica's queue costs more than computing the prefix elsewhere.
Then it goes elsewhere; and if a shared store can bring the prefix there sooner than computing it, `copied` tells how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bough.cache.tree.state import Tier
from bough.routing.index import COMING, Run
from bough.routing.rates import ReplicaRates

TIE_SHARE = 0.01
TIE_S = 1e-4
"""Predictions that are at most so much larger than the smallest are ties."""

_STANDS = 4
_TIERS = 3  # the bits of a code that tell the tier


@dataclass(slots=True)
class Candidate:
    """What is known of one replica for one request: the work that waits there, and the runs of pages it holds."""

    replica: str
    rates: ReplicaRates
    waiting_s: float = 0.0
    runs: Sequence[Run] = ()


@dataclass(slots=True)
class Prediction:
    """The time to the first token at one replica, in its parts.

    `matched` are the tokens known there by tier; `coming` those that an earlier request will have computed. `depth` tokens
    are reused, after `load_bytes` were loaded; `copied` of them come from the store.
    """

    replica: str
    waiting_s: float
    load_s: float
    compute_s: float
    total_s: float
    depth: int = 0
    load_bytes: int = 0
    coming: int = 0
    copied: int = 0
    matched: dict[Tier, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """The numbers with plain names, for logs and `explain`."""
        tiers = {f"{tier.name.lower()}_tokens": self.matched.get(tier, 0) for tier in Tier}
        parts = {"waiting_s": self.waiting_s, "load_s": self.load_s, "compute_s": self.compute_s, "total_s": self.total_s}
        return {"replica": self.replica, **tiers, "coming_tokens": self.coming, "copied_tokens": self.copied, **parts}


@dataclass(slots=True)
class Choice:
    """The chosen replica's prediction, and how many others were as good."""

    best: Prediction
    num_ties: int
    _predict: Callable[[], list[Prediction]]

    @property
    def replica(self) -> str:
        return self.best.replica

    @property
    def copy_first(self) -> bool:
        """Whether the store should be used to bring a prefix to the chosen replica."""
        return self.best.copied > 0

    def predictions(self) -> list[Prediction]:
        """The predictions for all candidates, in their order. Made when they are asked for: a choice needs few of them."""
        return self._predict()


def choose(
    num_tokens: int, page_tokens: int, candidates: Sequence[Candidate], uniform: float, store_byte_s: float | None = None
) -> Choice:
    """Choose the replica for a prompt of so many tokens. `uniform` in [0, 1) decides between ties.

    `store_byte_s` is what a byte from the store that all replicas share takes; None: there is none. Costs O(candidates).
    """
    assert candidates and num_tokens > 0

    def predict_all() -> list[Prediction]:
        predictions = [_predict(num_tokens, page_tokens, each) for each in candidates]
        if store_byte_s is not None:
            _copy_where_sooner(num_tokens, candidates, predictions, store_byte_s)
        return predictions

    if store_byte_s is not None and any(each.runs for each in candidates):
        predictions = predict_all()
        totals = [each.total_s for each in predictions]
        ties = _ties(totals)
        return Choice(predictions[ties[int(uniform * len(ties))]], len(ties), lambda: predictions)
    totals = [_total_s(num_tokens, page_tokens, each) for each in candidates]
    ties = _ties(totals)
    return Choice(_predict(num_tokens, page_tokens, candidates[ties[int(uniform * len(ties))]]), len(ties), predict_all)


def _ties(totals: Sequence[float]) -> list[int]:
    limit = min(totals) * (1 + TIE_SHARE) + TIE_S
    return [number for number, total in enumerate(totals) if total <= limit]


def _total_s(num_tokens: int, page_tokens: int, candidate: Candidate) -> float:
    if candidate.runs:
        return _predict(num_tokens, page_tokens, candidate).total_s
    return candidate.waiting_s + candidate.rates.prefill_to_s(num_tokens)


def _predict(num_tokens: int, page_tokens: int, candidate: Candidate) -> Prediction:
    """Compute everything; or stand at the end of a run that can be restored, if that is sooner. The deeper of equals."""
    rates, waiting_s = candidate.rates, candidate.waiting_s
    compute_s = everything_s = rates.prefill_to_s(num_tokens)
    best = Prediction(candidate.replica, waiting_s, 0.0, compute_s, waiting_s + compute_s)
    if not candidate.runs:
        return best
    start, load_s, load_bytes, coming = 0, 0.0, 0, 0
    matched: dict[Tier, int] = {}
    for run in candidate.runs:
        end = min(run.end * page_tokens, num_tokens - 1)  # at least one token is computed
        tokens = end - start
        start = end
        if run.code == COMING:
            coming += tokens
        else:
            tier = _TIER_OF[run.code & _TIERS]
            matched[tier] = matched.get(tier, 0) + tokens
            if tier is not Tier.DEVICE:
                load_s += rates.load_s(tier, tokens)
                load_bytes += tokens * rates.bytes_per_token
            if not run.code & _STANDS:
                continue
        compute_s = everything_s - rates.prefill_to_s(end)
        total_s = waiting_s + load_s + compute_s
        if total_s <= best.total_s:
            best = Prediction(candidate.replica, waiting_s, load_s, compute_s, total_s, end, load_bytes)
    best.matched, best.coming = matched, coming
    return best


_TIER_OF = {1 + tier: tier for tier in Tier}


def _copy_where_sooner(
    num_tokens: int, candidates: Sequence[Candidate], predictions: list[Prediction], store_byte_s: float
) -> None:
    """Let the store bring what another replica holds, or will have computed, where that is sooner than computing it.

    What is coming can be copied when the work that waits at its replica is done.
    """
    held = max(predictions, key=_held_tokens)
    later = max(predictions, key=lambda each: (_held_tokens(each) + each.coming, -each.waiting_s))
    sources = [(_held_tokens(held), 0.0), (_held_tokens(later) + later.coming, later.waiting_s)]
    for number, each in enumerate(predictions):
        rates = candidates[number].rates
        for depth, ready_s in sources:
            copied = depth - each.depth
            if copied <= 0:
                continue
            waiting_s = max(each.waiting_s, ready_s)
            load_s = each.load_s + copied * rates.bytes_per_token * store_byte_s
            compute_s = rates.prefill_s(depth, num_tokens)
            if (total_s := waiting_s + load_s + compute_s) < predictions[number].total_s:
                predictions[number] = Prediction(
                    each.replica,
                    waiting_s,
                    load_s,
                    compute_s,
                    total_s,
                    depth,
                    each.load_bytes + copied * rates.bytes_per_token,
                    each.coming,
                    copied,
                    each.matched,
                )


def _held_tokens(prediction: Prediction) -> int:
    return sum(prediction.matched.values())
