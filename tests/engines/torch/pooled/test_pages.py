"""Pages and states in slots: cutting, joining and releasing by reference, to the host and back, read by other threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from bough.cache.tree.state import PAGE_TOKENS, Page, Tier
from bough.engines.shared.pool.slot_rows import SlotRows
from bough.engines.torch.host.pool import Piece
from bough.errors import EngineError
from tests.contract.lagging import make_lagging_transfers
from tests.engines.torch.pooled.parts import Parts, items_of, make_ids, make_parts
from tests.waiting import BOUND_S


@pytest.fixture(scope="module")
def made() -> Parts:
    return make_parts("llama")


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_next"])
def made_with_host(request: pytest.FixtureRequest) -> Parts:
    with patch("bough.engines.torch.lanes.pages.make_transfers", make_lagging_transfers):
        return make_parts(request.param)


@pytest.fixture
def llama(made: Parts) -> Iterator[Parts]:
    with made.empty_afterwards() as parts:
        yield parts


@pytest.fixture
def with_host(made_with_host: Parts) -> Iterator[Parts]:
    """Each kind of model, with copies to the host that come as late as they may."""
    with made_with_host.empty_afterwards() as parts:
        yield parts
    transfers = made_with_host.pages.transfers
    assert transfers is not None
    transfers.pool.check()


def rows_of(page: Page) -> SlotRows:
    assert isinstance(page.rows, SlotRows)
    return page.rows


def read(parts: Parts, page: Page) -> bytes:
    data = parts.pages.pack(page)
    assert data is not None
    return bytes(data)


def write_over_all_slots(parts: Parts) -> None:
    """Hand out every free slot and write to it, as lanes would."""
    for group in parts.layout.groups:
        slots = []
        while parts.arena.can_promise(group, 1):
            slots.append(parts.arena.take(group))
            parts.arena.add_page(slots[-1])
            parts.memory.slot_bytes(slots[-1]).fill_(0xFF)
        for slot in slots:
            parts.arena.drop_page(slot)


def test_pages_of_one_slot_are_published_cut_and_joined_without_a_copy(llama: Parts) -> None:
    (group,) = llama.row_groups
    lane = llama.lane(300, make_ids(40))
    used = llama.arena.used_bytes
    content = llama.memory.view(SlotRows(lane.rows_of(group).pieces[0].slot, 0, 40)).clone()

    page = lane.publish(group, 10, 40)
    left, right = llama.pages.cut(page, 25)

    assert page.rows is None
    assert rows_of(left).slot is rows_of(right).slot is lane.rows_of(group).pieces[0].slot
    assert [(each.start, each.end, each.nbytes) for each in (left, right)] == [
        (10, 25, 15 * group.bytes_per_token),
        (25, 40, 15 * group.bytes_per_token),
    ]
    assert llama.arena.used_bytes == used
    assert llama.pages.can_join(left, right)
    whole = llama.pages.join(left, right)
    assert (whole.start, whole.end) == (10, 40)
    assert torch.equal(llama.memory.view(rows_of(whole)), content[:, :, 10:40])
    assert llama.arena.used_bytes == used
    lane.clear()
    assert llama.arena.used_bytes == used  # of the page
    llama.pages.release(whole)
    assert llama.arena.used_bytes == 0


def test_neighbours_in_different_slots_stay_two_pages(llama: Parts) -> None:
    (group,) = llama.row_groups
    lane, other = llama.lane(300, make_ids(10)), llama.lane(300)
    first = lane.publish(group, 0, 10)
    other.adopt(10, llama.keep_rows(first))
    llama.compute.evaluate(other, make_ids(5))
    second = other.publish(group, 10, 15)

    assert rows_of(first).slot is not rows_of(second).slot
    assert not llama.pages.can_join(first, second)
    with pytest.raises(AssertionError, match="different slots"):
        llama.pages.join(first, second)
    for page in (first, second):
        llama.pages.release(page)


def test_a_slot_is_free_with_its_last_page_and_lane(llama: Parts) -> None:
    (group,) = llama.row_groups
    lane, other = llama.lane(300, make_ids(20)), llama.lane(300)
    slot_bytes = llama.arena.slot_bytes(group)
    pages = [lane.publish(group, 0, 8), lane.publish(group, 8, 20)]
    other.adopt(8, llama.keep_rows(pages[0]))

    lane.clear()
    llama.pages.release(pages[1])
    llama.pages.release(pages[0])
    assert llama.arena.used_bytes == slot_bytes  # the other lane looks at its first rows
    other.clear()

    assert llama.arena.used_bytes == 0


def test_a_page_that_was_released_before_is_our_own_mistake(llama: Parts) -> None:
    lane = llama.lane(300, make_ids(20))
    page = lane.publish(llama.row_groups[0], 0, 8)
    llama.pages.release(page)

    assert llama.pages.pack(page) is None
    with pytest.raises(AssertionError, match="released before"):
        llama.pages.release(page)


@pytest.mark.parametrize("num", [60, PAGE_TOKENS])
def test_packed_bytes_stay_as_they_are_when_the_slot_is_used_again(llama: Parts, num: int) -> None:
    (group,) = llama.row_groups
    page = llama.lane(300, make_ids(num)).publish(group, 0, num)
    llama.lanes[0].clear()
    data = llama.pages.pack(page)
    assert data is not None
    before = bytes(data)

    llama.pages.release(page)
    write_over_all_slots(llama)

    assert bytes(data) == before


def test_no_slot_is_lost_when_content_cannot_be_taken_in(llama: Parts) -> None:
    (group,) = llama.row_groups
    page = llama.lane(300, make_ids(20)).publish(group, 0, 20)
    data, used = read(llama, page), llama.arena.used_bytes

    with (
        patch("bough.engines.torch.pooled.pages.torch.empty", side_effect=torch.OutOfMemoryError),
        pytest.raises(EngineError),
    ):
        llama.pages.unpack_page(group, 0, 20, data, Tier.DEVICE)

    assert llama.arena.used_bytes == used
    llama.pages.release(page)


def test_a_page_whose_slot_was_handed_out_again_is_read_as_released() -> None:
    parts = make_parts("gemma3_text")
    full = parts.row_groups[1]  # two of its slots lie in a chunk, which is not given back while one is used
    pages = [parts.pages.page_of(full, SlotRows(parts.arena.take(full), 0, 20)) for _ in range(2)]
    old = Page(full, 0, 20, pages[0].rows, pages[0].nbytes)  # as a thread sees it that has read `rows` just before
    assert parts.pages.pack(old) is not None

    parts.pages.release(pages[0])
    assert parts.pages.pack(old) is None
    again = parts.arena.take(full)
    parts.arena.add_page(again)

    assert again is rows_of(old).slot
    assert parts.pages.pack(old) is None


def test_pages_are_read_right_or_not_at_all_while_slots_are_used_again(llama: Parts) -> None:
    (group,) = llama.row_groups
    shown: list[tuple[Page, int]] = []
    mistakes: list[str] = []
    counts = {True: 0, False: 0}
    looked, is_over = threading.Event(), threading.Event()

    def look() -> None:
        while not is_over.is_set():
            for page, number in shown[-3:]:
                data = llama.pages.pack(page)
                counts[data is not None] += 1
                if data is not None and set(bytes(data)) != {number}:
                    mistakes.append(f"{set(bytes(data))} in page {number}")
                looked.set()

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(250):
        slot = llama.arena.take(group)
        slot.mark = PAGE_TOKENS
        llama.memory.slot_bytes(slot).fill_(number)
        page = llama.pages.page_of(group, SlotRows(slot, 0, PAGE_TOKENS if number % 2 else 100))
        shown.append((page, number))
        if number >= 2:
            llama.pages.release(shown[-3][0])
        if number % 25 == 24:  # the reader gets its turns, also where this thread never has to wait for a processor
            for _ in range(5):
                looked.clear()
                looked.wait(BOUND_S)
    is_over.set()
    thread.join()
    for page, _ in shown[-2:]:
        llama.pages.release(page)

    assert not mistakes
    assert counts[True] > 0


def test_a_page_or_state_comes_back_from_the_host_as_it_was(with_host: Parts) -> None:
    ids = make_ids(40)
    lane = with_host.lane(300, ids)
    kept = with_host.keep(lane)
    before = [bytes(with_host.pages.pack(item) or b"") for item in items_of(kept)]
    lane.clear()
    used = with_host.arena.used_bytes
    moved = [item.nbytes for item in items_of(kept)]

    for item in items_of(kept):
        with_host.pages.to_host(item)
        assert item.tier is Tier.HOST and isinstance(item.rows if isinstance(item, Page) else item.data, Piece)
    assert with_host.arena.used_bytes == used - sum(with_host.arena.slot_bytes(item.group) for item in items_of(kept))
    write_over_all_slots(with_host)
    assert [bytes(with_host.pages.pack(item) or b"") for item in items_of(kept)] == before
    for item in items_of(kept):
        with_host.pages.to_device(item)

    assert [item.nbytes for item in items_of(kept)] == moved
    assert [bytes(with_host.pages.pack(item) or b"") for item in items_of(kept)] == before
    lane.reserve(300)
    lane.adopt(40, kept)
    assert with_host.is_answer(with_host.compute.step([lane], [5])[0], [*ids, 5])
    with_host.release(kept)


@pytest.mark.parametrize("num", [40, PAGE_TOKENS])
def test_a_lane_adopts_pages_from_the_host_into_slots_of_its_own(with_host: Parts, num: int) -> None:
    ids = make_ids(num)
    lane = with_host.lane(600, ids)
    kept = with_host.keep(lane)
    lane.clear()
    for item in items_of(kept):
        with_host.pages.to_host(item)
    lane.reserve(600)

    lane.adopt(num, kept)
    with_host.release(kept)

    assert with_host.is_answer(with_host.compute.step([lane], [5])[0], [*ids, 5])
    more = make_ids(30, seed=3)
    assert with_host.is_answer(with_host.compute.evaluate(lane, more), [*ids, 5, *more])


def test_pages_on_the_host_are_cut_and_joined_there(with_host: Parts) -> None:
    group = with_host.row_groups[0]
    page = with_host.lane(300, make_ids(30)).publish(group, 10, 30)
    before = read(with_host, page)
    with_host.pages.to_host(page)

    left, right = with_host.pages.cut(page, 17)
    whole = with_host.pages.join(left, right)

    assert whole.tier is Tier.HOST and read(with_host, whole) == before
    with_host.pages.release(whole)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_content_is_unpacked_into_either_tier(with_host: Parts, tier: Tier) -> None:
    ids = make_ids(40)
    lane = with_host.lane(300, ids)
    kept = with_host.keep(lane)

    for item in items_of(kept):
        data = bytes(with_host.pages.pack(item) or b"")
        if isinstance(item, Page):
            again = with_host.pages.unpack_page(item.group, item.start, item.end, data, tier)
        else:
            again = with_host.pages.unpack_state(item.group, item.offset, data, tier)
        assert again.tier is tier
        assert bytes(with_host.pages.pack(again) or b"") == data
        with_host.pages.release(again)
    with_host.release(kept)
