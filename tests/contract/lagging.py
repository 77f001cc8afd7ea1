"""Copies that come as late as they may: what moves between device and host goes wrong here if anybody forgets to wait.

The computation is the processor itself, so it is never behind. A copy out is made when somebody waits for it, or for a
later one. A copy in is waited for by the computation and made at once, but its source counts as read until its turn comes:
whoever writes there before that without waiting is found out. As on a device, a copy under way keeps no host memory alive.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.engines.torch.host.pool import DeviceEvent, HostPool
from bough.engines.torch.host.transfer import Transfers, largest_page_bytes
from bough.engines.torch.layout import TorchLayout

SECONDS_PER_BYTE = 1e-9


@dataclass(frozen=True)
class LateEvent:
    number: int
    catch_up: Callable[[int], None]
    nbytes: int = 0

    def wait(self) -> None:
        self.catch_up(self.number)

    def seconds(self) -> float | None:
        return self.nbytes * SECONDS_PER_BYTE


class LaggingStreams:
    """Implements `bough.engines.torch.host.transfer.CopyStreams` over plain memory."""

    def __init__(self) -> None:
        self._number = 0
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()
        self._lock = threading.RLock()

    def copy_out(self, target: Tensor, source: Tensor, free: Sequence[DeviceEvent]) -> DeviceEvent:
        memory = _same_memory(target)
        return self._queue(lambda: memory.copy_(source), source.nbytes)

    def copy_in(
        self, target: Tensor, source: Tensor, ready: Sequence[DeviceEvent], after: DeviceEvent | None
    ) -> DeviceEvent:
        if self._waiting:
            self._catch_up(self._number)
        target.copy_(source)
        memory, arrived = _same_memory(source), source.clone()

        def hold() -> None:
            assert torch.equal(memory, arrived), "host memory was written while the device still read it"

        return self._queue(hold, source.nbytes)

    def record_compute(self) -> DeviceEvent:
        return LateEvent(self._number, lambda number: None)

    def hold_compute(self, events: Sequence[DeviceEvent]) -> None:
        for event in events:
            event.wait()

    def read(self, source: Tensor) -> Tensor:
        return source.clone()

    def _queue(self, work: Callable[[], object], nbytes: int) -> LateEvent:
        with self._lock:
            self._number += 1
            self._waiting.append((self._number, work))
            return LateEvent(self._number, self._catch_up, nbytes)

    def _catch_up(self, number: int) -> None:
        with self._lock:
            while self._waiting and self._waiting[0][0] <= number:
                self._waiting.popleft()[1]()


def _same_memory(memory: Tensor) -> Tensor:
    """The same bytes, kept alive by nobody."""
    return torch.frombuffer((ctypes.c_ubyte * memory.nbytes).from_address(memory.data_ptr()), dtype=torch.uint8)


def make_lagging_transfers(layout: TorchLayout, device: torch.device) -> Transfers:
    """What an engine on the CPU can be given to have a host place."""
    slab_bytes = largest_page_bytes(layout)
    return Transfers(HostPool(slab_bytes, chunk_bytes=4 * slab_bytes), LaggingStreams(), device)
