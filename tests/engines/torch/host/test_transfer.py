"""Content between places, on the torch engine: bytes without copies, a host that is full, copies that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bough.cache.tree.state import Tier
from bough.config import Settings
from bough.engines.torch import TorchEngine
from bough.errors import EngineError
from tests.contract.driving import give_back, items, keep, make_ids, new_lane, run
from tests.contract.lagging import SECONDS_PER_BYTE, make_lagging_transfers
from tests.tiny_models import make_model

LENGTH = 60
_needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


_POOL_BYTES = 256 << 20


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_cpu(folder: Path, name: str = "qwen3_next") -> TorchEngine:
    return TorchEngine(make_model(name), Settings(device="cpu", cache_folder=folder))


def make_lagging(folder: Path) -> TorchEngine:
    with patch("bough.engines.torch.lanes.pages.make_transfers", make_lagging_transfers):
        return make_cpu(folder)


def make_cuda(folder: Path) -> TorchEngine:
    model = make_model("qwen3_next").to(device="cuda", dtype=torch.bfloat16)
    engine = TorchEngine(model, Settings(device="cuda", cache_folder=folder), graphs="off")
    engine.limit_device(_POOL_BYTES)  # by default it takes most of the device, and the next engine finds none
    return engine


HOSTED = [make_lagging, pytest.param(make_cuda, marks=[pytest.mark.cuda, _needs_cuda])]
Make = Callable[[Path], TorchEngine]


def kept_at(engine: TorchEngine, length: int) -> Any:
    lane = new_lane(engine, length)
    run(engine, lane, make_ids(engine, length), [length])
    return keep(engine, lane)


def test_on_a_cpu_there_is_one_place_and_nothing_is_taken_for_another(tmp_path: Path) -> None:
    engine = make_cpu(tmp_path)
    kept = kept_at(engine, LENGTH)
    engine.limit_host(0)

    assert (engine.has_host, engine.host_bytes(), engine.host_seconds_per_byte()) == (False, 0, None)
    assert "host" not in engine.describe()
    with pytest.raises(AssertionError):
        engine.to_host(items(kept)[0])
    assert all(item.tier is Tier.DEVICE for item in items(kept))
    give_back(engine, kept)


def test_on_a_cpu_packing_copies_nothing_and_the_bytes_cannot_be_written(tmp_path: Path) -> None:
    engine = make_cpu(tmp_path, "llama")
    kept = kept_at(engine, LENGTH)
    (page,) = items(kept)

    packed = engine.pack(page)

    assert isinstance(packed, memoryview) and packed.readonly
    page.rows[0] = 123.0  # type: ignore[union-attr]
    assert packed.cast("f")[0] == 123.0  # the very same memory
    give_back(engine, kept)
    assert packed.cast("f")[0] == 123.0
    assert engine.pack(page) is None


def test_on_a_cpu_unpacking_keeps_a_buffer_that_can_be_written_and_copies_another(tmp_path: Path) -> None:
    engine = make_cpu(tmp_path, "llama")
    (group,) = engine.groups
    data = bytearray(10 * group.bytes_per_token)

    own = engine.unpack_page(group, 0, 10, data, Tier.HOST)
    other = engine.unpack_page(group, 0, 10, bytes(data))
    data[:4] = memoryview(torch.tensor([7.0]).numpy()).cast("B")  # type: ignore[arg-type]

    assert (float(own.rows[0]), float(other.rows[0])) == (7.0, 0.0)
    assert (own.tier, own.nbytes) == (Tier.DEVICE, len(data))
    engine.release(own)
    engine.release(other)


def test_bytes_that_lie_askew_are_unpacked_all_the_same(tmp_path: Path) -> None:
    engine = make_cpu(tmp_path, "llama")
    kept = kept_at(engine, LENGTH)
    (page,) = items(kept)
    packed = engine.pack(page)
    assert packed is not None

    copy = engine.unpack_page(page.group, 0, LENGTH, memoryview(bytearray(3) + packed)[3:])

    assert copy.rows.data_ptr() % 16 == 0
    assert engine.pack(copy) == packed
    engine.release(copy)
    give_back(engine, kept)


@pytest.mark.parametrize("make", HOSTED)
def test_a_host_that_is_full_refuses_and_leaves_the_item_as_it_was(make: Make, tmp_path: Path) -> None:
    engine = make(tmp_path)
    kept = kept_at(engine, LENGTH)
    before = [bytes(engine.pack(item) or b"") for item in items(kept)]
    held = engine.held_bytes
    engine.limit_host(0)

    for item, content in zip(items(kept), before, strict=True):
        with pytest.raises(EngineError, match="bytes of host memory"):
            engine.to_host(item)
        assert (item.tier, engine.pack(item)) == (Tier.DEVICE, content)

    assert (engine.host_bytes(), engine.held_bytes) == (0, held)
    engine.limit_host(2**30)
    for item in items(kept):
        engine.to_host(item)
    assert [engine.pack(item) for item in items(kept)] == before
    give_back(engine, kept)


@pytest.mark.parametrize("make", HOSTED)
def test_a_cut_that_the_host_has_no_memory_for_leaves_the_page_as_it_was(make: Make, tmp_path: Path) -> None:
    engine = make(tmp_path)
    kept = kept_at(engine, 256)
    page = next(item for item in items(kept) if item.tier is Tier.DEVICE and hasattr(item, "rows"))
    before = bytes(engine.pack(page) or b"")
    engine.limit_host(page.nbytes + 4096)
    engine.to_host(page)
    held = engine.held_bytes

    with pytest.raises(EngineError, match="bytes of host memory"):
        engine.cut(page, 100)

    assert (page.tier, engine.pack(page), engine.held_bytes) == (Tier.HOST, before, held)
    give_back(engine, kept)


def test_the_time_that_a_byte_takes_is_measured_by_what_came_in(tmp_path: Path) -> None:
    engine = make_lagging(tmp_path)
    kept = kept_at(engine, LENGTH)
    for item in items(kept):
        engine.to_host(item)
    assert engine.host_seconds_per_byte() is None

    new_lane(engine, LENGTH).adopt(LENGTH, kept)

    assert engine.host_seconds_per_byte() == pytest.approx(SECONDS_PER_BYTE)
    give_back(engine, kept)


@pytest.mark.cuda
@_needs_cuda
def test_a_device_tells_how_fast_content_came_in(tmp_path: Path) -> None:
    engine = make_cuda(tmp_path)
    kept = kept_at(engine, LENGTH)
    for item in items(kept):
        engine.to_host(item)
    new_lane(engine, LENGTH).adopt(LENGTH, kept)
    engine.synchronize()

    seconds = engine.host_seconds_per_byte()

    assert seconds is not None and 0 < seconds < 1e-3
    give_back(engine, kept)


def test_a_closed_engine_has_given_its_host_memory_back(tmp_path: Path) -> None:
    engine = make_lagging(tmp_path)
    kept = kept_at(engine, LENGTH)
    for item in items(kept):
        engine.to_host(item)
    assert engine.host_bytes() > 0
    give_back(engine, kept)

    engine.close()

    assert engine.host_bytes() == 0


def keep_device_busy(seconds: float, stream: Any = None) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]


@pytest.mark.cuda
@_needs_cuda
def test_moving_and_restoring_return_before_the_device_is_done(tmp_path: Path) -> None:
    engine = make_cuda(tmp_path)
    kept = kept_at(engine, LENGTH)
    lane, warm = new_lane(engine, LENGTH), new_lane(engine, LENGTH)
    for item in items(kept):
        engine.to_host(item)
    warm.adopt(LENGTH, kept)
    for item in items(kept):
        engine.to_device(item)
    engine.synchronize()

    is_free = torch.cuda.Event()  # type: ignore[no-untyped-call]
    keep_device_busy(3.0)
    is_free.record()
    for item in items(kept):
        engine.to_host(item)
    lane.adopt(LENGTH, kept)
    for item in items(kept):
        engine.to_device(item)

    assert not is_free.query()
    engine.synchronize()
    give_back(engine, kept)


@pytest.mark.cuda
@_needs_cuda
def test_device_memory_is_not_used_again_before_it_was_copied_out(tmp_path: Path) -> None:
    engine = make_cuda(tmp_path)
    (group,) = (group for group in engine.groups if group.bytes_per_token)
    lanes = [new_lane(engine, 256) for _ in range(2)]
    for seed, lane in enumerate(lanes):
        run(engine, lane, make_ids(engine, 256, seed), [256])
    wanted = [lane.publish(group, 0, 256) for lane in lanes]

    keep_device_busy(0.3, engine._pages.transfers.streams._out)  # type: ignore[union-attr]
    pages = []
    for lane in lanes * 10:
        pages.append(lane.publish(group, 0, 256))
        engine.to_host(pages[-1])  # from now on its device memory is free for the next one

    contents = [engine.pack(page) for page in wanted]
    assert contents[0] != contents[1]
    assert [engine.pack(page) for page in pages] == contents * 10
    for page in (*pages, *wanted):
        engine.release(page)


@pytest.mark.cuda
@_needs_cuda
def test_a_lane_takes_in_every_page_although_the_ring_has_three(tmp_path: Path) -> None:
    engine = make_cuda(tmp_path)
    length = 256 * 7
    kept = kept_at(engine, length)
    direct, staged = new_lane(engine, length), new_lane(engine, length)
    direct.adopt(length, kept)
    for item in items(kept):
        engine.to_host(item)

    for late in (None, engine._pages.transfers.streams._in):  # type: ignore[union-attr]
        keep_device_busy(0.1, late)
        for _ in range(2):
            staged.reserve(length)  # what was promised before is used up
            staged.adopt(length, kept)

    again, wanted = keep(engine, staged), keep(engine, direct)
    assert [engine.pack(item) for item in items(again)] == [engine.pack(item) for item in items(wanted)]
    for each in (kept, again, wanted):
        give_back(engine, each)
