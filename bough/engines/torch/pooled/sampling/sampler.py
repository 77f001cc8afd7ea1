"""Choosing the next tokens without the host in the way: the ids can be fed to the next step before anybody reads them.

On CUDA kernels do the work (`kernel_sampler`): no row is sorted, and every distribution is sampled right at the first look.
They compute in float32, with sums of parts in double precision. So a choice can differ from `bough.engines.torch.sampling`,
which is all in double precision, where the number drawn or a limit lies within about a millionth of a border between two
tokens, or where a bias or penalty makes two scores equal in float32 that were not. On other devices that module is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from bough.engines.torch.sampling import sample
from bough.errors import EngineError
from bough.types import Draw, Sampled

if TYPE_CHECKING:
    from bough.engines.torch.pooled.sampling.kernel_sampler import KernelSampler


class Choices(Protocol):
    """The tokens that were chosen for one batch."""

    @property
    def ids(self) -> Tensor:
        """The chosen ids [rows], int64, on the device. Valid ids in any case: 0 where a row failed."""
        ...

    def read(self) -> list[Sampled]:
        """Wait for the choices of this batch, without holding the GIL. Raises EngineError if a row failed."""
        ...


class DeviceSampler:
    """Chooses tokens on one device, for up to `max_rows` rows at a time. All launches have to be on one stream."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size, self.max_rows = vocab_size, max_rows
        self._kernels: KernelSampler | None = None
        if device.type == "cuda":
            from bough.engines.torch.pooled.sampling.kernel_sampler import KernelSampler  # needs triton

            self._kernels = KernelSampler(vocab_size, max_rows, device)

    def warm_up(self, logits: Tensor) -> None:
        """Compile the kernels for logits of this type and stride, so that no request has to wait for that."""
        if self._kernels is not None:
            self._kernels.warm_up(logits)

    def launch(self, logits: Tensor, draws: Sequence[Draw]) -> Choices:
        """Choose one token for each row of logits [rows, vocabulary], which stay as they are.

        On CUDA this gives the work to the current stream and returns at once. What is launched there afterwards may
        overwrite the logits and may use `Choices.ids`.
        """
        assert logits.shape == (len(draws), self._vocab_size) and logits.stride(-1) == 1, (logits.shape, len(draws))
        assert 0 < len(draws) <= self.max_rows, f"{len(draws)} rows, and there is room for {self.max_rows}"
        return sample_now(logits, draws) if self._kernels is None else self._kernels.launch(logits, draws)


@dataclass(frozen=True)
class ReadyChoices:
    """Choices that were made at once: the results, or why there are none."""

    ids: Tensor
    results: tuple[Sampled, ...]
    error: EngineError | None = None

    def read(self) -> list[Sampled]:
        if self.error is not None:
            raise self.error
        return list(self.results)


def sample_now(logits: Tensor, draws: Sequence[Draw]) -> ReadyChoices:
    """Choose without kernels, and wait for the result."""
    try:
        results = sample(list(logits), draws)
    except EngineError as error:
        ids = [_choose_or_zero(row, draw) for row, draw in zip(logits, draws, strict=True)]
        return ReadyChoices(torch.tensor(ids, device=logits.device), (), error)
    return ReadyChoices(torch.tensor([each.token_id for each in results], device=logits.device), tuple(results))


def _choose_or_zero(row: Tensor, draw: Draw) -> int:
    try:
        return sample([row], [draw])[0].token_id
    except EngineError:
        return 0
