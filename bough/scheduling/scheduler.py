"""Continuous batching: many requests on one engine.

One thread calls `turn` in a loop. Each turn admits waiting requests to free lanes, takes content that was read from disk,
then runs one prefill chunk and one decode step of all lanes together. So a long prompt, or a slow disk, never stops the
tokens of other requests. The request with the least work goes first; one that was passed over `MAX_PASSED` times goes next.
At most half of the lanes load at a time.

A request waits while another one computes a prefix that both share. When that part is published, or the other request ends
for any reason, it continues from the kept part, the oldest first.

Always true between turns:
- a request waits, or it runs and has a lane of its own;
- a request that runs and has tokens of its prompt to load or to evaluate is one of those that start;
- a request that is over is in neither list, and its lane is idle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency.loading import TAKE_S
from bough.engines.contract import Engine
from bough.errors import BoughError, DoesNotFit, EngineError, LanesBusy, TimedOut
from bough.generate.generation import ChunkSize
from bough.scheduling.admission import MAX_PASSED, Admission
from bough.scheduling.job import Job, MemoryState, PromptLoaded
from bough.scheduling.verifier import Verifier
from bough.types import SampledToken

log = logging.getLogger(__name__)

SPREAD_S = 0.03  # when copying state to lanes took longer, no prefill chunk delays the tokens of other requests as well


class Scheduler:
    """Waiting and running requests. Only one thread calls it; others may read the two lists."""

    def __init__(
        self,
        engine: Engine,
        cache: PrefixCache,
        size: ChunkSize,
        clock: Callable[[], float],
        verifier: Verifier | None = None,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._size = size
        self._clock = clock
        self._verifier = verifier
        self._admission = Admission(cache)
        self._next_loading = 0
        self._has_spread = False  # whether the last turn had no prefill
        self._chunk: tuple[int, float] | None = None  # tokens and start of the last prefill, until its time is known
        self._step_s = 0.0  # what the last decode step without a chunk before it took
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self._starting: list[Job] = []  # those of the running that load or prefill
        self._num_ended = 0  # requests that were dropped so far

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or (self._verifier and self._verifier.has_work))

    @property
    def num_free_lanes(self) -> int:
        return sum(not slot.is_busy for slot in self._cache.lanes.slots)

    @property
    def is_only_loading(self) -> bool:
        return bool(self.running) and all(job.is_loading for job in self.running)

    def add(self, job: Job) -> None:
        self.waiting.append(job)

    def turn(self) -> None:
        """Admit and load requests, then run one prefill chunk and one decode step, if there are any to run."""
        self.sweep()
        started_s = self._clock()
        self._admit()
        if self._starting:
            self._load()
            if not self._must_spread(self._clock() - started_s):
                self._prefill()
            self._starting = [job for job in self._starting if not job.is_prefilled]
        self._decode()
        for job in [job for job in self.running if job.finish_reason is not None]:
            self._finish(job)

    def _must_spread(self, adopting_s: float) -> bool:
        """Whether the prefill waits for the next turn, because lanes took long to adopt state and others decode."""
        is_long = adopting_s > SPREAD_S and any(job.is_decoding for job in self.running)
        self._has_spread = is_long and not self._has_spread  # never twice in a row
        return self._has_spread

    def fail_all(self, error: BoughError) -> None:
        """End every request with this error. Computed state is kept, unless recording it fails too."""
        for job in [*self.waiting, *self.running]:
            try:
                self._fail(job, error)
            except Exception:  # the other requests must end, too
                log.exception("a request could not be ended")

    def postpone_check(self) -> None:
        """Cancel the check of the cache that runs, if any: requests go first."""
        check = self._verifier.postpone() if self._verifier else None
        if check is not None:
            self._cancel(check)

    def sweep(self) -> None:
        """End requests that are past their deadline, over, or cancelled."""
        now = self._clock()
        for job in [job for job in (*self.waiting, *self.running) if job.is_over or now > job.request.deadline_s]:
            if now > job.request.deadline_s:
                limit_s = job.request.deadline_s - job.submitted_s
                self._fail(job, TimedOut(f"the request took longer than the {limit_s:.0f} s it may"))
            else:
                self._drop(job)
        for job in [job for job in (*self.waiting, *self.running) if job.is_cancelled]:
            self._cancel(job)

    def _admit(self) -> None:
        if self.waiting:
            self.postpone_check()
            self._admit_waiting()
        if self._verifier and not self.waiting and not self.running:
            check = self._verifier.next_check()
            if check is not None:
                self._begin(check)

    def _admit_waiting(self) -> None:
        tried: set[Job] = set()
        while self.num_free_lanes:
            waiting = [job for job in self.waiting if job not in tried]
            job = self._admission.choose(waiting, self.running, self._starting)
            if job is None:
                break
            tried.add(job)
            if not self._begin(job) and job.passed >= MAX_PASSED:
                break  # it waits for memory, and must not be passed over again

    def _begin(self, job: Job) -> bool:
        """Give a request a lane; False if it waits for memory, until another request ends or the cache changes."""
        if job.refused_at is not None and job.refused_at == self._memory_state(job):
            job.passed += 1
            return False
        if self._must_wait_to_load(job):
            return True
        try:
            job.begin(self._cache)
        except DoesNotFit as error:
            if error.can_wait and self.running:
                job.passed += 1
                job.refused_at = self._memory_state(job)
                return False
            self._fail(job, error)
        except LanesBusy:
            return False
        except (BoughError, MemoryError) as error:
            self._fail(job, error)
        else:
            if job in self.waiting:
                self.waiting.remove(job)
            self.running.append(job)
            self._starting.append(job)
            job.passed = 0
            job.start(self._clock() - job.submitted_s)
        return True

    def _memory_state(self, job: Job) -> MemoryState:
        version = self._cache.reuse_version(job.request.salt)
        reserved_bytes = sum(self._cache.memory.reserved_bytes.values())
        return MemoryState(self._num_ended, self._cache.lanes.num_busy, reserved_bytes, version)

    def _must_wait_to_load(self, job: Job) -> bool:
        """Whether a request has to read from disk while half of the lanes do so already."""
        if not job.reuses:
            return False
        most = max(1, len(self._cache.lanes.slots) // 2)
        if sum(other.is_loading for other in self.running) < most:
            job.is_waiting_to_load = False
        elif not job.is_waiting_to_load:  # looked up again only after a load has ended
            job.is_waiting_to_load = self._cache.needs_loading(job.known.key, job.request.salt)
        return job.is_waiting_to_load

    def _load(self) -> None:
        """Take content that has been read from disk for loading requests, in turn, for a limited time."""
        loading = [job for job in self._starting if job.is_loading]
        until_s = self._clock() + TAKE_S
        for number in range(len(loading)):
            job = loading[(self._next_loading + number) % len(loading)]
            try:
                job.advance_loading()
                if not (job.is_loading or job.is_done):
                    job.deliver(PromptLoaded(job.usage))
            except (BoughError, MemoryError) as error:
                self._fail(job, error)
            if self._clock() > until_s:
                break
        self._next_loading += 1

    def _prefill(self) -> None:
        """Evaluate one chunk of the request with the fewest tokens left."""
        jobs = [job for job in self._starting if job.is_prefilling]
        if not jobs:
            return
        chosen = next((job for job in jobs if job.passed >= MAX_PASSED), None) or min(jobs, key=lambda job: job.remaining)
        for job in jobs:
            job.passed = 0 if job is chosen else job.passed + 1
        started_s, remaining = self._clock(), chosen.remaining
        try:
            others = any(job.is_decoding for job in self.running)
            scored = chosen.prefill_chunk(self._size, beside_others=others)
        except (BoughError, MemoryError) as error:
            self._fail(chosen, error)
            return
        self._chunk = remaining - chosen.remaining, started_s
        if scored is not None:
            chosen.deliver(scored)
        if chosen.is_decoding and self._verifier:
            self._verifier.note(chosen)

    def _decode(self) -> None:
        """Generate one token for every lane whose prompt is done, in one step of the engine."""
        jobs = [job for job in self.running if job.is_decoding]
        if not jobs:
            return
        started_s = self._clock()
        self._feed([job for job in jobs if job.next_id is not None])
        for job, sampled in self._sample([job for job in jobs if not job.is_over]):
            try:
                chunk = job.accept(sampled)
            except BoughError as error:
                self._fail(job, error)
                continue
            if chunk is not None:
                job.deliver(chunk)
        ended_s = self._clock()
        self._measure(started_s, ended_s)
        for job in jobs:
            if not job.is_over:
                job.note_step(ended_s - started_s)

    def _measure(self, started_s: float, ended_s: float) -> None:
        """Measure a step, or the chunk before it: the device has finished both."""
        if self._chunk is None:
            self._step_s = ended_s - started_s
        else:
            (num_tokens, chunk_started_s), self._chunk = self._chunk, None
            self._size.measure_waited(num_tokens, ended_s - chunk_started_s - self._step_s)

    def _feed(self, jobs: Sequence[Job]) -> None:
        has_limit = self._engine.capabilities.reuse_limit is not None
        ready = [job for job in jobs if self._cross_limit(job)] if has_limit else jobs
        if not ready:
            return
        sessions = [job.session for job in ready]
        ids = [_next_id(job) for job in ready]
        for session in sessions:
            session.begin_feed()
        try:
            logits = self._engine.step([session.lane for session in sessions], ids)
        except (BoughError, MemoryError) as error:
            for job in ready:
                self._fail(job, error)
            return
        for job, session, token_id, each in zip(ready, sessions, ids, logits, strict=True):
            session.end_feed(token_id)
            job.logits = each

    def _cross_limit(self, job: Job) -> bool:
        try:
            job.cross_reuse_limit()
        except (BoughError, MemoryError) as error:
            self._fail(job, error)
            return False
        return True

    def _sample(self, jobs: Sequence[Job]) -> list[tuple[Job, SampledToken]]:
        """Choose a token for each request. If that fails for one, it ends alone."""
        drawn = []
        for job in jobs:
            try:
                drawn.append((job, job.draw()))
            except BoughError as error:
                self._fail(job, error)
        try:
            sampled = self._engine.sample([job.logits for job, _ in drawn], [draw for _, draw in drawn])
            return [(job, each) for (job, _), each in zip(drawn, sampled, strict=True)]
        except (BoughError, MemoryError) as error:
            if len(drawn) == 1:
                self._fail(drawn[0][0], error)
                return []
            return [pair for job, _ in drawn for pair in self._sample([job])]

    def _finish(self, job: Job) -> None:
        """Call the listener before recording, so that the last token does not wait."""
        job.end(job.completion())
        self._drop(job)

    def _cancel(self, job: Job) -> None:
        job.end_cancelled()
        self._finish(job)

    def _fail(self, job: Job, error: BoughError | MemoryError) -> None:
        job.fail(error if isinstance(error, BoughError) else EngineError(f"no memory: {error}"))
        self._drop(job)

    def _drop(self, job: Job) -> None:
        """Record the computed state of a request, and make its lane idle."""
        for jobs in (self.waiting, self.running, self._starting):
            if job in jobs:
                jobs.remove(job)
        self._num_ended += 1
        try:
            job.close()
        except (BoughError, MemoryError) as error:
            log.warning("a request could not be recorded: %s", error)


def _next_id(job: Job) -> int:
    assert job.next_id is not None
    return job.next_id
