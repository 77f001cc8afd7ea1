"""Chooses the waiting request that gets the next lane.

Of the tenants with the fewest running requests, the one with the least to compute goes first; one that was passed over
`MAX_PASSED` times goes before it. A request waits while another one, its leader, computes a prefix that both share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from bough.cache.prefix_cache import PrefixCache
from bough.scheduling.job import Job, ReusableTokens
from bough.tokens import common_prefix

MIN_SHARED_TOKENS = 256  # to compute by the leader, for which a request waits
MAX_PASSED = 8
MAX_CANDIDATES = 64  # the oldest waiting requests of each tenant, which bound the cost of a choice


class Admission:
    """Chooses by what the cache knows of each prompt. Only the engine's thread calls it."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def choose(self, waiting: Sequence[Job], running: Sequence[Job], starting: Sequence[Job]) -> Job | None:
        """The next request for a lane, of those that do not wait for a shared prefix; older ones are passed over."""
        ready = [job for job in _oldest(waiting) if self._leader_of(job, starting) is None]
        if not ready:
            return None
        busy = Counter(job.tenant for job in running)
        fewest = min(busy[job.tenant] for job in ready)
        ready = [job for job in ready if busy[job.tenant] == fewest]
        if len(ready) == 1:
            return ready[0]
        chosen = next((job for job in ready if job.passed >= MAX_PASSED), None)
        chosen = chosen or min(ready, key=lambda job: job.num_tokens - self._known(job))
        for job in ready[: ready.index(chosen)]:
            job.passed += 1
        return chosen

    def _known(self, job: Job) -> int:
        """The tokens of its prompt that could be reused now, counted again only when that may have changed."""
        if not job.reuses:
            return 0
        salt = job.request.salt
        version = self._cache.reuse_version(salt)
        if job.reusable is None or job.reusable.version != version:
            job.reusable = ReusableTokens(version, self._cache.count_reusable(job.known.key, salt))
        return job.reusable.num_tokens

    def _shared(self, job: Job, other: Job) -> int:
        """The number of leading tokens that two prompts share, compared once."""
        shared = job.shared.get(other)
        if shared is None:
            shared = job.shared[other] = common_prefix(job.known.key, other.known.key)
        return shared

    def _leader_of(self, job: Job, starting: Sequence[Job]) -> Job | None:
        """The running request that computes a prefix of this one, if waiting was worth it when it was first found."""
        if not job.reuses:
            return None
        leaders = [other for other in starting if not other.is_decoding and self._can_lead(other, job)]
        job.leader = next((other for other in leaders if self._leads(other, job)), None)
        return job.leader

    def _leads(self, other: Job, job: Job) -> bool:
        """Whether `other` publishes a prefix of `job`, or has published a part of one, that is worth waiting for."""
        session = other.session
        shared = min(self._shared(job, other), job.num_tokens - 1)
        reached = session.cached if other.is_loading else other.lane.offset
        if reached >= shared:
            return False
        known = self._known(job)
        if known <= reached:
            known = min(known, session.cached)
        is_worth_it = job.leader is other or shared - known >= MIN_SHARED_TOKENS
        if is_worth_it:
            session.schedule(shared)
        return is_worth_it

    def _can_lead(self, other: Job, job: Job) -> bool:
        theirs, ours = other.request, job.request
        return self._cache.is_enabled and theirs.keep_state and theirs.salt == ours.salt and not other.is_over


def _oldest(waiting: Iterable[Job]) -> list[Job]:
    looked_at: Counter[str] = Counter()
    oldest = []
    for job in waiting:
        if looked_at[job.tenant] < MAX_CANDIDATES:
            looked_at[job.tenant] += 1
            oldest.append(job)
    return oldest
