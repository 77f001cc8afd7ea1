"""An engine that computes nothing, so that a benchmark measures the host alone; and its vocabulary of short words.

It is the engine of the replay, which counts, with the rest of the contract: the tokens of an answer follow each other in a
fixed order. A step can take a fixed time, as it does on a device while its host delivers the tokens before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bough.cache.tree.state import Buffer, Group, Lane, Page, State, Tier
from bough.engines.contract import Capabilities, EngineInfo, ScoredRun
from bough.replay.engine import CountingEngine, CountingLane, make_page
from bough.types import Draw, SampledToken

NUM_BYTES = 256  # the first tokens are single bytes, so that any prompt can be encoded
VOCAB_SIZE = 8192
_ANSWER_IDS = 4093  # a prime number, so that no lane repeats itself soon
_LETTERS = "aeiouhlmnprstdbk"


class NullEngine(CountingEngine):
    """The compute contract without computing. The logits of a lane are its number of tokens.

    A step takes `step_s`, and begins when the one before has ended, even if the host asks later: the device is one step
    ahead. Waiting for it does not hold the interpreter lock.
    """

    vocab_size = VOCAB_SIZE
    state_size = 1
    context_tokens = 1 << 20
    capabilities = Capabilities()
    info = EngineInfo("null", "nothing", "cpu", "nothing")
    max_chunk_tokens = 8192
    has_host = False
    num_clipped = 0

    def __init__(self, step_s: float = 0.0) -> None:
        super().__init__()
        self._num_sampled = 0
        self._step_s = step_s
        self._ready_s = 0.0  # when the last step had ended

    def describe(self) -> dict[str, str]:
        return {"engine": "null"}

    def default_budget_bytes(self) -> int:
        return 1 << 40

    def evaluate(self, lane: Lane, ids: Sequence[int]) -> int:
        assert isinstance(lane, CountingLane)
        lane.offset += len(ids)
        return lane.offset

    def evaluate_scored(self, lane: Lane, ids: Sequence[int], following: Sequence[int], num_top: int) -> ScoredRun:
        """Every token is certain."""
        return ScoredRun(self.evaluate(lane, ids), [SampledToken(token_id, 0.0) for token_id in following])

    def evaluate_state(self, lane: Lane, ids: Sequence[int]) -> list[float]:
        return [float(self.evaluate(lane, ids))]

    def step(self, lanes: Sequence[Lane], ids: Sequence[int]) -> list[int]:
        logits = [self.evaluate(lane, (token_id,)) for lane, token_id in zip(lanes, ids, strict=True)]
        if self._step_s:
            now = time.perf_counter()
            self._ready_s = max(self._ready_s + self._step_s, now)
            time.sleep(self._ready_s - now)
        return logits

    def sample(self, logits: Sequence[int], draws: Sequence[Draw]) -> list[SampledToken]:
        """Choose words, never single bytes, that differ between lanes and from step to step."""
        start = self._num_sampled = self._num_sampled + len(draws)
        return [SampledToken(NUM_BYTES + 7 * number % _ANSWER_IDS) for number in range(start, start + len(draws))]

    def pack(self, item: Page | State) -> bytes:
        return bytes(self.packed_bytes(item))

    def packed_bytes(self, item: Page | State) -> int:
        return item.content_bytes

    def unpack_page(self, group: Group, start: int, end: int, data: Buffer, tier: Tier = Tier.DEVICE) -> Page:
        return make_page(start, end)

    def unpack_state(self, group: Group, offset: int, data: Buffer, tier: Tier = Tier.DEVICE) -> State:
        raise AssertionError("there is no recurrent group")

    def to_host(self, item: Page | State) -> None:
        raise AssertionError("there is no host tier")

    def to_device(self, item: Page | State) -> None:
        raise AssertionError("there is no host tier")

    def host_bytes(self) -> int:
        return 0

    def limit_device(self, budget_bytes: int) -> None:
        pass

    def limit_host(self, budget_bytes: int) -> None:
        pass

    def host_seconds_per_byte(self) -> float | None:
        return None

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


class NullVocabulary:
    """The text of the tokens: words of a blank and five letters; none ends an answer."""

    eos_ids: frozenset[int] = frozenset()
    strips_leading_space = False

    def __init__(self) -> None:
        words = [f" {spell(number)}".encode() for number in range(VOCAB_SIZE - NUM_BYTES)]
        self._texts = [*(bytes([number]) for number in range(NUM_BYTES)), *words]

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts[token_id]


def spell(number: int) -> str:
    """A word of five letters for each number below 2^20."""
    return "".join(_LETTERS[number >> at & 15] for at in (16, 12, 8, 4, 0))
