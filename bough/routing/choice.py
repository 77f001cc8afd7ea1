"""The choice of a replica: a pure function of what is known of each. The one that costs least takes the request.

Costs are those of `prediction`. A second of a request's own work counts the more the more replicas are busy: so of two
replicas that answer nearly at the same time, the one with less to compute is chosen. Costs that differ by little are ties,
and are spread by a number that is passed in.

A page may be coming: another request with the same prefix was just sent to a replica, and is computing it. Its work counts
as waiting there. A follower joins its leader until that replica's queue costs more than computing the prefix elsewhere.
Then it goes elsewhere; and if a shared store can bring the prefix there sooner than computing it, it is copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bough.routing.copying import Source, copy_if_sooner, find_sources, work_with_copy
from bough.routing.prediction import Candidate, Copy, Prediction, least_work, predict

LEAST_PRICE = 0.1
"""What a second of a replica's work counts at least besides the time that the request itself takes: also while all replicas
are idle, a follower rather waits for its leader than computes the same again."""

TIE_SHARE = 0.01
TIE_S = 1e-4
"""Costs that are at most so much larger than the smallest are ties."""


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
    def copy(self) -> Copy | None:
        """What the store should bring to the chosen replica first."""
        return self.best.copy

    def predictions(self) -> list[Prediction]:
        """The predictions for all candidates, in their order. Made when they are asked for: a choice needs few of them."""
        return self._predict()


def choose(num_tokens: int, page_tokens: int, candidates: Sequence[Candidate], uniform: float) -> Choice:
    """Choose the replica for a prompt of so many tokens. `uniform` in [0, 1) decides between ties. O(candidates)."""
    assert candidates and num_tokens > 0
    price = max(LEAST_PRICE, sum([each.waiting_s > 0 for each in candidates]) / len(candidates))
    sources = find_sources(candidates, page_tokens)

    def predict_one(candidate: Candidate) -> Prediction:
        return copy_if_sooner(num_tokens, candidate, predict(num_tokens, page_tokens, candidate, price), sources, price)

    ties = _ties([_cost_s(num_tokens, page_tokens, each, sources, price) for each in candidates])
    best = predict_one(candidates[ties[int(uniform * len(ties))]])
    return Choice(best, len(ties), lambda: [predict_one(each) for each in candidates])


def _cost_s(num_tokens: int, page_tokens: int, candidate: Candidate, sources: Sequence[Source], price: float) -> float:
    """The cost of a prediction, without making it."""
    load_s, compute_s, depth = least_work(num_tokens, page_tokens, candidate)
    least_s, cost_s = candidate.waiting_s + load_s + compute_s, candidate.waiting_s + (1 + price) * (load_s + compute_s)
    for source in sources:
        found = work_with_copy(num_tokens, candidate, load_s, depth, source)
        if found is not None and (total_s := found[0] + found[1] + found[2]) < least_s:
            least_s, cost_s = total_s, total_s + price * (found[1] + found[2])
    return cost_s


def _ties(costs: Sequence[float]) -> list[int]:
    limit = min(costs) * (1 + TIE_SHARE) + TIE_S
    return [number for number, cost in enumerate(costs) if cost <= limit]
