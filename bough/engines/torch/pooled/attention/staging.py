"""Numbers on their way from the host to a tensor on the device. Nobody waits for the copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BUFFERS = 3  # they take turns: when one is filled again, the copy out of it is done long ago


class HostNumbers:
    """Sends whole numbers to the start of one tensor, in the order of the current stream, through pinned memory."""

    def __init__(self, target: Tensor) -> None:
        self._target = target.view(-1)
        is_cuda = target.is_cuda
        self._buffers = [torch.zeros(target.numel(), dtype=target.dtype, pin_memory=is_cuda) for _ in range(_BUFFERS)]
        self._sent = [torch.cuda.Event() for _ in range(_BUFFERS)] if is_cuda else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def put(self, numbers: Sequence[int]) -> None:
        """Set the first of the target's numbers."""
        self._turn = (self._turn + 1) % _BUFFERS
        if self._sent:
            self._sent[self._turn].synchronize()
        buffer = self._buffers[self._turn][: len(numbers)]
        buffer.numpy()[:] = numbers
        self._target[: len(numbers)].copy_(buffer, non_blocking=True)
        if self._sent:
            self._sent[self._turn].record()
