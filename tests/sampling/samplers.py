"""The samplers that one suite runs over. A new engine adds one entry to `SAMPLERS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import torch

from bough.engines.mlx.sampling import sample as sample_mlx
from bough.engines.torch.sampling import sample as sample_torch
from bough.types import Draw, SampledToken, SamplingParams

EVENLY = tuple((i + 0.5) / 3000 for i in range(3000))


@dataclass(frozen=True)
class Sampler:
    """An engine's `sample`, and how it keeps logits: `make_row` takes numbers and the name of a type."""

    name: str
    sample: Callable[[Sequence[Any], Sequence[Draw]], list[SampledToken]]
    make_row: Callable[[Sequence[float], str], Any]
    dtype: str = "float32"

    def row(self, values: Iterable[float], dtype: str | None = None) -> Any:
        return self.make_row(list(values), dtype or self.dtype)

    def choose(self, values: Iterable[float], draw: Draw | None = None, **params: Any) -> int:
        return self.sample([self.row(values)], [draw or Draw(SamplingParams(**params))])[0].token_id

    def shares(self, values: Sequence[float], **params: Any) -> list[float]:
        """How often each token is chosen, over evenly spaced draws; `seen` and `allowed` go to the draw."""
        extra = {name: params.pop(name) for name in ("seen", "allowed") if name in params}
        wanted = SamplingParams(**{"temperature": 1.0, **params})
        draws = [Draw(wanted, uniform=uniform, **extra) for uniform in EVENLY]
        chosen = [each.token_id for each in self.sample([self.row(values)] * len(draws), draws)]
        return [round(chosen.count(token_id) / len(draws), 3) for token_id in range(len(values))]


def _make_torch_row(values: Sequence[float], dtype: str) -> torch.Tensor:
    return torch.tensor(values, dtype=getattr(torch, dtype))


def _make_mlx_row(values: Sequence[float], dtype: str) -> mx.array:
    return mx.array(values, dtype=getattr(mx, dtype))


TORCH = Sampler("torch", sample_torch, _make_torch_row)
PRECISE_TORCH = Sampler("torch in doubles", sample_torch, _make_torch_row, "float64")
MLX = Sampler("mlx", sample_mlx, _make_mlx_row)
SAMPLERS = (TORCH, MLX)
