"""Many requests on a fake engine, driven turn by turn, with everything checked in between."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

from bough.bench.alone import run_alone
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency.memory import Tiers
from bough.errors import BoughError
from bough.generate.generation import ChunkSize, Generation
from bough.generate.request import Request
from bough.scheduling.job import Job, Listener, PromptAdvanced, PromptLoaded, RequestBegan, RequestNews
from bough.scheduling.scheduler import Scheduler
from bough.scheduling.verifier import Verifier
from bough.tokens import Tokens
from bough.types import Chunk, Completion, SamplingParams, Usage
from tests import invariants
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS, FakeEngine


class Letters:
    """A vocabulary whose tokens are single letters; none ends an answer."""

    eos_ids: frozenset[int] = frozenset()
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([ord("A") + token_id % 57])


class Client:
    """Listens to one request, and may hang up. `mistakes` are calls that should not have come."""

    def __init__(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        self.on_progress = on_progress
        self.mistakes: list[str] = []
        self.started: Usage | None = None
        self.loaded: Usage | None = None
        self.tokens: list[int] = []
        self.scored: list[int] = []
        self.completion: Completion | None = None
        self.error: BoughError | None = None
        self.is_gone = False

    @property
    def is_done(self) -> bool:
        return self.completion is not None or self.error is not None

    def __call__(self, news: RequestNews) -> None:
        if isinstance(news, RequestBegan):
            self.on_start(news.usage, news.waited_s)
        elif isinstance(news, PromptLoaded):
            self.on_loaded(news.usage)
        elif isinstance(news, PromptAdvanced):
            self.on_progress(news.done_tokens, news.total_tokens)
        elif isinstance(news, Chunk):
            self.on_chunk(news)
        elif isinstance(news, Completion):
            self.on_end(news)
        elif isinstance(news, BoughError):
            self.on_error(news)

    def on_start(self, usage: Usage, waited_s: float) -> None:
        self._note("a start", is_wrong=self.started is not None or self.is_done)
        self.started = usage

    def on_loaded(self, usage: Usage) -> None:
        self._note("the end of loading", is_wrong=self.loaded is not None or self.is_done)
        self.loaded = usage

    def on_chunk(self, chunk: Chunk) -> None:
        self._note("a chunk", is_wrong=self.is_done)
        self.tokens += chunk.token_ids
        self.scored += [each.token_id for each in chunk.prompt_logprobs]

    def on_end(self, completion: Completion) -> None:
        self._note("an end", is_wrong=self.is_done)
        self.completion = completion

    def on_error(self, error: BoughError) -> None:
        self._note("an error", is_wrong=self.is_done)
        self.error = error

    def _note(self, what: str, *, is_wrong: bool) -> None:
        if is_wrong:
            self.mistakes.append(f"{what} came twice, or after the end")


class Concert:
    """A fake engine with lanes, a scheduler over it, and clients."""

    def __init__(
        self,
        model: str = "full",
        *,
        lanes: int = 4,
        chunk: int = 16,
        budget_bytes: int | None = None,
        random: Callable[[], float] | None = None,
        has_disk: bool = False,
    ) -> None:
        self.engine = FakeEngine(MODELS[model])
        self.disk = FakeDisk(16) if has_disk else None
        lanes_made = [self.engine.make_lane() for _ in range(lanes)]
        tiers = Tiers(self.engine, disk=self.disk) if self.disk else None  # type: ignore[arg-type]
        self.cache = PrefixCache(self.engine, lanes_made, page_tokens=16, budget_bytes=budget_bytes, tiers=tiers)
        self.clients: list[Client] = []
        ticks = itertools.count(1)
        self.clock = lambda: next(ticks) / 100
        self.verifier = Verifier(self.engine, 0.5, random, self.prepare) if random else None
        self.scheduler = Scheduler(self.engine, self.cache, ChunkSize(chunk), self.clock, self.verifier)

    def prepare(
        self, request: Request, listener: Listener = lambda news: None, asks_to_end: Callable[[], bool] = lambda: False
    ) -> Job:
        return Job(self.engine, request, Letters(), None, self.clock, listener, asks_to_end=asks_to_end)

    def ask(
        self,
        ids: Sequence[int],
        *,
        deadline_s: float = math.inf,
        salt: str = "",
        seed: int = 0,
        tenant: str = "",
        scores_prompt: bool = False,
        wants_state: bool = False,
        keep_state: bool = True,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        **params: object,
    ) -> Client:
        client = Client(on_progress)
        self.clients.append(client)
        wanted = SamplingParams(**{"max_tokens": 4, **params})  # type: ignore[arg-type]
        request = Request(
            Tokens.of(ids),
            wanted,
            salt=salt,
            tenant=tenant,
            deadline_s=deadline_s,
            seed=seed,
            scores_prompt=scores_prompt,
            wants_state=wants_state,
            keep_state=keep_state,
        )
        job = self.prepare(request, client, lambda: client.is_gone)
        job.submitted_s = self.clock()
        self.scheduler.add(job)
        return client

    def turn(self) -> None:
        self.scheduler.turn()
        sessions = [job.session for job in self.scheduler.running]
        invariants.check(self.cache, self.engine, sessions)  # type: ignore[arg-type]
        assert not any(client.mistakes for client in self.clients)

    def play(self, most: int = 10_000) -> None:
        """Turn until everybody is served."""
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.turn()
        assert not self.scheduler.has_work
        assert not any(slot.is_busy for slot in self.cache.lanes.slots)
        assert all(client.is_done for client in self.clients)

    def alone(self, ids: Sequence[int], *, seed: int = 0, **params: object) -> list[int]:
        """What a request generates when it is the only one, on an engine of its own."""
        engine = FakeEngine(self.engine.groups)
        cache = PrefixCache(engine, [engine.make_lane()], page_tokens=16)
        wanted = SamplingParams(**{"max_tokens": 4, **params})  # type: ignore[arg-type]
        generation = Generation(engine, Request(Tokens.of(ids), wanted, seed=seed), Letters(), None, self.clock)
        *_, completion = run_alone(engine, cache, generation, ChunkSize(16))
        assert isinstance(completion, Completion)
        return list(completion.token_ids)


def prompt(seed: int, length: int) -> list[int]:
    """A prompt that shares nothing with those of other seeds."""
    chance = random.Random(seed)
    return [chance.randrange(64) for _ in range(length)]
