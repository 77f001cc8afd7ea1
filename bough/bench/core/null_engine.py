"""An engine that computes nothing, so that a benchmark measures the host alone. Its vocabulary is short words.

A lane has only an offset, a page has a size and no content, and the tokens of an answer follow each other in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bough.cache.tree.state import Block, Buffer, Group, Incoming, Kind, Lane, Page, Source, Span, State, Tier
from bough.engines.contract import Capabilities, EngineInfo, ScoredRun
from bough.types import Draw, Sampled

VOCAB_SIZE = 4096
GROUP = Group(0, Kind.FULL, bytes_per_token=1)


class NullLane:
    """A lane that has only an offset."""

    nbytes = own_bytes = 0
    shares_rows = False

    def __init__(self) -> None:
        self.offset = 0

    def blocks(self) -> tuple[Block, ...]:
        return ()

    def bytes_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        return 0

    def bytes_after_clear(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        return 0

    def peak_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        return 0

    def reserve(self, num_tokens: int, incoming: Incoming | None = None) -> None:
        pass

    def drop_reserve(self) -> None:
        pass

    def first_row(self, group: Group) -> int:
        return 0

    def adopt(self, offset: int, sources: Mapping[Group, Source]) -> None:
        self.offset = offset

    def spans(self, group: Group, start: int, end: int) -> list[Span]:
        return [Span(start, end, None)]

    def publish(self, group: Group, start: int, end: int) -> Page:
        return _make_page(start, end)

    def capture(self, group: Group) -> State:
        raise AssertionError("there is no recurrent group")

    def clear(self) -> None:
        self.offset = 0


class NullEngine:
    """The compute contract without computing. The logits of a lane are the number of tokens that were sampled so far."""

    groups = (GROUP,)
    vocab_size = VOCAB_SIZE
    state_size = 1
    context_tokens = 1 << 20
    capabilities = Capabilities()
    info = EngineInfo("null", "nothing", "cpu", "nothing")
    max_chunk_tokens = 8192
    has_host = False

    def __init__(self) -> None:
        self._num_sampled = 0

    def describe(self) -> dict[str, str]:
        return {"engine": "null"}

    def default_budget_bytes(self) -> int:
        return 1 << 40

    def make_lane(self) -> NullLane:
        return NullLane()

    def evaluate(self, lane: Lane, ids: Sequence[int]) -> int:
        assert isinstance(lane, NullLane)
        lane.offset += len(ids)
        return lane.offset

    def evaluate_scored(self, lane: Lane, ids: Sequence[int], following: Sequence[int], num_top: int) -> ScoredRun:
        """Every token is certain."""
        return ScoredRun(self.evaluate(lane, ids), [Sampled(token_id, 0.0) for token_id in following])

    def evaluate_state(self, lane: Lane, ids: Sequence[int]) -> list[float]:
        return [float(self.evaluate(lane, ids))]

    def step(self, lanes: Sequence[Lane], ids: Sequence[int]) -> list[int]:
        return [self.evaluate(lane, (token_id,)) for lane, token_id in zip(lanes, ids, strict=True)]

    def sample(self, logits: Sequence[int], draws: Sequence[Draw]) -> list[Sampled]:
        """Choose tokens that differ between lanes and from step to step."""
        start = self._num_sampled = self._num_sampled + len(draws)
        return [Sampled(7 * number % VOCAB_SIZE) for number in range(start, start + len(draws))]

    def device_bytes(self, item: Page | State) -> int:
        return item.content_bytes

    def cut(self, page: Page, at: int) -> tuple[Page, Page]:
        return _make_page(page.start, at), _make_page(at, page.end)

    def can_join(self, left: Page, right: Page) -> bool:
        return True

    def join(self, left: Page, right: Page) -> Page:
        return _make_page(left.start, right.end)

    def release(self, item: Page | State) -> None:
        pass

    def pack(self, item: Page | State) -> bytes:
        return bytes(self.packed_bytes(item))

    def packed_bytes(self, item: Page | State) -> int:
        return item.content_bytes

    def unpack_page(self, group: Group, start: int, end: int, data: Buffer, tier: Tier = Tier.DEVICE) -> Page:
        return _make_page(start, end)

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
    """Words of a blank and four letters; none ends an answer."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        letters = b"aeiouhlmnprstdbk"
        places = (12, 8, 4, 0)
        self._words = [bytes([32, *(letters[word >> at & 15] for at in places)]) for word in range(VOCAB_SIZE)]

    def token_bytes(self, token_id: int) -> bytes:
        return self._words[token_id]


def _make_page(start: int, end: int) -> Page:
    return Page(GROUP, start, end, None, (end - start) * GROUP.bytes_per_token)
