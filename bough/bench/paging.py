"""`bough bench paging`: conversations page in from pinned host memory, on a device with room for three of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from bough.bench.timing import answer, first_token_ms, median_ms, timed_begin
from bough.bench.workload import random_prompts
from bough.cache.session import Session
from bough.cache.tree.state import PAGE_TOKENS, Kind, page_ranges
from bough.runtime import Runtime, load_shape
from bough.types import Completion

ANSWER_TOKENS = 4


@dataclass(frozen=True)
class PagingFigures:
    """Times are medians in milliseconds."""

    tokens: int
    conversations: int
    conversation_bytes: int
    device_bytes: int
    computed_first_token_ms: float
    page_in_ms: float  # from `begin` until every row is in the lane
    slowest_page_in_ms: float
    first_token_ms: float
    host_share: float  # of the restored bytes: the others were still on the device
    is_exact: bool  # every row is equal to the computed one, bit by bit, each time
    agreement: float  # share of answer tokens equal to those of the computed run, where bf16 rounds differently
    setup: dict[str, str] = field(default_factory=dict)


def _agreement(answers: Sequence[Completion], computed: Sequence[Completion]) -> float:
    pairs = [zip(a.token_ids, b.token_ids, strict=True) for a, b in zip(answers, computed, strict=True)]
    return round(statistics.mean(left == right for pair in pairs for left, right in pair), 3)


@dataclass(frozen=True)
class _Visit:
    seconds: float
    host_bytes: int
    rows_hash: bytes


class Paging:
    """Conversations that take turns and together need more memory than the device has."""

    def __init__(self, runtime: Runtime, num_tokens: int, conversations: int) -> None:
        self._runtime = runtime
        self._cache = runtime.prefix_cache
        self._prompts = random_prompts(range(runtime.engine.vocab_size), num_tokens, conversations)
        self._row_bytes = sum(group.bytes_per_token for group in runtime.engine.groups)

    def measure(self, rounds: int = 4) -> PagingFigures:
        prompts = self._prompts
        answer(self._runtime, prompts[0][: len(prompts[0]) // 2], ANSWER_TOKENS)
        computed = []
        hashes = []
        for prompt in prompts:
            computed.append(answer(self._runtime, prompt, ANSWER_TOKENS))
            hashes.append(self._hash_lane(prompt))
        answers = [answer(self._runtime, prompt, ANSWER_TOKENS) for _ in range(rounds) for prompt in prompts]
        visits = [self._page_in(prompt) for _ in range(rounds) for prompt in prompts]
        assert all(each.usage.cached_tokens == len(prompts[0]) - 1 for each in answers)
        moved = (len(prompts[0]) - 1) * self._row_bytes
        return PagingFigures(
            tokens=len(prompts[0]),
            conversations=len(prompts),
            conversation_bytes=moved,
            device_bytes=self._cache.residency.room.budget_bytes or 0,
            computed_first_token_ms=first_token_ms(computed),
            page_in_ms=median_ms([visit.seconds for visit in visits]),
            slowest_page_in_ms=round(1000 * max(visit.seconds for visit in visits), 3),
            first_token_ms=first_token_ms(answers),
            host_share=round(statistics.mean(visit.host_bytes for visit in visits) / moved, 3),
            is_exact=[visit.rows_hash for visit in visits] == hashes * rounds,
            agreement=_agreement(answers, computed * rounds),
            setup=self._runtime.engine.describe(),
        )

    def _page_in(self, prompt: list[int]) -> _Visit:
        with timed_begin(self._runtime, prompt, ANSWER_TOKENS) as begun:
            return _Visit(begun.seconds, begun.session.loading.host_bytes, self._hash_rows(begun.session))

    def _hash_lane(self, prompt: list[int]) -> bytes:
        """The hash of the rows that the lane computed itself and still holds."""
        session = self._cache.begin(prompt, max_new_tokens=ANSWER_TOKENS)
        assert not session.loading.host_bytes
        found = self._hash_rows(session)
        session.close()
        return found

    def _hash_rows(self, session: Session) -> bytes:
        """A hash over every bit of every row that the lane holds."""
        engine, digest = self._runtime.engine, blake2b(digest_size=16)
        for group in [group for group in engine.groups if group.kind is Kind.FULL]:
            for start, end in page_ranges(0, session.lane.offset, PAGE_TOKENS):
                page = session.lane.publish(group, start, end)
                digest.update(engine.pack(page) or b"")
                engine.release(page)
        return digest.digest()


def measure_paging(shape: dict[str, Any], num_tokens: int, conversations: int) -> PagingFigures:
    """Measure with random weights and a device budget for three conversations, one of them in the lane."""
    whole_pages = -(-num_tokens // PAGE_TOKENS) + 1
    with closing(load_shape(shape, engine="torch", device="cuda", dtype="bfloat16", lanes=1)) as runtime:
        row_bytes = sum(group.bytes_per_token for group in runtime.engine.groups)
        budget = 3 * whole_pages * PAGE_TOKENS * row_bytes
        cache = runtime.prefix_cache
        cache.residency.room.budget_bytes = budget
        return Paging(runtime, num_tokens, conversations).measure()
