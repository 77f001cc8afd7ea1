"""The host pool, in memory that is not pinned: what is handed out, when it is used again, and how much is taken."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from bough.engines.torch.host import pool as host_pool
from bough.engines.torch.host.pool import FRACTIONS, HostChunk, HostPool, Piece

SLAB = 64 * 1024
CHUNK = 4 * SLAB


@pytest.fixture
def pool() -> HostPool:
    return HostPool(SLAB, chunk_bytes=CHUNK)


@dataclass(eq=False)
class Late:
    """An event that notes when it was waited for."""

    number: int
    waits: list[int] = field(default_factory=list)

    def wait(self) -> None:
        self.waits.append(self.number)


def address(piece: Piece) -> int:
    return piece.memory.data_ptr()


@pytest.mark.parametrize(
    ("nbytes", "occupied"),
    [
        (1, SLAB // 32),
        (SLAB // 32, SLAB // 32),
        (SLAB // 32 + 1, SLAB // 16),
        (SLAB // 2, SLAB // 2),
        (SLAB // 2 + 1, SLAB),
        (SLAB, SLAB),
        (SLAB + 1, SLAB + 4096),
    ],
)
def test_a_piece_occupies_a_fraction_of_a_slab_or_its_own_size(pool: HostPool, nbytes: int, occupied: int) -> None:
    piece = pool.take(nbytes)

    assert (piece.memory.nbytes, piece.nbytes) == (nbytes, occupied)


def test_a_slab_is_rounded_up_so_that_its_fractions_are_aligned() -> None:
    pool = HostPool(5000)

    assert pool.slab_bytes == 6144
    assert pool.take(1).nbytes == 192


def test_what_is_written_to_pieces_stays_apart(pool: HostPool) -> None:
    chance = random.Random(0)
    pieces = [pool.take(chance.choice([1, 100, 3000, SLAB // 3, SLAB, 2 * SLAB])) for _ in range(60)]

    for number, piece in enumerate(pieces):
        piece.memory.fill_(number)

    assert all(bool((piece.memory == number).all()) for number, piece in enumerate(pieces))
    pool.check()


def test_fractions_share_a_slab_and_become_a_slab_again(pool: HostPool) -> None:
    pool.limit(CHUNK)
    pieces = [pool.take(SLAB // FRACTIONS) for _ in range(4 * FRACTIONS)]
    assert (pool.total_bytes, pool.free_bytes) == (CHUNK, 0)

    random.Random(1).shuffle(pieces)
    pieces.clear()

    assert pool.free_bytes == CHUNK
    pool.check()
    slabs = [pool.take(SLAB) for _ in range(4)]
    assert len({address(slab) for slab in slabs}) == 4
    assert pool.total_bytes == CHUNK


@pytest.mark.parametrize(
    "keep",
    [
        lambda piece: piece,
        lambda piece: piece.memory,
        lambda piece: piece.memory.view(torch.float32)[3:5],
        lambda piece: piece.memory.numpy().data.toreadonly()[7:9],
    ],
    ids=["the piece", "its memory", "a part in another type", "plain bytes"],
)
def test_memory_is_used_again_only_when_nothing_made_from_it_is_alive(
    pool: HostPool, keep: Callable[[Piece], object]
) -> None:
    pool.limit(SLAB)
    piece = pool.take(SLAB)
    where = address(piece)

    kept = keep(piece)
    del piece
    with pytest.raises(MemoryError):
        pool.take(SLAB)
    del kept

    assert address(pool.take(SLAB)) == where


def test_other_threads_may_let_go_at_any_time(pool: HostPool) -> None:
    pool.limit(CHUNK)
    handed: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()

    def let_go() -> None:
        while (piece := handed.get()) is not None:
            del piece

    threads = [threading.Thread(target=let_go) for _ in range(2)]
    for thread in threads:
        thread.start()
    chance = random.Random(2)
    for _ in range(1000):
        piece = pool.take(chance.choice([1, 5000, SLAB // 2]))
        piece.memory[0] = 1
        if handed.qsize() < 3:
            handed.put(piece)
    del piece
    for _ in threads:
        handed.put(None)
    for thread in threads:
        thread.join()

    pool.check()
    assert pool.free_bytes == pool.total_bytes == CHUNK


def test_pieces_outlive_a_closed_pool(pool: HostPool) -> None:
    piece = pool.take(100)
    piece.memory.fill_(7)

    pool.close()

    assert pool.total_bytes == 0
    assert bool((piece.memory == 7).all())


def test_nothing_is_taken_before_it_is_needed() -> None:
    assert HostPool(SLAB).total_bytes == 0


def test_memory_is_taken_a_chunk_at_a_time_and_the_next_one_before_the_last_piece_is_gone(pool: HostPool) -> None:
    pieces = [pool.take(SLAB), pool.take(SLAB)]
    assert pool.total_bytes == CHUNK

    pieces.append(pool.take(SLAB))

    assert pool.total_bytes == 2 * CHUNK
    pool.check()


def test_the_limit_bounds_growth_and_the_refusal_tells_the_numbers(pool: HostPool) -> None:
    pool.limit(5 * SLAB + 100)
    pieces = [pool.take(SLAB) for _ in range(5)]

    with pytest.raises(MemoryError, match=r"65,536 bytes.* of 327,780 327,680 are taken"):
        pool.take(1)

    assert pool.total_bytes == 5 * SLAB
    pieces.pop()
    assert pool.take(1).nbytes == SLAB // FRACTIONS


def test_a_lower_limit_gives_chunks_back_that_nobody_uses(pool: HostPool) -> None:
    pieces = [pool.take(SLAB) for _ in range(5)]
    assert pool.total_bytes == 2 * CHUNK
    del pieces[:4]

    pool.limit(CHUNK)

    assert pool.total_bytes == CHUNK
    pool.check()


def test_unused_slabs_make_way_for_larger_pieces(pool: HostPool) -> None:
    pool.limit(CHUNK)
    pieces = [pool.take(SLAB)]
    with pytest.raises(MemoryError):
        pool.take(3 * SLAB)

    pieces.clear()

    assert pool.take(3 * SLAB).nbytes == 3 * SLAB
    assert pool.total_bytes == 3 * SLAB
    pool.check()


def test_memory_that_the_system_refuses_is_a_memory_error_and_nothing_is_counted(
    pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int, pin_for: torch.device | None) -> HostChunk:
        raise MemoryError(f"no {nbytes:,} bytes of host memory to be had")

    pieces = [pool.take(SLAB), pool.take(SLAB)]
    monkeypatch.setattr(host_pool, "HostChunk", refuse)
    pieces += [pool.take(SLAB), pool.take(SLAB)]  # growing ahead fails, and nobody needed it

    with pytest.raises(MemoryError, match="262,144"):
        pool.take(SLAB)
    assert pool.total_bytes == CHUNK

    monkeypatch.undo()
    assert pool.take(SLAB).nbytes == SLAB


def test_more_memory_than_there_is_is_refused_with_the_number() -> None:
    with pytest.raises(MemoryError, match=f"{2**60:,}"):
        HostChunk(2**60, None)


def test_a_piece_that_comes_back_takes_the_last_copy_with_it(pool: HostPool) -> None:
    pool.limit(SLAB)
    waits: list[int] = []
    halves = [pool.take(SLAB // 2), pool.take(SLAB // 2)]
    halves[0].copied(Late(8, waits))
    halves[1].copied(Late(7, waits))
    halves.clear()

    whole = pool.take(SLAB)
    whole.wait()
    assert sorted(waits) == [7, 8]

    del whole
    first, second = pool.take(SLAB // 2), pool.take(SLAB // 2)
    first.wait()
    second.wait()
    assert sorted(waits) == [7, 7, 7, 8, 8, 8]


def test_a_chunk_is_given_back_only_when_the_device_has_done_with_it(pool: HostPool) -> None:
    late = Late(3)
    piece = pool.take(SLAB)
    piece.copied(late)
    del piece

    pool.limit(0)

    assert late.waits == [3]
    assert pool.total_bytes == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_pieces_are_pinned_to_the_byte() -> None:
    pool = HostPool(33 * 2**20, torch.device("cuda", 0), chunk_bytes=66 * 2**20)

    piece = pool.take(33 * 2**20)

    assert piece.memory.is_pinned()
    assert (pool.total_bytes, pool.problem) == (66 * 2**20, "")
    piece.memory.copy_(torch.arange(33 * 2**20, device="cuda", dtype=torch.int64).to(torch.uint8), non_blocking=True)
    torch.cuda.synchronize()
    assert int(piece.memory[1000]) == 1000 % 256
    del piece
    pool.close()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_chunk_that_cannot_be_registered_is_pinned_by_pytorch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(memory: memoryview) -> int:
        raise RuntimeError("cudaHostRegister failed with code 801")

    monkeypatch.setattr("bough.engines.torch.host.pool._register", refuse)
    pool = HostPool(2**20, torch.device("cuda", 0))

    assert pool.take(2**20).memory.is_pinned()
    assert "801" in pool.problem
