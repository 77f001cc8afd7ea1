"""An engine for replays. It only counts, so that a replay measures only the decisions of the cache.

One token stands for one block of the trace, and its rows take one byte. A model with recurrent layers also has states of
`state_bytes` each. Lanes take no bytes: the rows of a running request are counted once, in the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bough.cache.tree.state import Block, Group, GroupSource, Incoming, Kind, Lane, Page, RowSpan, State

PAGE_TOKENS = 1
GROUP = Group(0, Kind.FULL, bytes_per_token=1)


class CountingLane:
    """A lane that has only an offset. It reports every captured state to the engine."""

    nbytes = own_bytes = 0
    shares_rows = False

    def __init__(self, on_capture: Callable[[State], object]) -> None:
        self.offset = 0
        self._on_capture = on_capture

    def blocks(self) -> tuple[Block, ...]:
        return ()

    def bytes_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        return 0

    bytes_after_clear = peak_for = bytes_for

    def reserve(self, num_tokens: int, incoming: Incoming | None = None) -> None:
        pass

    def drop_reserve(self) -> None:
        pass

    def first_row(self, group: Group) -> int:
        return 0

    def adopt(self, offset: int, sources: Mapping[Group, GroupSource]) -> None:
        self.offset = offset

    def spans(self, group: Group, start: int, end: int) -> list[RowSpan]:
        return [RowSpan(start, end, None)]

    def publish(self, group: Group, start: int, end: int) -> Page:
        assert start < end <= self.offset
        return make_page(start, end)

    def capture(self, group: Group) -> State:
        state = State(group, self.offset, None, group.state_bytes)
        self._on_capture(state)
        return state

    def clear(self) -> None:
        self.offset = 0


class CountingEngine:
    """Makes pages and states without content. There is a recurrent group only if `state_bytes` is not 0."""

    def __init__(self, state_bytes: int = 0) -> None:
        recurrent = Group(1, Kind.RECURRENT, state_bytes=state_bytes)
        self.groups = (GROUP, recurrent) if state_bytes else (GROUP,)
        self.num_states_made = 0
        self.held_state_bytes = 0

    def make_lane(self) -> CountingLane:
        return CountingLane(self._note_capture)

    def _note_capture(self, state: State) -> None:
        self.num_states_made += 1
        self.held_state_bytes += state.nbytes

    def advance(self, lane: Lane, num_tokens: int) -> None:
        assert isinstance(lane, CountingLane)
        lane.offset += num_tokens

    def device_bytes(self, item: Page | State) -> int:
        return item.content_bytes

    def cut(self, page: Page, at: int) -> tuple[Page, Page]:
        return make_page(page.start, at), make_page(at, page.end)

    def can_join(self, left: Page, right: Page) -> bool:
        return True

    def join(self, left: Page, right: Page) -> Page:
        return make_page(left.start, right.end)

    def release(self, item: Page | State) -> None:
        if isinstance(item, State):
            self.held_state_bytes -= item.nbytes


def make_page(start: int, end: int) -> Page:
    return Page(GROUP, start, end, None, (end - start) * GROUP.bytes_per_token)
