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

from bough.routing.copying import copy_where_sooner
from bough.routing.prediction import Candidate, Copy, Prediction, predict, predict_cost_s

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
    can_copy = any(each.rates.store_page_tokens for each in candidates) and any(each.runs for each in candidates)

    def predict_all() -> list[Prediction]:
        predictions = [predict(num_tokens, page_tokens, each, price) for each in candidates]
        if can_copy:
            copy_where_sooner(num_tokens, page_tokens, candidates, predictions, price)
        return predictions

    if can_copy:
        predictions = predict_all()
        ties = _ties([each.cost_s for each in predictions])
        return Choice(predictions[ties[int(uniform * len(ties))]], len(ties), lambda: predictions)
    ties = _ties([predict_cost_s(num_tokens, page_tokens, each, price) for each in candidates])
    best = predict(num_tokens, page_tokens, candidates[ties[int(uniform * len(ties))]], price)
    return Choice(best, len(ties), predict_all)


def _ties(costs: Sequence[float]) -> list[int]:
    limit = min(costs) * (1 + TIE_SHARE) + TIE_S
    return [number for number, cost in enumerate(costs) if cost <= limit]
