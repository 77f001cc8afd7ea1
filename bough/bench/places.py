"""What comes back from below the device: after a restart from disk, and from pinned host memory, against computing it."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from bough.cache.disk import files
from bough.cache.record import page_ranges
from bough.cache.session import Session
from bough.cache.tree.state import PAGE_TOKENS, Kind
from bough.runner import Runner, load, load_shape
from bough.types import Completion

SLOW_BYTES_S = 4e6


@dataclass(frozen=True)
class RestartFigures:
    """Medians in milliseconds of the first token of a prompt that was computed before the restart."""

    tokens: int
    computed_ms: float  # without a disk
    computed_while_writing_ms: float
    restarted_ms: float
    reading_ms: float  # of it
    read_bytes: int
    start_ms: float  # loading the model and the tree
    slow_disk_ms: float  # the slowest request, with a disk that reads SLOW_BYTES_S
    slow_disk_computed_ms: float  # computing as much in the same run
    answers_equal: bool
    setup: dict[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.computed_ms / self.restarted_ms


def measure_restart(model: str | None, num_tokens: int, rounds: int = 3, **settings: Any) -> RestartFigures:
    """Compute prompts, end the process's use of the model, load it again, and ask for the same prompts."""
    with tempfile.TemporaryDirectory(prefix="bough-restart-") as folder:
        with load(model, cache_folder=folder, disk_bytes=0, **settings) as runner:
            prompts = _make_prompts(runner, num_tokens, rounds)
            computed = [_answer(runner, prompt) for prompt in prompts]
        with load(model, cache_folder=folder, disk_bytes="64G", **settings) as runner:
            _warm_up(runner)
            writing = [_answer(runner, prompt) for prompt in prompts]
        started = time.perf_counter()
        with load(model, cache_folder=folder, disk_bytes="64G", **settings) as runner:
            start_s = time.perf_counter() - started
            _warm_up(runner)
            restarted = [_answer(runner, prompt) for prompt in prompts]
            setup = runner.engine.describe()
        with load(model, cache_folder=folder, disk_bytes="64G", **settings) as runner, _slow_disk():
            fresh = [_answer(runner, prompt) for prompt in _make_prompts(runner, num_tokens, rounds, seed=1)]
            slow = [_answer(runner, prompt) for prompt in prompts]
    return RestartFigures(
        tokens=num_tokens,
        computed_ms=_first_ms(computed),
        computed_while_writing_ms=_first_ms(writing),
        restarted_ms=_first_ms(restarted),
        reading_ms=_median_ms([answer.timings.loading.load_s for answer in restarted]),
        read_bytes=min(answer.timings.loading.disk_bytes for answer in restarted),
        start_ms=round(1000 * start_s, 1),
        slow_disk_ms=round(1000 * max(answer.timings.first_token_s for answer in slow), 3),
        slow_disk_computed_ms=_first_ms(fresh),
        answers_equal=[a.token_ids for a in computed] == [a.token_ids for a in restarted],
        setup=setup,
    )


@contextmanager
def _slow_disk() -> Iterator[None]:
    """Let every read take as long as a disk needs that gives SLOW_BYTES_S."""
    before = files.read_into

    def read_into(descriptor: int, view: memoryview) -> int:
        count = before(descriptor, view)
        time.sleep(count / SLOW_BYTES_S)
        return count

    files.read_into = read_into
    try:
        yield
    finally:
        files.read_into = before


def _make_prompts(runner: Runner, num_tokens: int, rounds: int, seed: int = 0) -> list[list[int]]:
    _warm_up(runner)
    chance = random.Random(seed)
    return [[chance.randrange(3, runner.engine.vocab_size) for _ in range(num_tokens)] for _ in range(rounds)]


def _warm_up(runner: Runner) -> None:
    runner.generate(list(range(3, 35)), max_tokens=2)  # the first forward pass of a process is slow


def _answer(runner: Runner, prompt: list[int]) -> Completion:
    return runner.generate(prompt, max_tokens=4, ignore_eos=True)


def _first_ms(answers: Sequence[Completion]) -> float:
    return _median_ms([answer.timings.first_token_s for answer in answers])


def _median_ms(seconds: Sequence[float]) -> float:
    return round(1000 * statistics.median(seconds), 3)


@dataclass(frozen=True)
class PagingFigures:
    """Conversations that take turns on a device with room for three of them. Medians in milliseconds."""

    tokens: int
    conversations: int
    conversation_bytes: int
    device_bytes: int
    computed_first_token_ms: float
    page_in_ms: float  # begin, until every row is in the lane
    slowest_page_in_ms: float
    first_token_ms: float
    host_share: float  # of the bytes that were paged in: the rest was still on the device
    is_exact: bool  # every bit of every row, each time
    agreement: float  # share of answer tokens that are those of the first, computed time; bf16 rounds differently there
    setup: dict[str, str] = field(default_factory=dict)


def _agreement(answers: Sequence[Completion], computed: Sequence[Completion]) -> float:
    pairs = [zip(a.token_ids, b.token_ids, strict=True) for a, b in zip(answers, computed, strict=True)]
    return round(statistics.mean(left == right for pair in pairs for left, right in pair), 3)


class Paging:
    """Conversations that are longer together than the device has room for, each coming back in turn."""

    def __init__(self, runner: Runner, num_tokens: int, conversations: int) -> None:
        self._runner = runner
        self._cache = runner.prefix_cache
        chance = random.Random(0)
        self._prompts = [
            [chance.randrange(runner.engine.vocab_size) for _ in range(num_tokens)] for _ in range(conversations)
        ]
        self._row_bytes = sum(group.bytes_per_token for group in runner.engine.groups)

    def measure(self, rounds: int = 4) -> PagingFigures:
        prompts = self._prompts
        _answer(self._runner, prompts[0][: len(prompts[0]) // 2])
        computed = []
        marks = []
        for prompt in prompts:
            computed.append(_answer(self._runner, prompt))
            marks.append(self._mark_lane(prompt))
        answers = [_answer(self._runner, prompt) for _ in range(rounds) for prompt in prompts]
        visits = [self._page_in(prompt) for _ in range(rounds) for prompt in prompts]
        assert all(answer.usage.cached_tokens == len(prompts[0]) - 1 for answer in answers)
        moved = (len(prompts[0]) - 1) * self._row_bytes
        return PagingFigures(
            tokens=len(prompts[0]),
            conversations=len(prompts),
            conversation_bytes=moved,
            device_bytes=self._cache.residency.room.budget_bytes or 0,
            computed_first_token_ms=_first_ms(computed),
            page_in_ms=_median_ms([visit.seconds for visit in visits]),
            slowest_page_in_ms=round(1000 * max(visit.seconds for visit in visits), 3),
            first_token_ms=_first_ms(answers),
            host_share=round(statistics.mean(visit.host_bytes for visit in visits) / moved, 3),
            is_exact=[visit.mark for visit in visits] == marks * rounds,
            agreement=_agreement(answers, computed * rounds),
            setup=self._runner.engine.describe(),
        )

    def _page_in(self, prompt: list[int]) -> _Visit:
        for slot in self._cache.lanes.slots:
            slot.clear()
        self._runner.engine.synchronize()
        started = time.perf_counter()
        session = self._cache.begin(prompt, max_new_tokens=4)
        self._runner.engine.synchronize()
        seconds = time.perf_counter() - started
        visit = _Visit(seconds, session.loading.host_bytes, self._mark(session))
        session.close()
        return visit

    def _mark_lane(self, prompt: list[int]) -> bytes:
        """The mark of the rows that the lane computed itself, and still holds."""
        session = self._cache.begin(prompt, max_new_tokens=4)
        assert not session.loading.host_bytes
        mark = self._mark(session)
        session.close()
        return mark

    def _mark(self, session: Session) -> bytes:
        """A hash over every bit of every row that the lane holds."""
        engine, mark = self._runner.engine, blake2b(digest_size=16)
        for group in [group for group in engine.groups if group.kind is Kind.FULL]:
            for start, end in page_ranges(0, session.lane.offset, PAGE_TOKENS):
                page = session.lane.publish(group, start, end)
                mark.update(engine.pack(page) or b"")
                engine.release(page)
        return mark.digest()


def measure_paging(shape: dict[str, Any], num_tokens: int, conversations: int) -> PagingFigures:
    """Measure on a model of random weights whose device budget holds three such conversations, one of them in the lane."""
    whole_pages = -(-num_tokens // PAGE_TOKENS) + 1
    with load_shape(shape, engine="torch", device="cuda", dtype="bfloat16", lanes=1) as runner:
        row_bytes = sum(group.bytes_per_token for group in runner.engine.groups)
        budget = 3 * whole_pages * PAGE_TOKENS * row_bytes
        cache = runner.prefix_cache
        cache.residency.room.budget_bytes = budget
        return Paging(runner, num_tokens, conversations).measure()


@dataclass(frozen=True)
class _Visit:
    seconds: float
    host_bytes: int
    mark: bytes
