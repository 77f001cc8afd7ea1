"""Which waiting request gets the next lane.

The one with the least to compute goes first, of the tenant with the fewest running requests; one that was passed over
`MAX_PASSED` times goes before it. A request waits while another one, its leader, computes a prefix that both share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from bough.cache.prefix_cache import PrefixCache
from bough.cache.tree.tokens import common_prefix
from bough.scheduling.job import Job, Reusable

MIN_SHARED_TOKENS = 256
"""A request waits for a prefix that another computes only if that had to compute at least so many tokens of it."""

MAX_PASSED = 8

MAX_CANDIDATES = 64
"""Of each tenant, so many of the oldest requests that wait are looked at: the cost of a choice does not grow further."""


class Admission:
    """Chooses by what the cache knows of each prompt. Only the engine's thread calls it."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def choose(self, waiting: Sequence[Job], running: Sequence[Job], starting: Sequence[Job]) -> Job | None:
        """The next request for a lane, of those that do not wait for a shared prefix; older ones are passed over.

        Tenants with the fewest running requests go first, so that one tenant that fills the queue does not get every lane.
        """
        ready = [job for job in _oldest(waiting) if self._leader_of(job, starting) is None]
        if not ready:
            return None
        busy = Counter(job.tenant for job in running)
        fewest = min(busy[job.tenant] for job in ready)
        ready = [job for job in ready if busy[job.tenant] == fewest]
        chosen = next((job for job in ready if job.passed >= MAX_PASSED), None) or min(ready, key=self._to_compute)
        for job in ready[: ready.index(chosen)]:
            job.passed += 1
        return chosen

    def _to_compute(self, job: Job) -> int:
        return job.num_tokens - self._known(job)

    def _known(self, job: Job) -> int:
        """How many tokens of its prompt could be reused now. They are counted again only when that may have changed."""
        if not job.reuses:
            return 0
        salt = job.generation.request.salt
        version = self._cache.reuse_version(salt)
        if job.reusable is None or job.reusable.version != version:
            job.reusable = Reusable(version, self._cache.count_reusable(job.packed, salt))
        return job.reusable.num_tokens

    def _shared(self, job: Job, other: Job) -> int:
        """How many leading tokens two prompts share, compared once."""
        shared = job.shared.get(other)
        if shared is None:
            shared = job.shared[other] = common_prefix(job.packed, other.packed)
        return shared

    def _leader_of(self, job: Job, starting: Sequence[Job]) -> Job | None:
        """The running request that computes a prefix of this one, if waiting was worth it when that was first seen."""
        if not job.reuses:
            return None
        leaders = [other for other in starting if not other.is_decoding and self._can_lead(other, job)]
        job.leader = next((other for other in leaders if self._leads(other, job)), None)
        return job.leader

    def _leads(self, other: Job, job: Job) -> bool:
        """Whether `other` will publish a prefix of `job` that is long enough to wait for.

        What it has published of that so far counts, too: a request that comes late waits for the rest.
        """
        session = other.generation.session
        shared = min(self._shared(job, other), job.num_tokens - 1)
        stands_at = session.cached if other.is_loading else other.generation.lane.offset
        if stands_at >= shared:
            return False
        known = self._known(job)
        if known <= stands_at:
            known = min(known, session.cached)
        is_worth_it = job.leader is other or shared - known >= MIN_SHARED_TOKENS
        if is_worth_it:
            session.schedule(shared)
        return is_worth_it

    def _can_lead(self, other: Job, job: Job) -> bool:
        theirs, ours = other.generation.request, job.generation.request
        return self._cache.is_enabled and theirs.store and theirs.salt == ours.salt and not other.is_over


def _oldest(waiting: Iterable[Job]) -> list[Job]:
    looked_at: Counter[str] = Counter()
    oldest = []
    for job in waiting:
        if looked_at[job.tenant] < MAX_CANDIDATES:
            looked_at[job.tenant] += 1
            oldest.append(job)
    return oldest
