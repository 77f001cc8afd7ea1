"""Pages and states that have left their lane, counted: what every engine does with them alike."""

from __future__ import annotations

from typing import Any

from bough.cache.state import PAGE_TOKENS, Buffer, Group, Page, Place, State


class PageBook:
    """Makes and releases the pages and states of one model. `held_bytes` counts what was made and not yet given back.

    Content is the engine's: any object with `nbytes`, in memory of its own, that does not change once it was made.
    """

    def __init__(self) -> None:
        self.held_bytes = 0

    def make_page(self, group: Group, start: int, end: int, rows: Any) -> Page:
        """A page over `rows`, which nobody else refers to."""
        assert start < end and start // PAGE_TOKENS == (end - 1) // PAGE_TOKENS, f"rows [{start}, {end}) are no page"
        self.held_bytes += rows.nbytes
        return Page(group, start, end, rows, rows.nbytes, place=self._place(rows))

    def make_state(self, group: Group, offset: int, data: Any) -> State:
        """A state over `data`, which nobody else refers to."""
        self.held_bytes += data.nbytes
        return State(group, offset, data, data.nbytes, place=self._place(data))

    def release(self, item: Page | State) -> None:
        """Give the memory back."""
        assert content_of(item) is not None, f"{type(item).__name__} of group {item.group.index} was released before"
        self.held_bytes -= item.nbytes
        set_content(item, None)

    def _place(self, content: Any) -> Place:
        return Place.DEVICE


def content_of(item: Page | State) -> Any:
    """What the engine keeps of a page or state; None if it was released."""
    return item.rows if isinstance(item, Page) else item.data


def set_content(item: Page | State, content: Any) -> None:
    if isinstance(item, Page):
        item.rows = content
    else:
        item.data = content


def check_cut(page: Page, at: int) -> None:
    assert page.start < at < page.end, f"{at} is not inside [{page.start}, {page.end})"


def check_join(left: Page, right: Page) -> None:
    assert left.group == right.group and left.end == right.start, f"[.., {left.end}) and [{right.start}, ..) do not meet"
    assert left.place is right.place, f"a page on the {left.place.name} and one on the {right.place.name}"


def check_page_size(group: Group, start: int, end: int, data: Buffer) -> None:
    """Raise ValueError if these are not the bytes of that page."""
    _check_size(f"a page of rows [{start}, {end})", len(data), (end - start) * group.bytes_per_token)


def check_state_size(group: Group, offset: int, data: Buffer) -> None:
    """Raise ValueError if these are not the bytes of that state."""
    _check_size(f"a state at {offset}", len(data), group.state_bytes)


def packed_bytes(item: Page | State) -> int:
    """How many bytes the content of a page or state has, packed."""
    return (item.end - item.start) * item.group.bytes_per_token if isinstance(item, Page) else item.group.state_bytes


def _check_size(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(f"{what} has {wanted:,} bytes, and {found:,} were given")
