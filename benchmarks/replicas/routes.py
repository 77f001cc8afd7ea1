"""Ways to choose a replica for each request of a trace: Bough's own, and those of others for comparison."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from benchmarks.replicas.replica import digest_of
from bough.cache.tree.state import Tier
from bough.replay.trace import TraceRequest
from bough.routing.page_reports import PageMessage
from bough.routing.rates import ReplicaRates
from bough.routing.router import Router, RoutingRequest

SEED = 1
CACHE_THRESHOLD = 0.3
BALANCE_ABS = 64
BALANCE_REL = 1.5
"""The defaults of vllm-router and of SGLang's gateway."""


@dataclass(frozen=True)
class CopiedPrefix:
    """The first blocks of a prompt that a store brings from another replica, when that has computed them."""

    source: int
    num_blocks: int
    is_coming: bool


class Route(Protocol):
    """Chooses replicas by their numbers, and is told what becomes of the requests."""

    def choose(self, number: int, request: TraceRequest, now: float) -> int:
        """The replica for request `number`."""
        ...

    def first_token(self, number: int, now: float) -> None: ...

    def finished(self, replica: int) -> None: ...

    def told(self, message: PageMessage) -> None: ...

    def predicted_s(self, number: int) -> float | None:
        """The time to the first token that was predicted for a request; None if this way predicts none."""
        ...

    def copied(self, number: int) -> CopiedPrefix | None:
        """What a store brings to the replica that was chosen for a request."""
        ...


class Outstanding:
    """Counts the requests under way at each replica, and learns nothing else."""

    def __init__(self, num_replicas: int) -> None:
        self.chance = random.Random(SEED)
        self.loads = [0] * num_replicas

    def choose(self, number: int, request: TraceRequest, now: float) -> int:
        chosen = self.pick(request)
        self.loads[chosen] += 1
        return chosen

    def pick(self, request: TraceRequest) -> int:
        raise NotImplementedError

    def pick_least(self) -> int:
        """One of the replicas with the fewest requests under way."""
        least = min(self.loads)
        return self.chance.choice([replica for replica, load in enumerate(self.loads) if load == least])

    def first_token(self, number: int, now: float) -> None:
        pass

    def finished(self, replica: int) -> None:
        self.loads[replica] -= 1

    def told(self, message: PageMessage) -> None:
        pass

    def predicted_s(self, number: int) -> float | None:
        return None

    def copied(self, number: int) -> CopiedPrefix | None:
        return None


class RoundRobin(Outstanding):
    """One after the other."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._next = -1

    def pick(self, request: TraceRequest) -> int:
        self._next = (self._next + 1) % len(self.loads)
        return self._next


class PowerOfTwo(Outstanding):
    """Of two replicas drawn at random the one with fewer requests under way."""

    def pick(self, request: TraceRequest) -> int:
        drawn = self.chance.sample(range(len(self.loads)), 2) if len(self.loads) > 1 else [0]
        return min(drawn, key=lambda replica: self.loads[replica])


class LongestPrefix(Outstanding):
    """The rule of vllm-router's and SGLang's `cache_aware`, over blocks instead of characters.

    If the requests under way are unbalanced, by more than 64 and by more than half, the replica with the fewest takes the
    request. Otherwise the one takes it that was last sent the longest known prefix, if that is more than 0.3 of the prompt;
    else the one with the fewest under way. What was sent somewhere counts as held there: replicas tell nothing.
    """

    def __init__(self, num_replicas: int, block_tokens: int) -> None:
        super().__init__(num_replicas)
        self._block_tokens = block_tokens
        self._sent: dict[int, int] = {}  # block → the replica it was last sent to

    def pick(self, request: TraceRequest) -> int:
        chosen = self._choose(request)
        self._sent.update(dict.fromkeys(request.prompt, chosen))
        return chosen

    def _choose(self, request: TraceRequest) -> int:
        most, least = max(self.loads), min(self.loads)
        if most - least > BALANCE_ABS and most > BALANCE_REL * least:
            return self.pick_least()
        known = next((n for n, block in enumerate(request.prompt) if block not in self._sent), len(request.prompt))
        if known * self._block_tokens > CACHE_THRESHOLD * request.prompt_tokens:
            return self._sent[request.prompt[known - 1]]
        return self.pick_least()


class SoonestRoute:
    """Bough's own: the replica with the smallest predicted time to the first token.

    With `store_token_s`, a store that all share brings a token in that time.
    """

    def __init__(self, num_replicas: int, block_tokens: int, token_s: float, store_token_s: float | None = None) -> None:
        self.router = Router(block_tokens)
        self._chance = random.Random(SEED)
        self._tickets: dict[int, int] = {}
        self._predicted: dict[int, float] = {}
        self._copied: dict[int, CopiedPrefix] = {}
        self._block_tokens = block_tokens
        rates = ReplicaRates({0: token_s})
        if store_token_s is not None:
            rates = ReplicaRates({0: token_s}, {Tier.STORE: store_token_s}, 1, block_tokens)  # a token counts as a byte
        for replica in range(num_replicas):
            self.router.add(str(replica), rates)

    def choose(self, number: int, request: TraceRequest, now: float) -> int:
        asked = RoutingRequest(max(1, request.prompt_tokens), [digest_of(block) for block in request.prompt])
        routed = self.router.route(asked, now, self._chance.random())
        self._tickets[number] = routed.ticket
        self._predicted[number] = routed.best.total_s
        if (copy := routed.best.copy) is not None:
            self._copied[number] = CopiedPrefix(int(copy.source), copy.num_tokens // self._block_tokens, copy.is_coming)
        return int(routed.replica)

    def first_token(self, number: int, now: float) -> None:
        self.router.done(self._tickets.pop(number), now)

    def finished(self, replica: int) -> None:
        pass

    def told(self, message: PageMessage) -> None:
        self.router.apply(message)

    def predicted_s(self, number: int) -> float | None:
        return self._predicted[number]

    def copied(self, number: int) -> CopiedPrefix | None:
        return self._copied.get(number)
