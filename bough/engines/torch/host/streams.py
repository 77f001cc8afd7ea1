"""Copies between device and host memory beside the computation.

The computation runs on the device's default stream. Copies to the host and copies to the device have a stream each, so
that neither waits for the other: a bus carries both at once. A copy from or to host memory is given the events after which
that memory is free, and returns the event of its own end. Reading content for the disk has a stream of lower
priority than the other copies.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bough.engines.torch.host.pool import DeviceEvent

_cuda: Any = torch.cuda  # which is not fully typed


class TimedEvent(DeviceEvent, Protocol):
    """The event that ends a copy."""

    def seconds(self) -> float | None:
        """How long the copy itself took; None as long as it is not done."""
        ...


class Streams(Protocol):
    """The streams of a device: copies from and to the host beside the computation. Memory is given as bytes."""

    def copy_out(self, target: Tensor, source: Tensor, free: Sequence[DeviceEvent]) -> DeviceEvent:
        """Copy to the host, once all that was computed so far is done and the target is free. The source may be dropped."""
        ...

    def copy_in(
        self, target: Tensor, source: Tensor, ready: Sequence[DeviceEvent], after: DeviceEvent | None
    ) -> TimedEvent:
        """Copy to the device, once the source is ready and the computation has passed `after`, or all that it was told so
        far.

        What is computed from now on waits for it. The source may be released and reused by copies, not by the CPU.
        """
        ...

    def record_compute(self) -> DeviceEvent:
        """An event after all that was computed so far."""
        ...

    def hold_compute(self, events: Sequence[DeviceEvent]) -> None:
        """Let what is computed from now on wait for these events."""
        ...

    def read(self, source: Tensor) -> Tensor:
        """A copy in plain host memory, complete on return. Any thread may call this."""
        ...


@dataclass(frozen=True)
class CudaEvent:
    """A CUDA event that was recorded on a stream."""

    recorded: Any

    def wait(self) -> None:
        self.recorded.synchronize()


@dataclass(frozen=True)
class TimedCudaEvent(CudaEvent):
    """The events around a copy; the first was recorded when the copy could begin."""

    began: Any

    def seconds(self) -> float | None:
        return float(self.began.elapsed_time(self.recorded)) / 1000 if self.recorded.query() else None


class CudaStreams:
    """Implements `Streams` on an NVIDIA device. Nothing here but `read` waits for the device."""

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
        _move(self._out, target, source)
        source.record_stream(self._out)  # its memory is not given to others before this copy is done
        return self._record(self._out)

    def copy_in(
        self, target: Tensor, source: Tensor, ready: Sequence[DeviceEvent], after: DeviceEvent | None
    ) -> TimedEvent:
        if after is None:
            self._in.wait_stream(self._compute)
        _wait(self._in, [*ready, *([after] if after else [])])
        began = self._in.record_event(_cuda.Event(enable_timing=True))
        _move(self._in, target, source)
        ended = self._in.record_event(_cuda.Event(enable_timing=True, blocking=True))
        self._compute.wait_event(ended)
        return TimedCudaEvent(ended, began)

    def record_compute(self) -> DeviceEvent:
        return self._record(self._compute)

    def hold_compute(self, events: Sequence[DeviceEvent]) -> None:
        _wait(self._compute, events)

    def read(self, source: Tensor) -> Tensor:
        with self._staging_lock:
            staging = self._staging_for(source.nbytes)
            self._reads.wait_stream(self._compute)
            with _cuda.stream(self._reads):
                staging.copy_(source, non_blocking=True)
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


def _move(stream: Any, target: Tensor, source: Tensor) -> None:
    with _cuda.stream(stream):
        target.copy_(source, non_blocking=True)


def _wait(stream: Any, events: Sequence[DeviceEvent]) -> None:
    """Let a stream go on only after these events."""
    for event in events:
        assert isinstance(event, CudaEvent)
        stream.wait_event(event.recorded)
