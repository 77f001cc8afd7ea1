"""The rates of computing and loading that a replica has measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from bough.cache.residency.rates import BAND_TOKENS
from bough.cache.tree.state import Tier
from bough.routing.page_reports import TIERS

NOMINAL_TOKEN_S = 1e-3
"""The time of a token while no replica has measured anything: enough that a longer match wins, and equal for all."""


@dataclass(frozen=True)
class ReplicaRates:
    """Seconds a token by band of positions, seconds a byte by tier, and bytes a token. What is missing is unknown.

    A band without a measurement has the rate of the nearest one with a measurement. `store_page_tokens` is the size of a
    page in the shared store; 0: there is no store. Only replicas with the same `fingerprint` find each other's pages there.
    """

    token_s: Mapping[int, float] = field(default_factory=dict)
    byte_s: Mapping[Tier, float] = field(default_factory=dict)
    bytes_per_token: int = 0
    store_page_tokens: int = 0
    fingerprint: str = ""
    _last: int = field(init=False, repr=False, compare=False)
    _bands: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _sums: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = sorted(self.token_s)
        bands = [self.token_s[_nearest(known, band)] for band in range(known[-1] + 1)] if known else [0.0]
        object.__setattr__(self, "_last", len(bands) - 1)
        object.__setattr__(self, "_bands", tuple(bands))
        object.__setattr__(self, "_sums", tuple(accumulate((BAND_TOKENS * each for each in bands), initial=0.0)))

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds that computing tokens [start, end) takes."""
        return self.prefill_to_s(end) - self.prefill_to_s(start)

    def prefill_to_s(self, end: int) -> float:
        """Seconds that computing tokens [0, end) takes."""
        band = end // BAND_TOKENS
        if band > self._last:
            band = self._last
        return self._sums[band] + (end - band * BAND_TOKENS) * self._bands[band]

    def load_s(self, tier: Tier, num_tokens: int) -> float:
        """Seconds that loading the rows of `num_tokens` from a tier takes; 0 if that is not known."""
        return num_tokens * self.bytes_per_token * self.byte_s.get(tier, 0.0)

    def filled_from(self, others: Iterable[ReplicaRates]) -> ReplicaRates:
        """These rates, with unknown ones from the fastest of the others, or nominal if no replica has measured them."""
        others = list(others)
        token_s, byte_s = dict(self.token_s), dict(self.byte_s)
        if not token_s:
            known = [each for each in others if each.token_s]
            fastest = min(known, key=lambda each: each.token_s[min(each.token_s)], default=None)
            token_s = {0: NOMINAL_TOKEN_S} if fastest is None else dict(fastest.token_s)
        for tier in (*TIERS, Tier.STORE):
            measured = [each.byte_s[tier] for each in others if tier in each.byte_s]
            if tier not in byte_s and measured:
                byte_s[tier] = min(measured)
        largest = max((each.bytes_per_token for each in others), default=0)
        return replace(self, token_s=token_s, byte_s=byte_s, bytes_per_token=self.bytes_per_token or largest)


def _nearest(known: list[int], band: int) -> int:
    """The known band that is nearest to a band; of two the lower."""
    at = bisect_left(known, band)
    return min(known[max(0, at - 1) : at + 1], key=lambda each: (abs(each - band), each))
