"""An engine whose state is the tokens themselves, so that every mistake of the cache shows.

Full attention keeps all tokens, a window the last ones, a recurrent group the whole list at its offset. Each group keeps
its own, and `evaluate` refuses to go on if they disagree. The engine counts what it handed out: each page and state must be
released or consumed exactly once.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from bough.cache.residency.rates import Rates
from bough.cache.tree.state import Block, Buffer, Group, GroupSource, Incoming, Kind, Lane, Page, RowSpan, State, Tier
from bough.engines.contract import Capabilities, EngineInfo, ScoredRun
from bough.errors import EngineError
from bough.tokens import pack, unpack
from bough.types import Draw, SampledToken

WINDOW = 4


def full(index: int = 0) -> Group:
    return Group(index, Kind.FULL, bytes_per_token=8)


def window(index: int = 0, size: int = WINDOW) -> Group:
    return Group(index, Kind.WINDOW, bytes_per_token=4, window=size)


def recurrent(index: int = 0) -> Group:
    return Group(index, Kind.RECURRENT, state_bytes=64)


MODELS: dict[str, tuple[Group, ...]] = {
    "full": (full(),),
    "full+window": (full(0), window(1)),
    "full+recurrent": (full(0), recurrent(1)),
    "recurrent+none+full+none": (recurrent(0), full(1)),
    "window+recurrent+full": (window(0), recurrent(1), full(2)),
    "window": (window(),),
    "recurrent": (recurrent(),),
}


class FakeLane:
    """A lane whose rows are tokens. `held` maps each group to (first row, tokens from there on)."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.capacity = 0
        self.held: dict[Group, tuple[int, list[int]]] = {group: (0, []) for group in engine.groups}

    def offset_of(self, group: Group) -> int:
        first, tokens = self.held[group]
        return first + len(tokens)

    @property
    def offset(self) -> int:
        offsets = {self.offset_of(group) for group in self.held}
        assert len(offsets) <= 1, f"the groups stand at {offsets}"
        return offsets.pop() if offsets else 0

    @property
    def nbytes(self) -> int:
        return self._bytes(self.capacity)

    def _bytes(self, capacity: int) -> int:
        return sum(
            group.state_bytes * bool(capacity)
            if group.kind is Kind.RECURRENT
            else group.bytes_per_token * (capacity if group.kind is Kind.FULL else min(capacity, 4 * group.window))
            for group in self.held
        )

    @property
    def own_bytes(self) -> int:
        return self.nbytes

    @property
    def shares_rows(self) -> bool:
        return False

    def blocks(self) -> tuple[Block, ...]:
        return ()

    def bytes_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        return self._bytes(max(self.capacity, num_tokens))

    def bytes_after_clear(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        return self._bytes(num_tokens)

    def peak_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        return self.bytes_for(num_tokens)

    def reserve(self, num_tokens: int, incoming: Incoming | None = None) -> None:
        self.engine.maybe_fail("reserve")
        self.capacity = max(self.capacity, num_tokens)

    def drop_reserve(self) -> None:
        pass

    def first_row(self, group: Group) -> int:
        return self.held[group][0]

    def adopt(self, offset: int, sources: Mapping[Group, GroupSource]) -> None:
        self.engine.maybe_fail("adopt")
        assert set(sources) == set(self.held) and offset <= self.capacity
        self.held = {group: self._adopted(group, offset, source) for group, source in sources.items()}
        assert self.offset == offset

    def _adopted(self, group: Group, offset: int, source: GroupSource) -> tuple[int, list[int]]:
        first, tokens = self.held[group]
        for item in (*source.pages, *([source.state] if source.state else [])):
            assert item in self.engine.live, f"adopting what was released {item}"
            assert item.tier is not Tier.DISK
        if group.kind is Kind.RECURRENT:
            if source.state is None:
                assert source.live == offset == (len(tokens) if offset else 0)
                return 0, tokens[:offset]
            assert source.state.offset == offset
            return 0, list(source.state.data)
        if group.kind is Kind.WINDOW and source.live:
            assert source.live == offset and first <= group.first_needed(offset) and offset <= first + len(tokens)
            return first, tokens[: offset - first]
        rows = dict(enumerate(tokens[: source.live])) if group.kind is Kind.FULL else {}
        for page in source.pages:
            rows |= {at: page.rows[at - page.start] for at in range(page.start, page.end) if source.live <= at < offset}
        start = group.first_needed(offset) if group.kind is Kind.WINDOW else 0
        return start, [rows[at] for at in range(start, offset)]

    def spans(self, group: Group, start: int, end: int) -> list[RowSpan]:
        return [RowSpan(start, end, None)]

    def publish(self, group: Group, start: int, end: int) -> Page:
        self.engine.maybe_fail("publish")
        first, tokens = self.held[group]
        assert first <= start < end <= first + len(tokens), "publishing rows that the lane does not hold"
        return self.engine.track(Page(group, start, end, tuple(tokens[start - first : end - first]), 0))

    def capture(self, group: Group) -> State:
        self.engine.maybe_fail("capture")
        return self.engine.track(State(group, self.offset, tuple(self.held[group][1]), group.state_bytes))

    def clear(self) -> None:
        self.capacity = 0
        self.held = {group: (0, []) for group in self.held}

    def feed(self, ids: Sequence[int], fail_after: int | None) -> None:
        before = self.offset
        for number, group in enumerate(self.held):
            if number == fail_after:
                raise EngineError(f"made to fail before group {number}")
            first, tokens = self.held[group]
            if group.kind is Kind.WINDOW:
                keep = max(first, group.first_needed(before))
                first, tokens = keep, tokens[keep - first :]
            self.held[group] = (first, [*tokens, *ids])
        assert self.offset <= self.capacity, "fed more than was reserved"


class FakeEngine:
    """The compute contract over tokens. The logits are a function of the whole sequence, as a model's are."""

    def __init__(
        self,
        groups: Sequence[Group] = MODELS["full"],
        *,
        vocab_size: int = 64,
        context_tokens: int = 4096,
        has_host: bool = False,
    ) -> None:
        self.has_host = has_host
        self.groups = tuple(groups)
        self.vocab_size = vocab_size
        self.context_tokens = context_tokens
        self.state_size = 8
        self.capabilities = Capabilities()
        self.info = EngineInfo("fake", "tokens", "unknown", "tokens")
        self.max_chunk_tokens = 8192
        self.num_clipped = 0
        self.live: set[Page | State] = set()
        self.evaluated: list[int] = []  # tokens per call
        self.fail_next: str | None = None  # the call that fails next: "evaluate", "publish", "cut", …
        self.fail_with: type[Exception] = EngineError
        self.fail_after_groups = 0

    def describe(self) -> dict[str, str]:
        return {"engine": "fake"}

    def default_budget_bytes(self) -> int:
        return 1 << 20

    def make_lane(self) -> Lane:
        return FakeLane(self)

    def maybe_fail(self, where: str) -> None:
        if self.fail_next == where:
            self.fail_next = None
            raise self.fail_with(f"made to fail in {where}")

    def evaluate(self, lane: Lane, ids: Sequence[int]) -> tuple[float, ...]:
        feeding: Any = lane
        assert ids
        fails = self.fail_next == "evaluate"
        self.fail_next = None if fails else self.fail_next
        feeding.feed(ids, self.fail_after_groups if fails else None)
        if fails:
            raise EngineError("made to fail after the last group")
        self.evaluated.append(len(ids))
        return self._logits(feeding.held)

    def _logits(self, held: dict[Group, tuple[int, list[int]]]) -> tuple[float, ...]:
        """Scores that depend on everything any group holds; groups that disagree give other scores, and a failed check."""
        whole = [tokens for group, (_, tokens) in held.items() if group.kind is not Kind.WINDOW]
        for group, (first, tokens) in held.items():
            for other in whole:
                assert tokens == other[first:], f"group {group.index} holds other tokens than the rest"
        return self._logits_after(whole[0] if whole else next(iter(held.values()))[1][-WINDOW:])

    def _logits_after(self, tokens: Sequence[int]) -> tuple[float, ...]:
        chance = random.Random(zlib.crc32(pack(tokens)))
        return tuple(chance.gauss(0, 1) for _ in range(self.vocab_size))

    def evaluate_scored(self, lane: Lane, ids: Sequence[int], following: Sequence[int], num_top: int) -> ScoredRun:
        from tests.reference_sampler import score

        logits = self.evaluate(lane, ids)
        fed: dict[Group, tuple[int, list[int]]] = lane.held  # type: ignore[attr-defined]
        is_whole = any(group.kind is not Kind.WINDOW for group in fed)
        held = next(tokens for group, (_, tokens) in fed.items() if not is_whole or group.kind is not Kind.WINDOW)
        scores = []
        for number, token_id in enumerate(following):
            before = held[: len(held) - len(ids) + number + 1]
            scores.append(score(self._logits_after(before if is_whole else before[-WINDOW:]), token_id, num_top))
        return ScoredRun(logits, scores)

    def evaluate_state(self, lane: Lane, ids: Sequence[int]) -> list[float]:
        return list(self.evaluate(lane, ids)[: self.state_size])

    def step(self, lanes: Sequence[Lane], ids: Sequence[int]) -> list[tuple[float, ...]]:
        return [self.evaluate(lane, [token]) for lane, token in zip(lanes, ids, strict=True)]

    def sample(self, logits: Sequence[Any], draws: Sequence[Draw]) -> list[SampledToken]:
        from tests.reference_sampler import sample

        return [sample(each, draw) for each, draw in zip(logits, draws, strict=True)]

    def track(self, item: Any) -> Any:
        if isinstance(item, Page):
            item.nbytes = (item.end - item.start) * item.group.bytes_per_token
        self.live.add(item)
        return item

    def content(self, item: Page | State) -> Sequence[int]:
        """The tokens of a page or state in memory."""
        tokens: Sequence[int] = item.rows if isinstance(item, Page) else item.data
        return tokens

    def device_bytes(self, item: Page | State) -> int:
        return item.content_bytes

    def cut(self, page: Page, at: int) -> tuple[Page, Page]:
        assert page.start < at < page.end
        self.maybe_fail("cut")
        middle = at - page.start
        left = self.track(Page(page.group, page.start, at, page.rows[:middle], 0, tier=page.tier))
        right = self.track(Page(page.group, at, page.end, page.rows[middle:], 0, tier=page.tier))
        self.release(page)
        return left, right

    def can_join(self, left: Page, right: Page) -> bool:
        return left.tier is right.tier

    def join(self, left: Page, right: Page) -> Page:
        assert left.group is right.group and left.end == right.start and left.tier is right.tier
        self.maybe_fail("join")
        rows = left.rows + right.rows
        self.release(left)
        self.release(right)
        return self.track(Page(left.group, left.start, right.end, rows, 0, tier=left.tier))

    def release(self, item: Page | State) -> None:
        self.live.remove(item)  # a KeyError is a double release

    def pack(self, item: Page | State) -> bytes | None:
        content = item.rows if isinstance(item, Page) else item.data
        return None if content is None or item not in self.live else self.pack_tokens(item, content)

    def pack_tokens(self, item: Page | State, content: Sequence[int]) -> bytes:
        if isinstance(item, State):
            return pack(content)
        padding = bytes(item.group.bytes_per_token - 4)
        return b"".join(pack([token]) + padding for token in content)

    def packed_bytes(self, item: Page | State) -> int:
        return (item.end - item.start) * item.group.bytes_per_token if isinstance(item, Page) else 4 * item.offset

    def unpack_page(self, group: Group, start: int, end: int, data: Buffer, tier: Tier = Tier.DEVICE) -> Page:
        self.maybe_fail("unpack")
        size = group.bytes_per_token
        if len(data) != size * (end - start):
            raise ValueError(f"{len(data)} bytes for {end - start} rows of {size} bytes")
        rows = tuple(unpack(bytes(data[at : at + 4]))[0] for at in range(0, len(data), size))
        return self.track(Page(group, start, end, rows, 0, tier=tier))

    def unpack_state(self, group: Group, offset: int, data: Buffer, tier: Tier = Tier.DEVICE) -> State:
        self.maybe_fail("unpack")
        if len(data) != 4 * offset:
            raise ValueError(f"{len(data)} bytes for a state of {4 * offset} bytes")
        return self.track(State(group, offset, tuple(unpack(bytes(data))), group.state_bytes, tier))

    def to_host(self, item: Page | State) -> None:
        assert item in self.live and self.has_host and item.tier is Tier.DEVICE
        self.maybe_fail("to_host")
        item.tier = Tier.HOST

    def to_device(self, item: Page | State) -> None:
        assert item in self.live and item.tier is Tier.HOST
        self.maybe_fail("to_device")
        item.tier = Tier.DEVICE

    def host_bytes(self) -> int:
        return sum(item.nbytes for item in self.live if item.tier is Tier.HOST)

    def limit_device(self, budget_bytes: int) -> None:
        pass

    def limit_host(self, budget_bytes: int) -> None:
        pass

    def host_seconds_per_byte(self) -> float | None:
        return None

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        self.live.clear()


class FixedRates(Rates):
    """Rates that are given, and never change."""

    def __init__(self, token_s: float | None = None, byte_s: dict[Tier, float] | None = None) -> None:
        super().__init__()
        self._fixed_token_s = token_s
        self._fixed_byte_s = byte_s or {}

    def byte_s(self, tier: Tier) -> float:
        return self._fixed_byte_s.get(tier, 0.0)

    def prefill_s(self, start: int, end: int) -> float | None:
        return None if self._fixed_token_s is None else (end - start) * self._fixed_token_s
