"""The allocator of pages and states, without any tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from bough.cache.tree.state import PAGE_TOKENS, Buffer, Group, Page, Range, State, Tier
from bough.engines.shared.errors import as_engine_errors


class PageAllocator(ABC):
    """Makes and releases every page and state of one model. `held_bytes` counts what was made and not yet released.

    The content belongs to the engine: any object with `nbytes`, in its own memory, that never changes once it was made.
    An engine adds how content is copied.
    """

    def __init__(self) -> None:
        self.held_bytes = 0

    def make_page(self, group: Group, start: int, end: int, rows: Any) -> Page:
        """A page over `rows`; the caller keeps no reference to them."""
        assert start < end and start // PAGE_TOKENS == (end - 1) // PAGE_TOKENS, f"rows [{start}, {end}) are no page"
        page = Page(group, start, end, None, 0)
        self._put(page, rows)
        return page

    def make_state(self, group: Group, offset: int, data: Any) -> State:
        """A state over `data`; the caller keeps no reference to it."""
        state = State(group, offset, None, 0)
        self._put(state, data)
        return state

    def release(self, item: Page | State) -> None:
        assert content_of(item) is not None, f"{type(item).__name__} of group {item.group.index} was released before"
        self.held_bytes -= item.nbytes
        set_content(item, None)

    def device_bytes(self, item: Page | State) -> int:
        """The size of an item's content on the device, wherever it is now."""
        return item.content_bytes

    @as_engine_errors("cutting a page")
    def cut(self, page: Page, at: int) -> tuple[Page, Page]:
        """Rows [start, at) and [at, end) as two new pages. The given page is consumed."""
        assert page.start < at < page.end, f"{at} is not inside [{page.start}, {page.end})"
        first, second = self._slice(page, page.start, at), self._slice(page, at, page.end)
        left = self.make_page(page.group, page.start, at, first)
        right = self.make_page(page.group, at, page.end, second)
        self.release(page)
        return left, right

    def can_join(self, left: Page, right: Page) -> bool:
        """Whether these neighbours can become one page: if they are in one tier."""
        return left.tier is right.tier

    @as_engine_errors("joining pages")
    def join(self, left: Page, right: Page) -> Page:
        """Rows [a, b) and [b, c) as one new page [a, c). Both given pages are consumed."""
        assert left.group == right.group and left.end == right.start, (
            f"[.., {left.end}) and [{right.start}, ..) do not meet"
        )
        assert self.can_join(left, right), f"pages in {left.tier.name} and {right.tier.name}, or in different slots"
        page = self.make_page(left.group, left.start, right.end, self._joined(left, right))
        self.release(left)
        self.release(right)
        return page

    @as_engine_errors("reading content out")
    def pack(self, item: Page | State) -> memoryview | None:
        """The content as plain bytes, bit for bit; None if it was released. Any thread may call this at any time.

        The bytes stay valid and unchanged as long as they are referred to, even after the item is moved or released.
        """
        content = content_of(item)  # read once: another thread may move or release the item meanwhile
        return None if content is None else self._to_bytes(content)

    def unpack_page(self, group: Group, start: int, end: int, data: Buffer, tier: Tier = Tier.DEVICE) -> Page:
        """A new page from the result of `pack`. Raises ValueError if the size is wrong."""
        _check_size(f"a page of rows [{start}, {end})", data, (end - start) * group.bytes_per_token)
        return self.make_page(group, start, end, self._from_bytes(group, (start, end), data, tier))

    def unpack_state(self, group: Group, offset: int, data: Buffer, tier: Tier = Tier.DEVICE) -> State:
        """A new state from the result of `pack`. Raises ValueError if the size is wrong."""
        _check_size(f"a state at {offset}", data, group.state_bytes)
        return self.make_state(group, offset, self._from_bytes(group, (offset, offset), data, tier))

    def _put(self, item: Page | State, content: Any) -> None:
        """Make this the content of an item, and count it instead of what the item had."""
        set_content(item, content)
        self._count(item, content.nbytes, Tier.DEVICE)

    def _count(self, item: Page | State, nbytes: int, tier: Tier) -> None:
        self.held_bytes += nbytes - item.nbytes
        item.nbytes, item.tier = nbytes, tier

    @abstractmethod
    def _slice(self, page: Page, start: int, end: int) -> Any:
        """Rows [start, end) of a page, copied."""

    @abstractmethod
    def _joined(self, left: Page, right: Page) -> Any:
        """The rows of both pages, copied."""

    @abstractmethod
    def _to_bytes(self, content: Any) -> memoryview:
        """Content as read-only bytes."""

    @abstractmethod
    def _from_bytes(self, group: Group, span: Range, data: Buffer, tier: Tier) -> Any:
        """The content of a group's page or state with this span, from the result of `_to_bytes`."""


def content_of(item: Page | State) -> Any:
    """The engine's object for a page or state; None if it was released."""
    return item.rows if isinstance(item, Page) else item.data


def set_content(item: Page | State, content: Any) -> None:
    if isinstance(item, Page):
        item.rows = content
    else:
        item.data = content


def _check_size(what: str, data: Buffer, wanted: int) -> None:
    if len(data) != wanted:
        raise ValueError(f"{what} has {wanted:,} bytes, and {len(data):,} were given")
