"""A random walk of many requests through the real scheduler, cache and engine, with every token checked.

Chats grow, branch at any token, are asked again, join others in a step and are cancelled, in a budget that does not hold
them; the walk evicts from device and host and clears lanes in between. Every request is greedy. When one has ended, stock
transformers computes its whole sequence without a cache: each token must be its best one, or so near to the best that
rounding decides, and its log-probability must be the same up to rounding.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import torch

from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency.memory import Tiers
from bough.cache.tree.state import Tier
from bough.engines.torch.pooled.wiring import POOL_ATTENTION
from bough.generate.generation import ChunkSize
from bough.generate.request import Request
from bough.scheduling.job import Job
from bough.scheduling.scheduler import Scheduler
from bough.tokens import Tokens
from bough.types import Completion, SamplingParams
from tests.contract.large_parity import Stock
from tests.scenarios.model_world import check_arena
from tests.scenarios.torch_world import arena_of
from tests.scenarios.world import clear_idle_lanes
from tests.scheduling.concert import Client, Letters

FLOOR = 1e-4
"""How far logits may be apart in float32."""

ROUNDING = 4.0
"""In half precision: how many times as far from float32 as stock transformers is at its worst on the same sequence."""


@dataclass(frozen=True)
class WalkSizes:
    """How many requests on how many lanes, how long they are, and what memory there is for them, in rows."""

    requests: int = 30
    lanes: int = 16
    system_tokens: int = 40
    message_tokens: int = 12
    answer_tokens: int = 12
    chat_tokens: int = 140  # a longer chat begins anew
    device_rows: int = 3000
    host_rows: int = 1200
    chunk: int = 16
    page_tokens: int = 16


@dataclass
class WalkCounts:
    """What a walk has met: a walk that meets too little of it proves nothing."""

    ended: int = 0
    cancelled: int = 0
    refused: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    host_bytes: int = 0
    evicted_tokens: int = 0
    most_running: int = 0
    near_ties: int = 0


@dataclass(eq=False)
class Asked:
    """A request, and who listens to it."""

    ids: list[int]
    client: Client = field(default_factory=Client)


class SchedulerWalk:
    """One walk. `play` runs it; afterwards nothing is held."""

    def __init__(self, engine: Any, stock: Stock, sizes: WalkSizes, seed: int = 0) -> None:
        self.engine, self.sizes, self.counts = engine, sizes, WalkCounts()
        self._stock = stock
        self._chance = random.Random(seed)
        groups = engine.groups
        row_bytes = sum(group.bytes_per_token for group in groups)
        state_bytes = sum(group.state_bytes for group in groups)
        host_bytes = sizes.host_rows * row_bytes + 8 * state_bytes
        device_bytes = sizes.device_rows * row_bytes + 8 * sizes.lanes * state_bytes
        engine.limit_device(device_bytes)
        engine.limit_host(host_bytes)
        self._arena = arena_of(engine) if engine.describe()["attention"] == POOL_ATTENTION else None
        self._used_before = self._arena.used_bytes if self._arena is not None else 0
        ticks = itertools.count(1)
        self._clock = lambda: next(ticks) / 100  # not the machine's: a walk is the same each time
        self.cache = PrefixCache(
            engine,
            [engine.make_lane() for _ in range(sizes.lanes)],
            budget_bytes=device_bytes,
            page_tokens=sizes.page_tokens,
            clock=self._clock,
            wall=self._clock,
            tiers=Tiers(engine, host_bytes) if engine.has_host else None,
        )
        self._scheduler = Scheduler(engine, self.cache, ChunkSize(sizes.chunk), self._clock)
        self._systems = [self._draw(sizes.system_tokens) for _ in range(3)]
        self._chats: list[list[int]] = []
        self._open: list[Asked] = []

    def play(self) -> WalkCounts:
        """Ask, turn and disturb until all requests have ended; then give everything back."""
        left = self.sizes.requests
        while left or self._open:
            for _ in range(min(left, self._draw_arrivals())):
                self._ask()
                left -= 1
            self._disturb()
            self._turn()
        self.counts.evicted_tokens = self.cache.residency.evictor.counts.tokens
        self.cache.upkeep.clear()
        self._check_empty()
        return self.counts

    def _draw_arrivals(self) -> int:
        """How many requests come before the next turn: few, or now and then as many as there are lanes."""
        chance = self._chance.random()
        return self.sizes.lanes if chance < 0.06 else int(chance < 0.3)

    def _draw(self, count: int) -> list[int]:
        return [self._chance.randrange(3, self.engine.vocab_size) for _ in range(count)]

    def _ask(self) -> None:
        """A new chat, one that goes on, one that branches off at any token, or one that is asked again."""
        chat = list(self._chance.choice(self._chats)) if self._chats and self._chance.random() < 0.8 else []
        kind = self._chance.random()
        if not chat or len(chat) > self.sizes.chat_tokens:
            chat = list(self._chance.choice(self._systems))
        elif kind < 0.4:
            del chat[self._chance.randrange(1, len(chat) + 1) :]
        if kind < 0.9:
            chat += self._draw(self._chance.randrange(1, self.sizes.message_tokens + 1))
        asked = Asked(chat)
        params = SamplingParams(
            max_tokens=self._chance.randrange(1, self.sizes.answer_tokens + 1),
            ignore_eos=True,
            logprobs=self._chance.choice([None, 0]),
        )
        request, client = Request(Tokens.of(chat), params), asked.client
        job = Job(self.engine, request, Letters(), None, self._clock, client, asks_to_end=lambda: client.is_gone)
        self._scheduler.add(job)
        self._open.append(asked)

    def _disturb(self) -> None:
        """Now and then cancel a request, evict something from a tier, or clear the idle lanes."""
        chance, evictor = self._chance.random(), self.cache.residency.evictor
        if chance < 0.04 and self._open:
            self._chance.choice(self._open).client.is_gone = True
        elif chance < 0.20:
            evictor.evict_one(Tier.DEVICE)
        elif chance < 0.30 and self.cache.memory.host_budget_bytes:
            evictor.evict_one(Tier.HOST)
        elif chance < 0.35:
            clear_idle_lanes(self.cache)

    def _turn(self) -> None:
        self._scheduler.turn()
        self.cache.check()
        if self._arena is not None:
            check_arena(self._arena, self.cache, self._used_before)
        self.counts.most_running = max(self.counts.most_running, len(self._scheduler.running))
        for asked in [asked for asked in self._open if asked.client.is_done]:
            assert not asked.client.mistakes
            self._open.remove(asked)
            self._end(asked)

    def _end(self, asked: Asked) -> None:
        completion = asked.client.completion
        if completion is None:
            self.counts.refused += 1
            return
        self.counts.ended += 1
        self.counts.cancelled += completion.finish_reason == "cancelled"
        self.counts.tokens += len(completion.token_ids)
        self.counts.cached_tokens += completion.usage.cached_tokens
        self.counts.host_bytes += completion.timings.loading.host_bytes
        self._chats.append([*asked.ids, *completion.token_ids])
        if completion.token_ids:
            self._compare(asked.ids, completion)

    def _compare(self, prompt: list[int], completion: Completion) -> None:
        """Compare the tokens and their log-probabilities with what stock transformers computes without a cache."""
        ids = torch.tensor(completion.token_ids)
        at = [len(prompt) + number for number in range(len(ids))]
        whole, half = (each.cpu() for each in self._stock.logits([*prompt, *completion.token_ids[:-1]], at))
        allowed = max(FLOOR, ROUNDING * float((whole - half).abs().max()))
        behind = whole.max(dim=-1).values - whole.gather(1, ids[:, None])[:, 0]
        where = f"after {len(prompt)} tokens, of which {completion.usage.cached_tokens} were cached"
        assert float(behind.max()) <= allowed, f"a wrong token {where}: {behind.tolist()}, {allowed} is rounding"
        self.counts.near_ties += int((behind > 0).sum())
        if completion.logprobs:
            told = torch.tensor([each.logprob for each in completion.logprobs])
            off = (told - whole.log_softmax(-1).gather(1, ids[:, None])[:, 0]).abs()
            assert float(off.max()) <= 2 * allowed, f"wrong logits {where}: {off.tolist()}, {allowed} is rounding"

    def _check_empty(self) -> None:
        """Nothing is held any more: no byte of a lane, no page, no state; of a pool no slot but those of no lane."""
        self.cache.check()
        assert self.cache.lanes.num_busy == 0
        assert self.cache.lanes.nbytes == 0
        assert self.cache.memory.num_bytes[Tier.DEVICE] == self.cache.memory.num_bytes[Tier.HOST] == 0
        assert self.engine.held_bytes == 0
        if self._arena is not None:
            self._arena.check()
            assert self._arena.used_bytes == self._used_before
