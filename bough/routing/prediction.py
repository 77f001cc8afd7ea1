"""The prediction for one replica: when a request would have its first token there.

The time is the work that waits there, loading what lies below the device, and computing the rest. A replica loads or
recomputes, whichever is sooner, as it will decide itself. The cost is that time, and a share of the request's own work once
more, because whoever comes next waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bough.cache.tree.state import Tier
from bough.routing.index import COMING, Run
from bough.routing.messages import TIERS
from bough.routing.rates import ReplicaRates

_STANDS = 4
_TIERS = 3  # the bits of a code that tell the tier
_TIER_OF = {1 + tier: tier for tier in TIERS}


@dataclass(slots=True)
class Candidate:
    """What is known of one replica for one request: the work that waits there, and the runs of pages it holds."""

    replica: str
    rates: ReplicaRates
    waiting_s: float = 0.0
    runs: Sequence[Run] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """A prefix to be brought by the store from the replica `source`, which holds it, or is computing it if it `is_coming`.

    Waiting longer than `within_s` for it would take more time than computing it. The first `held` tokens are there already.
    """

    source: str
    num_tokens: int
    within_s: float
    is_coming: bool = False
    held: int = 0


@dataclass(slots=True)
class Prediction:
    """The time to the first token at one replica, in its parts.

    `matched` are the tokens known there by tier; `coming` those that an earlier request will have computed. `depth` tokens
    are reused, after `load_bytes` were loaded; some come from the store if there is a `copy`. The choice goes by `cost_s`.
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
    matched: dict[Tier, int] = field(default_factory=dict)
    copy: Copy | None = None

    def as_dict(self) -> dict[str, object]:
        """The numbers with plain names, for logs and `explain`."""
        tiers = {f"{tier.name.lower()}_tokens": self.matched.get(tier, 0) for tier in TIERS}
        parts = {name: getattr(self, name) for name in ("waiting_s", "load_s", "compute_s", "total_s", "cost_s")}
        copied = 0 if self.copy is None else self.copy.num_tokens
        return {"replica": self.replica, **tiers, "coming_tokens": self.coming, "copied_tokens": copied, **parts}


def least_work(num_tokens: int, page_tokens: int, candidate: Candidate) -> tuple[float, float, int]:
    """The least work of a prediction, without making that: seconds to load and to compute, and the depth."""
    rates, load_s, start = candidate.rates, 0.0, 0
    everything_s = least_s = rates.prefill_to_s(num_tokens)
    found = 0.0, everything_s, 0
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
        compute_s = everything_s - rates.prefill_to_s(end)
        if load_s + compute_s < least_s:
            least_s = load_s + compute_s
            found = load_s, compute_s, end
    return found


def predict(num_tokens: int, page_tokens: int, candidate: Candidate, price: float) -> Prediction:
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


def reach(candidate: Candidate, page_tokens: int) -> tuple[int, int]:
    """How many tokens from the start on a replica has and can restore; and how many with those that are coming."""
    held = later = 0
    for run in candidate.runs:
        if run.code == COMING:
            later = run.end
        elif run.code & _STANDS:
            held = later = run.end
    return held * page_tokens, later * page_tokens
