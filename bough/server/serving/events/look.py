"""A look at one loaded model: what has changed in its tree, and how far its requests are.

The part that touches the tree is done in steps on the engine's thread. It costs what has changed, and a match for each
request that runs or has just ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from bough.cache.admin.stats import salt_stats
from bough.cache.admin.watch import Place, TreeChanges, TreeWatch, locate
from bough.cache.prefix_cache import PrefixCache
from bough.cache.steps import Steps
from bough.server.serving.progress import RequestProgress

_RATE_TOKENS = 1024


@dataclass(frozen=True)
class Seen:
    """One request in the tree: how far its tokens reach, whether it still reads from disk, and an estimate.

    `reused_s` is what computing the tokens that it has reused would have taken; None if nothing was measured yet.
    """

    place: Place
    is_loading: bool
    reused_s: float | None


@dataclass(frozen=True)
class Look:
    """What one look has found. `stats` are those of the salts of readers who see nothing else."""

    changes: TreeChanges
    seen: Sequence[Seen]
    stats: Mapping[str, Mapping[str, int]]
    prefill_tokens_per_s: float | None


@dataclass(frozen=True)
class Sought:
    """A request to be looked for: its packed tokens as far as they are known."""

    progress: RequestProgress
    packed: bytes


def look(cache: PrefixCache, watch: TreeWatch, sought: Sequence[Sought], salts: Collection[str]) -> Steps[Look]:
    """Look at a tree and at requests. Runs on the engine's thread."""
    changes = yield from watch.look(salts)
    places = locate(cache, [(each.packed, each.progress.salt) for each in sought])
    prefill_s = cache.residency.loader.rates.prefill_s
    rate_s = prefill_s(0, _RATE_TOKENS)
    return Look(
        changes,
        [_see(each.progress, place, prefill_s) for each, place in zip(sought, places, strict=True)],
        {salt: salt_stats(cache.forest, salt) for salt in salts},
        _RATE_TOKENS / rate_s if rate_s else None,
    )


def _see(progress: RequestProgress, place: Place, prefill_s: Callable[[int, int], float | None]) -> Seen:
    request = progress.request  # the event loop forgets it when the request ends
    is_loading = request is not None and request.is_loading
    return Seen(place, is_loading, prefill_s(0, progress.usage.cached_tokens))
