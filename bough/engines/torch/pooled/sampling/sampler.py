"""Choosing the next tokens on the device: the ids can be fed to the next step before the host reads them.

On CUDA kernels choose (`kernel_sampler`): no row is sorted. They compute in float32, with sums of parts in double
precision. So a choice can differ from `bough.engines.sampling`, which is all in double precision and used on other
devices: where the number drawn or a limit is within about a millionth of a border between two tokens, or where a bias or
penalty makes two scores equal in float32 that were not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from bough.engines.torch.sampling import sample
from bough.errors import EngineError
from bough.types import Draw, SampledToken

if TYPE_CHECKING:
    from bough.engines.torch.pooled.sampling.kernel_sampler import KernelSampler

_USUAL_ROWS = 256  # that are sampled together; for more, a larger sampler is made


class Choices(Protocol):
    """The tokens that were chosen for one batch."""

    @property
    def ids(self) -> Tensor:
        """The chosen ids [rows], int64, on the device; 0 where a row failed."""

    def read(self) -> list[SampledToken]:
        """Wait for the choices of this batch, without holding the GIL. Raise EngineError if a row failed."""


class DeviceSampler:
    """Chooses tokens where the logits of a model are: by kernels on CUDA, else by the host. One stream launches all."""

    def __init__(self) -> None:
        self._kernels: KernelSampler | None = None

    def launch(self, logits: Tensor, draws: Sequence[Draw]) -> Choices:
        """Choose one token for each row of logits [rows, vocabulary], at least one, which are not changed.

        On CUDA this only launches kernels on the current stream. Later launches there may overwrite the logits and may use
        `Choices.ids`.
        """
        assert logits.shape[0] == len(draws) > 0 and logits.stride(-1) == 1, (logits.shape, len(draws))
        if not logits.is_cuda:
            return HostChoices(logits, draws)
        from bough.engines.torch.pooled.sampling.kernel_sampler import KernelSampler  # needs triton

        with torch.cuda.device(logits.device):
            if self._kernels is None or len(draws) > self._kernels.max_rows:
                self._kernels = KernelSampler(logits.shape[1], max(_USUAL_ROWS, len(draws)), logits.device)
            return self._kernels.launch(logits, draws)


class HostChoices:
    """Choices that the host has made: the results, or an error where a row failed."""

    def __init__(self, logits: Tensor, draws: Sequence[Draw]) -> None:
        self._found = [_attempt(row, draw) for row, draw in zip(logits, draws, strict=True)]
        ids = [each.token_id if isinstance(each, SampledToken) else 0 for each in self._found]
        self.ids = torch.tensor(ids, device=logits.device)

    def read(self) -> list[SampledToken]:
        results: list[SampledToken] = []
        for each in self._found:
            if isinstance(each, EngineError):
                raise each
            results.append(each)
        return results


def _attempt(row: Tensor, draw: Draw) -> SampledToken | EngineError:
    try:
        return sample([row], [draw])[0]
    except EngineError as error:
        return error
