"""A look at the tree of one model: what has changed in it, and how far requests reach into it.

What goes in and what comes out is plain data. The part that touches the tree is done in steps on the engine's thread. It
costs what has changed, and a match for each request that is looked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bough.cache.admin.stats import salt_stats
from bough.cache.admin.watch import Place, TreeChanges, TreeWatch, locate
from bough.cache.prefix_cache import PrefixCache
from bough.cache.steps import Steps

TEXT_TOKENS = 128
"""So many tokens of an edge are shown. A look from elsewhere has no more of them."""

_RATE_TOKENS = 1024
_NOWHERE = Place(None, 0)


@dataclass(frozen=True)
class Sought:
    """A request to be looked for: its packed tokens as far as they are known, and how many of them it has reused.

    No two requests of a watch have the same `number`. Over replicas, `replica` is the one that has it, and `request_id` its
    id there; "" when it has ended.
    """

    number: int
    packed: bytes
    salt: str
    cached_tokens: int = 0
    replica: str = ""
    request_id: str = ""


@dataclass(frozen=True)
class Seen:
    """One request in the tree: how far its tokens reach, and an estimate.

    `reused_s` is what computing the tokens that it has reused would have taken; None if nothing was measured yet.
    `is_loading` says that it still reads from disk at its replica; a request of this process knows that itself.
    """

    place: Place = _NOWHERE
    reused_s: float | None = None
    is_loading: bool = False


@dataclass(frozen=True)
class Look:
    """What one look has found. `seen` are requests by their numbers; one that is missing could not be looked for.

    `stats` are those of the salts that were asked for.
    """

    changes: TreeChanges
    seen: Mapping[int, Seen]
    stats: Mapping[str, Mapping[str, int]]
    prefill_tokens_per_s: float | None


def look(cache: PrefixCache, watch: TreeWatch, sought: Sequence[Sought], salts: Collection[str]) -> Steps[Look]:
    """Look at a tree and at requests. Runs on the engine's thread."""
    changes = yield from watch.look(salts)
    places = locate(cache, [(each.packed, each.salt) for each in sought])
    prefill_s = cache.residency.loader.rates.prefill_s
    rate_s = prefill_s(0, _RATE_TOKENS)
    return Look(
        changes,
        {each.number: Seen(place, prefill_s(0, each.cached_tokens)) for each, place in zip(sought, places, strict=True)},
        {salt: salt_stats(cache.forest, salt) for salt in salts},
        _RATE_TOKENS / rate_s if rate_s else None,
    )
