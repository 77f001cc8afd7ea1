"""The choice of a replica: a pure function of what is known of each. The one that costs least takes the request.

The predicted time to the first token is the work that waits there, loading what lies below the device, and computing the
rest. Each replica loads or recomputes, whichever is sooner, as it will decide itself. The cost is that time, and a share of
the request's own work once more, because whoever comes next waits for it: the share of replicas that are busy. So of two
replicas that answer nearly at the same time, the one with less to compute is chosen. Costs that differ by little are ties,
and are spread by a number that is passed in.

A page may be coming: another request with the same prefix was just sent to a replica, and is computing it. Its work counts
as waiting there. A follower joins its leader until that replica's queue costs more than computing the prefix elsewhere.
Then it goes elsewhere; and if a shared store can bring the prefix there sooner than computing it, `copied` tells how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bough.cache.tree.state import Tier
from bough.routing.index import COMING, Run
from bough.routing.messages import TIERS
from bough.routing.rates import ReplicaRates

LEAST_PRICE = 0.1
"""What a second of a replica's work counts at least besides the time that the request itself takes: also while all replicas
are idle, a follower rather waits for its leader than computes the same again."""

TIE_SHARE = 0.01
TIE_S = 1e-4
"""Costs that are at most so much larger than the smallest are ties."""

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
    are reused, after `load_bytes` were loaded; `copied` of them come from the store. The choice goes by `cost_s`.
    """

    replica: str
    waiting_s: float
    load_s: float
    compute_s: float
    total_s: float
    cost_s: float = 0.0
    depth: int = 0
    load_bytes: int = 0
    coming: int = 0
    copied: int = 0
    matched: dict[Tier, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """The numbers with plain names, for logs and `explain`."""
        tiers = {f"{tier.name.lower()}_tokens": self.matched.get(tier, 0) for tier in TIERS}
        parts = {name: getattr(self, name) for name in ("waiting_s", "load_s", "compute_s", "total_s", "cost_s")}
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
    price = max(LEAST_PRICE, sum([each.waiting_s > 0 for each in candidates]) / len(candidates))

    def predict_all() -> list[Prediction]:
        predictions = [_predict(num_tokens, page_tokens, each, price) for each in candidates]
        if store_byte_s is not None:
            _copy_where_sooner(num_tokens, candidates, predictions, store_byte_s, price)
        return predictions

    if store_byte_s is not None and any(each.runs for each in candidates):
        predictions = predict_all()
        ties = _ties([each.cost_s for each in predictions])
        return Choice(predictions[ties[int(uniform * len(ties))]], len(ties), lambda: predictions)
    ties = _ties([_cost_s(num_tokens, page_tokens, each, price) for each in candidates])
    best = _predict(num_tokens, page_tokens, candidates[ties[int(uniform * len(ties))]], price)
    return Choice(best, len(ties), predict_all)


def _ties(costs: Sequence[float]) -> list[int]:
    limit = min(costs) * (1 + TIE_SHARE) + TIE_S
    return [number for number, cost in enumerate(costs) if cost <= limit]


def _cost_s(num_tokens: int, page_tokens: int, candidate: Candidate, price: float) -> float:
    """The cost of the prediction, without making it."""
    rates, load_s, start = candidate.rates, 0.0, 0
    everything_s = least_s = rates.prefill_to_s(num_tokens)
    for run in candidate.runs:
        end = min(run.end * page_tokens, num_tokens - 1)
        if run.code != COMING:
            tier = _TIER_OF[run.code & _TIERS]
            if tier is not Tier.DEVICE:
                load_s += rates.load_s(tier, end - start)
            if not run.code & _STANDS:
                start = end
                continue
        start = end
        work_s = load_s + everything_s - rates.prefill_to_s(end)
        if work_s < least_s:
            least_s = work_s
    return candidate.waiting_s + (1 + price) * least_s


def _predict(num_tokens: int, page_tokens: int, candidate: Candidate, price: float) -> Prediction:
    """Compute everything; or stand at the end of a run that can be restored, if that is sooner. The deeper of equals."""
    rates, waiting_s = candidate.rates, candidate.waiting_s
    compute_s = everything_s = rates.prefill_to_s(num_tokens)
    best = Prediction(candidate.replica, waiting_s, 0.0, compute_s, waiting_s + compute_s)
    best.cost_s = waiting_s + (1 + price) * compute_s
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
            cost_s = total_s + price * (load_s + compute_s)
            best = Prediction(candidate.replica, waiting_s, load_s, compute_s, total_s, cost_s, end, load_bytes)
    best.matched, best.coming = matched, coming
    return best


_TIER_OF = {1 + tier: tier for tier in TIERS}


def _copy_where_sooner(
    num_tokens: int, candidates: Sequence[Candidate], predictions: list[Prediction], store_byte_s: float, price: float
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
                    total_s + price * (load_s + compute_s),
                    depth,
                    each.load_bytes + copied * rates.bytes_per_token,
                    each.coming,
                    copied,
                    each.matched,
                )


def _held_tokens(prediction: Prediction) -> int:
    return sum(prediction.matched.values())
