"""The host pool: pinned memory for pages and states that have left the device.

Memory is allocated in chunks and handed out in pieces: slabs of one whole page, halves of slabs down to a 32nd for smaller
pieces, and pieces of their own size for larger ones. Pinning is slow, so the next chunk is pinned on a separate thread as
soon as few pieces are left; only a caller that finds no free piece waits for it.

Always true between calls (`check` asserts it):
- every byte of a chunk is in one free span, in one piece that is referred to, or in the queue of returned spans;
- a free span's other half is not free: they would be one span of twice the size;
- the chunks, including the one being allocated, take `total_bytes`.

One thread calls the pool. Any thread may drop its last reference to a piece at any time: the piece then waits in a queue
until the next call.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

CHUNK_BYTES = 256 * 2**20
MOST_PIECES = 32  # of a chunk
FRACTIONS = 32  # of a slab
_ALIGNMENT = 64
_SYSTEM_PAGE = 4096
_FOR_ALL_CONTEXTS = 1
_cuda: Any = torch.cuda  # which is not fully typed


class HostChunk:
    """Host memory of exactly the size asked for, pinned for a device if one is given, freed with its last reference.

    PyTorch rounds pinned memory up to a power of two: a page of 33 MiB would take 64. So memory is mapped and registered
    with the driver. If the driver refuses, PyTorch's pinned memory is used and `problem` says why. Pinning a GiB takes more
    than half a second.
    """

    def __init__(self, nbytes: int, pin_for: torch.device | None) -> None:
        self.nbytes = nbytes
        self.problem = ""
        try:
            self.memory = _map(nbytes)
            if pin_for is not None:
                self._pin(pin_for)
        except (OSError, RuntimeError, MemoryError) as error:
            raise MemoryError(f"{nbytes:,} bytes of host memory could not be allocated: {error}") from error

    def _pin(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            try:
                address = _register(self.memory)
            except RuntimeError as error:
                self.problem = str(error)
                self.memory = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
                return
        weakref.finalize(self, _unregister, address).atexit = False  # the system does it when the process ends


def _map(nbytes: int) -> memoryview:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # pinning fewer, larger pages is faster, but not every kernel has them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _register(memory: memoryview) -> int:
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    code = int(_cuda.cudart().cudaHostRegister(address, memory.nbytes, _FOR_ALL_CONTEXTS))
    if code:
        raise RuntimeError(f"cudaHostRegister failed with code {code}")
    return address


def _unregister(address: int) -> None:
    _cuda.cudart().cudaHostUnregister(address)


class DeviceEvent(Protocol):
    """A point in the work of the device."""

    def wait(self) -> None:
        """Return when the device has passed it."""

    def seconds(self) -> float | None:
        """How long the copy to the device took that ends with this event; None until it is done, and for other events."""


@dataclass(eq=False, slots=True)
class HostSpan:
    """Bytes [start, start + nbytes) of a chunk. After `last_copies` the device no longer uses them."""

    chunk: HostChunk
    start: int
    nbytes: int
    last_copies: tuple[DeviceEvent, ...] = ()


class Piece:
    """The memory of one page or state. It returns to its pool when nothing made from `memory` is alive any more."""

    __slots__ = ("_span", "memory")

    def __init__(self, span: HostSpan, memory: Tensor) -> None:
        self.memory = memory  # as many bytes as were asked for
        self._span = span

    @property
    def nbytes(self) -> int:
        """The bytes it occupies in the pool."""
        return self._span.nbytes

    def copied(self, event: DeviceEvent) -> None:
        """Record that the device uses this memory until `event`, which comes after all earlier copies."""
        self._span.last_copies = (event,)

    @property
    def last_copies(self) -> tuple[DeviceEvent, ...]:
        """After these events the device no longer uses this memory."""
        return self._span.last_copies

    def wait(self) -> None:
        """Wait for the device's copies, before the CPU reads or writes this memory."""
        for event in self._span.last_copies:
            event.wait()


@dataclass(frozen=True)
class _Growth:
    """A chunk that is being allocated, for pieces of `piece_bytes`."""

    chunk: Future[HostChunk]
    nbytes: int
    piece_bytes: int


class HostPool:
    """Host memory in pieces, pinned for a device if one is given. `limit_bytes` bounds all chunks together."""

    def __init__(self, slab_bytes: int, pin_for: torch.device | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.slab_bytes = _round_up(slab_bytes, FRACTIONS * _ALIGNMENT)
        self.total_bytes = 0
        self.limit_bytes: int | None = None
        self.problem = ""  # why a chunk takes more memory than was asked for
        self._pin_for = pin_for
        self._chunk_bytes = chunk_bytes
        self._chunks: dict[HostChunk, int] = {}  # each with the size of its whole pieces
        self._free: defaultdict[int, dict[tuple[HostChunk, int], HostSpan]] = defaultdict(dict)
        self._returned: deque[HostSpan] = deque()
        self._growth: _Growth | None = None
        self._can_grow_ahead = True
        self._grower: ThreadPoolExecutor | None = None

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken without allocating more; tests check the pool by it."""
        self._collect()
        return sum(size * len(spans) for size, spans in self._free.items())

    def take(self, nbytes: int) -> Piece:
        """A piece of at least that size; the device may still be copying from or to it.

        Raise MemoryError if the limit or the system does not allow it.
        """
        size = self._size_for(nbytes)
        self._collect()
        while (span := self._find(size)) is None:
            if self._growth is None:
                self._grow(max(size, self.slab_bytes))
            self._finish_growth()
        self._grow_ahead(max(size, self.slab_bytes))
        view = span.chunk.memory[span.start : span.start + nbytes]
        weakref.finalize(view, self._returned.append, span).atexit = False
        return Piece(span, torch.frombuffer(view, dtype=torch.uint8))  # the tensor keeps `view` alive

    def limit(self, limit_bytes: int) -> None:
        """Take no more than this from now on, and free unused chunks if there is more."""
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
        """Assert what the module's docstring says."""
        self._collect()
        growing = self._growth.nbytes if self._growth else 0
        assert self.total_bytes == growing + sum(chunk.nbytes for chunk in self._chunks), "chunks are miscounted"
        for size, spans in self._free.items():
            for (chunk, start), span in spans.items():
                assert chunk in self._chunks and (span.start, span.nbytes) == (start, size), "a span is in the wrong list"
                assert size >= self.slab_bytes or (chunk, self._other_half(span)) not in spans, "two halves are free"

    def _size_for(self, nbytes: int) -> int:
        assert nbytes > 0, "a piece has at least one byte"
        if nbytes > self.slab_bytes:
            return _round_up(nbytes, _SYSTEM_PAGE)
        size = self.slab_bytes
        while size // 2 >= nbytes and size > self.slab_bytes // FRACTIONS:
            size //= 2
        return size

    def _find(self, size: int) -> HostSpan | None:
        """A free span of exactly that size, cut out of a larger one if need be."""
        larger = size
        while not self._free[larger]:
            larger *= 2
            if larger > self.slab_bytes:
                return None
        _, span = self._free[larger].popitem()
        while span.nbytes > size:
            half = span.nbytes // 2
            self._put(HostSpan(span.chunk, span.start + half, half, span.last_copies))
            span = HostSpan(span.chunk, span.start, half, span.last_copies)
        return span

    def _collect(self) -> None:
        """Collect returned spans, and a new chunk if one is ready."""
        while self._returned:
            self._join(self._returned.popleft())
        if self._growth is not None and self._growth.chunk.done():
            try:
                self._finish_growth()
            except MemoryError:  # it was not needed yet
                self._can_grow_ahead = False

    def _put(self, span: HostSpan) -> None:
        self._free[span.nbytes][span.chunk, span.start] = span

    def _join(self, span: HostSpan) -> None:
        """Join a returned span with its other half while that is free too, and put it into the free list."""
        if span.chunk not in self._chunks:
            return
        while span.nbytes < self.slab_bytes:
            other = self._free[span.nbytes].pop((span.chunk, self._other_half(span)), None)
            if other is None:
                break
            copies = tuple(dict.fromkeys(span.last_copies + other.last_copies))
            span = HostSpan(span.chunk, min(span.start, other.start), 2 * span.nbytes, copies)
        self._put(span)

    def _other_half(self, span: HostSpan) -> int:
        unit = self.slab_bytes // FRACTIONS
        return (span.start // unit ^ span.nbytes // unit) * unit

    def _grow(self, piece_bytes: int) -> None:
        """Start allocating a chunk for pieces of this size. Raise MemoryError if that exceeds the limit."""
        if self.limit_bytes is not None:
            self._drop_chunks(self.total_bytes + piece_bytes - self.limit_bytes, but=piece_bytes)
        count = self._count_pieces(piece_bytes)
        if count < 1:
            raise MemoryError(
                f"{piece_bytes:,} bytes of host memory are needed; of {self.limit_bytes:,} {self.total_bytes:,} are taken"
            )
        self._begin_growth(piece_bytes, count)

    def _grow_ahead(self, piece_bytes: int) -> None:
        count = self._count_pieces(piece_bytes)
        if count and self._growth is None and self._can_grow_ahead and len(self._free[piece_bytes]) < count / 2:
            self._begin_growth(piece_bytes, count)

    def _count_pieces(self, piece_bytes: int) -> int:
        count = min(max(1, self._chunk_bytes // piece_bytes), MOST_PIECES)
        if self.limit_bytes is None:
            return count
        return max(0, min(count, (self.limit_bytes - self.total_bytes) // piece_bytes))

    def _begin_growth(self, piece_bytes: int, count: int) -> None:
        # Always on the grower's thread: a registration that fails leaves an error behind that is that thread's alone.
        self._grower = self._grower or ThreadPoolExecutor(1, "bough-host-pool")
        nbytes = count * piece_bytes
        self._growth = _Growth(self._grower.submit(HostChunk, nbytes, self._pin_for), nbytes, piece_bytes)
        self.total_bytes += nbytes

    def _finish_growth(self) -> None:
        """Wait for the chunk that is being allocated and add it. Raise MemoryError if the system refused it."""
        assert self._growth is not None, "no chunk is being allocated"
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
            self._put(HostSpan(chunk, start, growth.piece_bytes))

    def _drop_chunks(self, excess_bytes: int, but: int = 0) -> None:
        """Free unused chunks until that many bytes are gone, except those in pieces of size `but`."""
        for chunk, piece_bytes in list(self._chunks.items()):
            free, places = self._free[piece_bytes], [(chunk, start) for start in range(0, chunk.nbytes, piece_bytes)]
            if excess_bytes <= 0 or piece_bytes == but or not all(place in free for place in places):
                continue
            for place in places:
                for event in free.pop(place).last_copies:
                    event.wait()
            del self._chunks[chunk]
            self.total_bytes -= chunk.nbytes
            excess_bytes -= chunk.nbytes


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
