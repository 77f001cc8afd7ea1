"""Moving content between the device and the host, without waiting for any copy.

Pages on the host reach a lane through a ring of three page-sized buffers on the device: while the rows of one page are put
where the lane wants them, the next ones are on their way. The ring is taken when it is first needed, and counted nowhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.cache.tree.state import PAGE_TOKENS
from bough.engines.torch.host.pool import DeviceEvent, HostPool, Piece
from bough.engines.torch.host.streams import CudaStreams, Streams, TimedEvent
from bough.engines.torch.layout import Layout

_RING = 3
_FADE = 0.98  # of what was measured before, at each page that comes in


@dataclass(eq=False)
class _Stage:
    """A buffer of the ring. After `free` the lane has taken out what was in it; None if nothing ever was."""

    memory: Tensor
    free: DeviceEvent | None = None


class CopySpeed:
    """How long a byte took to reach the device lately: a fading mean over the copies that have ended."""

    def __init__(self) -> None:
        self._pending: deque[tuple[TimedEvent, int]] = deque()
        self._seconds = 0.0
        self._bytes = 0.0

    def add(self, event: TimedEvent, nbytes: int) -> None:
        """Count a copy that is under way."""
        self._pending.append((event, nbytes))
        self._poll()

    def seconds_per_byte(self) -> float | None:
        self._poll()
        return self._seconds / self._bytes if self._bytes else None

    def _poll(self) -> None:
        while self._pending and (seconds := self._pending[0][0].seconds()) is not None:
            _, nbytes = self._pending.popleft()
            self._seconds = _FADE * self._seconds + seconds
            self._bytes = _FADE * self._bytes + nbytes


class Transfers:
    """Moves content of one model's pages and states; the host's side of it lies in pieces of a pool."""

    def __init__(self, pool: HostPool, streams: Streams, device: torch.device) -> None:
        self.pool = pool
        self.speed = CopySpeed()
        self._streams = streams
        self._device = device
        self._ring: deque[_Stage] = deque()

    def to_host(self, content: Tensor) -> Piece:
        """Start a copy to a piece of host memory. The tensor may be released at once."""
        piece = self.pool.take(content.nbytes)
        piece.copied(self._streams.copy_out(piece.memory, content.view(torch.uint8), piece.last_copies))
        return piece

    def to_device(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """The content in new memory on the device, before all that is computed from now on."""
        content = torch.empty(piece.memory.nbytes, dtype=torch.uint8, device=self._device)
        piece.copied(self._streams.copy_in(content, piece.memory, piece.last_copies, None))
        return content.view(dtype)

    def copy_from_cpu(self, data: Tensor) -> Piece:
        """Bytes of plain host memory in a piece of the pool, at once."""
        piece = self.pool.take(data.nbytes)
        piece.wait()
        piece.memory.copy_(data)
        return piece

    def read(self, content: Tensor) -> Tensor:
        """Bytes of the device in plain host memory, at once. Any thread may call this."""
        return self._streams.read(content.view(torch.uint8))

    def copy_to(self, piece: Piece, target: Tensor) -> None:
        """Copy a piece to memory of the device, before all that is computed from now on."""
        self._copy_to(piece, target, None)

    def wait_for(self, copies: Sequence[DeviceEvent]) -> None:
        """Let the device write to memory from now on only after these copies out of it."""
        self._streams.hold_compute(copies)

    @contextmanager
    def staged(self, piece: Piece) -> Iterator[Tensor]:
        """The bytes of a page on the device, as long as the context lasts."""
        stage = self._next_stage()
        memory = stage.memory[: piece.memory.nbytes]
        self._copy_to(piece, memory, stage.free)
        try:
            yield memory
        finally:
            stage.free = self._streams.record_compute()

    def describe(self) -> str:
        """The kind of host memory, for people."""
        return f"pinned by PyTorch, in powers of two: {self.pool.problem}" if self.pool.problem else "pinned"

    def close(self) -> None:
        """Release all memory. The device must have done all copies."""
        self._ring.clear()
        self.pool.close()

    def _copy_to(self, piece: Piece, target: Tensor, after: DeviceEvent | None) -> None:
        event = self._streams.copy_in(target, piece.memory, piece.last_copies, after)
        piece.copied(event)
        self.speed.add(event, piece.memory.nbytes)

    def _next_stage(self) -> _Stage:
        if not self._ring:
            size = self.pool.slab_bytes
            memories = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(_RING)]
            self._ring.extend(map(_Stage, memories))
        self._ring.rotate()
        return self._ring[0]


def make_transfers(layout: Layout, device: torch.device) -> Transfers | None:
    """The transfers of a model; None if its device has no memory apart from the host's."""
    if device.type != "cuda":
        return None
    return Transfers(HostPool(largest_page_bytes(layout), device), CudaStreams(device), device)


def largest_page_bytes(layout: Layout) -> int:
    """The size of the largest whole page of a model, or of the largest state if it has no rows."""
    pages = [PAGE_TOKENS * rows.row_bytes for rows in layout.rows.values()]
    return max(pages or [state.nbytes for state in layout.states.values()], default=1)
