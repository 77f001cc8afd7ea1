"""The host pool: pinned memory for pages and states that have left the device.

Memory is taken a chunk at a time and handed out in pieces: slabs of one whole page, halves of slabs down to a 32nd for what
is smaller, and pieces of their own size for what is larger. Pinning is slow, so the next chunk is pinned on a thread of its
own as soon as few pieces are left; only a caller that finds no free piece waits for it.

Always true between calls (`check` asserts it):
- every byte of a chunk is in one free span, or in one piece that is referred to, or in the queue of returned ones;
- no free span lies beside its free other half: they are one span of twice the size;
- the chunks, with the one that is on its way, take `total_bytes`.

One thread calls the pool. Any thread may drop its last reference to a piece at any time: the piece then waits in a queue
until the next call.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bough.engines.torch.host.memory import Chunk

CHUNK_BYTES = 256 * 2**20
MOST_PIECES = 32  # of a chunk
FRACTIONS = 32  # of a slab
_ALIGNMENT = 64
_SYSTEM_PAGE = 4096


class DeviceEvent(Protocol):
    """A point in the work of the device."""

    def wait(self) -> None:
        """Return when the device has passed it."""
        ...


@dataclass(eq=False, slots=True)
class Span:
    """Bytes [start, start + nbytes) of a chunk. After `last_copies` the device has done with them."""

    chunk: Chunk
    start: int
    nbytes: int
    last_copies: tuple[DeviceEvent, ...] = ()


class Piece:
    """The memory of one page or state. It goes back to its pool when nothing made from `memory` is alive any more."""

    __slots__ = ("_span", "memory")

    def __init__(self, span: Span, memory: Tensor) -> None:
        self.memory = memory  # as many bytes as were asked for
        self._span = span

    @property
    def nbytes(self) -> int:
        """What it occupies."""
        return self._span.nbytes

    def copied(self, event: DeviceEvent) -> None:
        """The device reads or writes this memory until `event`, after everything that it did with it before."""
        self._span.last_copies = (event,)

    @property
    def last_copies(self) -> tuple[DeviceEvent, ...]:
        """After these events the device has done with this memory."""
        return self._span.last_copies

    def wait(self) -> None:
        """Return when the device has done with this memory: before the CPU reads or writes it."""
        for event in self._span.last_copies:
            event.wait()


@dataclass(frozen=True)
class _Growth:
    """A chunk that is being allocated, to be handed out in pieces of `piece_bytes`."""

    chunk: Future[Chunk]
    nbytes: int
    piece_bytes: int


class HostPool:
    """Host memory in pieces, pinned for a device if one is given. `limit_bytes` bounds all chunks together."""

    def __init__(self, slab_bytes: int, pin_for: torch.device | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.slab_bytes = _rounded(slab_bytes, FRACTIONS * _ALIGNMENT)
        self.total_bytes = 0
        self.limit_bytes: int | None = None
        self.problem = ""  # why a chunk takes more memory than was asked for
        self._pin_for = pin_for
        self._chunk_bytes = chunk_bytes
        self._chunks: dict[Chunk, int] = {}  # each with the size of its whole pieces
        self._free: defaultdict[int, dict[tuple[Chunk, int], Span]] = defaultdict(dict)
        self._returned: deque[Span] = deque()
        self._growth: _Growth | None = None
        self._can_grow_ahead = True
        self._grower: ThreadPoolExecutor | None = None

    @property
    def free_bytes(self) -> int:
        """What could be handed out without allocating more; tests check the pool by it."""
        self._collect()
        return sum(size * len(spans) for size, spans in self._free.items())

    def take(self, nbytes: int) -> Piece:
        """A piece of at least that size; the device may still be copying from or to it.

        Raises MemoryError if the limit or the system does not allow it.
        """
        size = self._size_for(nbytes)
        self._collect()
        while (span := self._find(size)) is None:
            if self._growth is None:
                self._grow(max(size, self.slab_bytes))
            self._finish_growth()
        self._grow_ahead(max(size, self.slab_bytes))
        return self._hand_out(span, nbytes)

    def limit(self, limit_bytes: int) -> None:
        """Take no more than this from now on, and give unused chunks back if there is more."""
        self.limit_bytes = limit_bytes
        self._collect()
        self._drop_chunks(self.total_bytes - limit_bytes)

    def close(self) -> None:
        """Release all memory. Pieces stay valid as long as they are referred to; the pool does not."""
        if self._grower is not None:
            self._grower.shutdown()
        self._chunks.clear()
        self._free.clear()
        self._returned.clear()
        self._growth = self._grower = None
        self.total_bytes = 0

    def check(self) -> None:
        """Assert what the module promises."""
        self._collect()
        growing = self._growth.nbytes if self._growth else 0
        assert self.total_bytes == growing + sum(chunk.nbytes for chunk in self._chunks), "chunks are miscounted"
        for size, spans in self._free.items():
            for (chunk, start), span in spans.items():
                assert chunk in self._chunks and (span.start, span.nbytes) == (start, size), "a span is in the wrong list"
                assert size >= self.slab_bytes or (chunk, self._other_half(span)) not in spans, "two halves lie free"

    def _size_for(self, nbytes: int) -> int:
        assert nbytes > 0, "a piece has at least one byte"
        if nbytes > self.slab_bytes:
            return _rounded(nbytes, _SYSTEM_PAGE)
        size = self.slab_bytes
        while size // 2 >= nbytes and size > self.slab_bytes // FRACTIONS:
            size //= 2
        return size

    def _find(self, size: int) -> Span | None:
        """A free span of exactly that size, cut out of a larger one if need be."""
        larger = size
        while not self._free[larger]:
            larger *= 2
            if larger > self.slab_bytes:
                return None
        _, span = self._free[larger].popitem()
        while span.nbytes > size:
            half = span.nbytes // 2
            self._put(Span(span.chunk, span.start + half, half, span.last_copies))
            span = Span(span.chunk, span.start, half, span.last_copies)
        return span

    def _hand_out(self, span: Span, nbytes: int) -> Piece:
        view = span.chunk.memory[span.start : span.start + nbytes]
        weakref.finalize(view, self._returned.append, span).atexit = False
        return Piece(span, torch.frombuffer(view, dtype=torch.uint8))  # whose memory refers to this very view

    def _collect(self) -> None:
        """Collect returned pieces, and a new chunk if one is ready."""
        while self._returned:
            self._join(self._returned.popleft())
        if self._growth is not None and self._growth.chunk.done():
            try:
                self._finish_growth()
            except MemoryError:  # it was not needed yet
                self._can_grow_ahead = False

    def _put(self, span: Span) -> None:
        self._free[span.nbytes][span.chunk, span.start] = span

    def _join(self, span: Span) -> None:
        """Join a returned span with its other half while that is free too, and put it into the free list."""
        if span.chunk not in self._chunks:
            return
        while span.nbytes < self.slab_bytes:
            other = self._free[span.nbytes].pop((span.chunk, self._other_half(span)), None)
            if other is None:
                break
            start = min(span.start, other.start)
            span = Span(span.chunk, start, 2 * span.nbytes, _united(span.last_copies, other.last_copies))
        self._put(span)

    def _other_half(self, span: Span) -> int:
        unit = self.slab_bytes // FRACTIONS
        return (span.start // unit ^ span.nbytes // unit) * unit

    def _grow(self, piece_bytes: int) -> None:
        """Start allocating a chunk for pieces of this size. Raises MemoryError if that passes the limit."""
        self._drop_chunks(self._excess(piece_bytes), but=piece_bytes)
        count = self._count(piece_bytes)
        if count < 1:
            raise MemoryError(
                f"{piece_bytes:,} bytes of host memory are needed; of {self.limit_bytes:,} {self.total_bytes:,} are taken"
            )
        self._begin_growth(piece_bytes, count)

    def _grow_ahead(self, piece_bytes: int) -> None:
        count = self._count(piece_bytes)
        if count and self._growth is None and self._can_grow_ahead and len(self._free[piece_bytes]) < count / 2:
            self._begin_growth(piece_bytes, count)

    def _count(self, piece_bytes: int) -> int:
        """The pieces of the next chunk: what the limit allows."""
        count = min(max(1, self._chunk_bytes // piece_bytes), MOST_PIECES)
        if self.limit_bytes is None:
            return count
        return max(0, min(count, (self.limit_bytes - self.total_bytes) // piece_bytes))

    def _excess(self, piece_bytes: int) -> int:
        return 0 if self.limit_bytes is None else self.total_bytes + piece_bytes - self.limit_bytes

    def _begin_growth(self, piece_bytes: int, count: int) -> None:
        # Always on the grower's thread: a registration that fails leaves an error behind that is that thread's alone.
        self._grower = self._grower or ThreadPoolExecutor(1, "bough-host-pool")
        nbytes = count * piece_bytes
        self._growth = _Growth(self._grower.submit(Chunk, nbytes, self._pin_for), nbytes, piece_bytes)
        self.total_bytes += nbytes

    def _finish_growth(self) -> None:
        """Wait for the chunk that is being allocated and add it. Raises MemoryError if the system refused it."""
        assert self._growth is not None, "no chunk is on its way"
        growth, self._growth = self._growth, None
        try:
            chunk = growth.chunk.result()
        except MemoryError:
            self.total_bytes -= growth.nbytes
            raise
        self._can_grow_ahead = True
        self.problem = chunk.problem or self.problem
        self._chunks[chunk] = growth.piece_bytes
        for start in range(0, chunk.nbytes, growth.piece_bytes):
            self._put(Span(chunk, start, growth.piece_bytes))

    def _drop_chunks(self, excess_bytes: int, but: int = 0) -> None:
        """Give unused chunks back until that much is free, except those in pieces of size `but`."""
        for chunk, piece_bytes in list(self._chunks.items()):
            starts = range(0, chunk.nbytes, piece_bytes)
            is_free = all((chunk, start) in self._free[piece_bytes] for start in starts)
            if excess_bytes > 0 and piece_bytes != but and is_free:
                self._drop_chunk(chunk, piece_bytes)
                excess_bytes -= chunk.nbytes

    def _drop_chunk(self, chunk: Chunk, piece_bytes: int) -> None:
        for start in range(0, chunk.nbytes, piece_bytes):
            span = self._free[piece_bytes].pop((chunk, start))
            for event in span.last_copies:
                event.wait()
        del self._chunks[chunk]
        self.total_bytes -= chunk.nbytes


def _united(one: tuple[DeviceEvent, ...], other: tuple[DeviceEvent, ...]) -> tuple[DeviceEvent, ...]:
    return tuple(dict.fromkeys(one + other))


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
