"""A chunk of host memory that a device can copy from and to: of exactly the size asked for, pinned, released with its last
reference.

PyTorch's own pinned memory is rounded up to a power of two, so that a page of 33 MiB would take 64. Here memory is taken
from the system page by page and registered with the driver.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from contextlib import suppress
from typing import Any

import torch

_FOR_ALL_CONTEXTS = 1
_cuda: Any = torch.cuda  # which is not fully typed


class Chunk:
    """Host memory, pinned for a device if one is given. It is freed when nothing refers to it any more.

    `problem` says why the driver would not register it, if PyTorch's own pinned memory had to do. Pinning a GiB takes more
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
    if sys.platform == "win32":
        return memoryview(mmap.mmap(-1, nbytes))
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
