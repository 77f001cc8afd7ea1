"""Moving content between the device and the host, without waiting for any copy.

The computation runs on the device's default stream. Copies to the host and copies to the device have a stream each, so
that neither waits for the other: a bus carries both at once. Reading content for the disk has a stream of lower priority.

Pages on the host reach a lane through a ring of three page-sized buffers on the device: while the rows of one page are put
where the lane wants them, the next ones are being copied. The ring is allocated at its first use, and counted nowhere.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bough.cache.tree.state import PAGE_TOKENS
from bough.engines.torch.host.pool import DeviceEvent, HostPool, Piece
from bough.engines.torch.layout import TorchLayout

_RING = 3
_FADE = 0.98  # the weight of earlier copies, with each new one
_cuda: Any = torch.cuda  # which is not fully typed


class CopyStreams(Protocol):
    """Copies between a device and the host beside the computation. Tensors are bytes.

    Each copy is given the events after which its host memory is free, and returns the event of its own end.
    """

    def copy_out(self, target: Tensor, source: Tensor, free: Sequence[DeviceEvent]) -> DeviceEvent:
        """Copy to the host, after all launched computation and once the target is free. The source may be dropped."""

    def copy_in(
        self, target: Tensor, source: Tensor, ready: Sequence[DeviceEvent], after: DeviceEvent | None
    ) -> DeviceEvent:
        """Copy to the device, once the source is ready and the computation has passed `after` (None: all launched so far).

        All later computation waits for it. The source may be released and reused by copies, not by the CPU.
        """

    def record_compute(self) -> DeviceEvent:
        """An event after all computation launched so far."""

    def hold_compute(self, events: Sequence[DeviceEvent]) -> None:
        """Make all later computation wait for these events."""

    def read(self, source: Tensor) -> Tensor:
        """A copy in plain host memory, complete on return. Any thread may call this."""


@dataclass(frozen=True)
class CudaEvent:
    """A CUDA event that was recorded on a stream; after a copy to the device, `began` is the event before it."""

    recorded: Any
    began: Any = None

    def wait(self) -> None:
        self.recorded.synchronize()

    def seconds(self) -> float | None:
        is_timed = self.began is not None and self.recorded.query()
        return float(self.began.elapsed_time(self.recorded)) / 1000 if is_timed else None


class CudaStreams:
    """Implements `CopyStreams` on an NVIDIA device. Only `read` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._compute = _cuda.default_stream(device)
        self._out = _cuda.Stream(device, priority=-1)
        self._in = _cuda.Stream(device, priority=-1)
        self._reads = _cuda.Stream(device, priority=0)
        self._staging: Tensor | None = None
        self._staging_lock = threading.Lock()

    def copy_out(self, target: Tensor, source: Tensor, free: Sequence[DeviceEvent]) -> DeviceEvent:
        self._out.wait_stream(self._compute)
        _wait(self._out, free)
        _copy(self._out, target, source)
        source.record_stream(self._out)  # its memory is not given to others before this copy is done
        return self._record(self._out)

    def copy_in(
        self, target: Tensor, source: Tensor, ready: Sequence[DeviceEvent], after: DeviceEvent | None
    ) -> DeviceEvent:
        if after is None:
            self._in.wait_stream(self._compute)
        _wait(self._in, [*ready, *([after] if after else [])])
        began = self._in.record_event(_cuda.Event(enable_timing=True))
        _copy(self._in, target, source)
        ended = self._in.record_event(_cuda.Event(enable_timing=True, blocking=True))
        self._compute.wait_event(ended)
        return CudaEvent(ended, began)

    def record_compute(self) -> DeviceEvent:
        return self._record(self._compute)

    def hold_compute(self, events: Sequence[DeviceEvent]) -> None:
        _wait(self._compute, events)

    def read(self, source: Tensor) -> Tensor:
        with self._staging_lock:
            staging = self._staging_for(source.nbytes)
            self._reads.wait_stream(self._compute)
            _copy(self._reads, staging, source)
            self._reads.record_event(_cuda.Event(blocking=True)).synchronize()
            return torch.empty(source.nbytes, dtype=torch.uint8).copy_(staging)

    def _record(self, stream: Any) -> CudaEvent:
        event = _cuda.Event(blocking=True)  # a thread that waits for it sleeps
        stream.record_event(event)
        return CudaEvent(event)

    def _staging_for(self, nbytes: int) -> Tensor:
        if self._staging is None or self._staging.nbytes < nbytes:
            self._staging = None
            self._staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._staging[:nbytes]


def _copy(stream: Any, target: Tensor, source: Tensor) -> None:
    with _cuda.stream(stream):
        target.copy_(source, non_blocking=True)


def _wait(stream: Any, events: Sequence[DeviceEvent]) -> None:
    for event in events:
        assert isinstance(event, CudaEvent)
        stream.wait_event(event.recorded)


@dataclass(eq=False)
class _Stage:
    """A buffer of the ring. After `free` the lane has copied its content; None if it was never used."""

    memory: Tensor
    free: DeviceEvent | None = None


class CopySpeed:
    """Recent seconds per byte of copies to the device: a fading mean over those that have ended."""

    def __init__(self) -> None:
        self._pending: deque[tuple[DeviceEvent, int]] = deque()
        self._seconds = 0.0
        self._bytes = 0.0

    def add(self, event: DeviceEvent, nbytes: int) -> None:
        """Count a copy that ends with this event."""
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
    """Moves content of one model's pages and states between the device and pieces of the host pool."""

    def __init__(self, pool: HostPool, streams: CopyStreams, device: torch.device) -> None:
        self.pool = pool
        self.speed = CopySpeed()
        self.streams = streams
        self._device = device
        self._ring: deque[_Stage] = deque()

    def to_host(self, content: Tensor) -> Piece:
        """Start a copy to a piece of host memory. The caller may release the tensor at once."""
        piece = self.pool.take(content.nbytes)
        piece.copied(self.streams.copy_out(piece.memory, content.view(torch.uint8), piece.last_copies))
        return piece

    def to_device(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """Copy the content to new memory on the device; all later computation waits for it."""
        content = torch.empty(piece.memory.nbytes, dtype=torch.uint8, device=self._device)
        piece.copied(self.streams.copy_in(content, piece.memory, piece.last_copies, None))
        return content.view(dtype)

    def copy_from_cpu(self, data: Tensor) -> Piece:
        """Copy plain host memory to a piece of the pool and wait for it."""
        piece = self.pool.take(data.nbytes)
        piece.wait()
        piece.memory.copy_(data)
        return piece

    def read(self, content: Tensor) -> Tensor:
        """Copy device memory to plain host memory and wait for it. Any thread may call this."""
        return self.streams.read(content.view(torch.uint8))

    def copy_to(self, piece: Piece, target: Tensor, after: DeviceEvent | None = None) -> None:
        """Copy a piece to memory of the device, as `CopyStreams.copy_in` says."""
        event = self.streams.copy_in(target, piece.memory, piece.last_copies, after)
        piece.copied(event)
        self.speed.add(event, piece.memory.nbytes)

    @contextmanager
    def staged(self, piece: Piece) -> Iterator[Tensor]:
        """The bytes of a page in a buffer of the ring, while the context lasts."""
        stage = self._next_stage()
        memory = stage.memory[: piece.memory.nbytes]
        self.copy_to(piece, memory, stage.free)
        try:
            yield memory
        finally:
            stage.free = self.streams.record_compute()

    def describe(self) -> str:
        return f"pinned by PyTorch, in powers of two: {self.pool.problem}" if self.pool.problem else "pinned"

    def close(self) -> None:
        """Release all memory. The device must have completed all copies."""
        self._ring.clear()
        self.pool.close()

    def _next_stage(self) -> _Stage:
        if not self._ring:
            size = self.pool.slab_bytes
            memories = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(_RING)]
            self._ring.extend(map(_Stage, memories))
        self._ring.rotate()
        return self._ring[0]


def make_transfers(layout: TorchLayout, device: torch.device) -> Transfers | None:
    """The transfers of a model; None if its device shares memory with the host."""
    if device.type != "cuda":
        return None
    return Transfers(HostPool(largest_page_bytes(layout), device), CudaStreams(device), device)


def largest_page_bytes(layout: TorchLayout) -> int:
    """The size of the largest whole page of a model, or of the largest state if it has no rows."""
    pages = [PAGE_TOKENS * rows.row_bytes for rows in layout.rows.values()]
    return max(pages or [state.nbytes for state in layout.states.values()], default=1)
