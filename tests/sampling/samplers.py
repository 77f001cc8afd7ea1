"""The samplers that one suite runs over, and draws of many kinds. A new engine adds one entry to `SAMPLERS`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import torch

from bough.mlx_engine.sampling import sample as sample_mlx
from bough.torch_engine.sampling import sample as sample_torch
from bough.types import Draw, Sampled, SamplingParams

EVENLY = tuple((i + 0.5) / 3000 for i in range(3000))


@dataclass(frozen=True)
class Sampler:
    """An engine's `sample`, and how it keeps logits: `make_row` takes numbers and the name of a type."""

    name: str
    sample: Callable[[Sequence[Any], Sequence[Draw]], list[Sampled]]
    make_row: Callable[[Sequence[float], str], Any]
    dtype: str = "float32"

    def row(self, values: Iterable[float], dtype: str | None = None) -> Any:
        return self.make_row(list(values), dtype or self.dtype)

    def choose(self, values: Iterable[float], draw: Draw | None = None, **params: Any) -> int:
        return self.sample([self.row(values)], [draw or Draw(SamplingParams(**params))])[0].token_id

    def shares(self, values: Sequence[float], **params: Any) -> list[float]:
        """How often each token is chosen, over evenly spaced draws; `history` and `allowed` go to the draw."""
        extra = {name: params.pop(name) for name in ("history", "allowed") if name in params}
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


def logs(*probabilities: float) -> list[float]:
    return [math.log(each) if each else -math.inf for each in probabilities]


def bits(allowed: Iterable[int], vocab_size: int) -> bytes:
    mask = sum(1 << token_id for token_id in allowed)
    return mask.to_bytes((vocab_size + 7) // 8, "little")


def make_many_draws(count: int, vocab_size: int) -> list[Draw]:
    """Draws of every kind: greedy and not, with each of the limits, penalties, a mask and log-probabilities."""
    limits: list[dict[str, Any]] = [
        {},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.9, "repeat_penalty": 1.3},
        {"logprobs": 3},
    ]
    return [
        Draw(
            SamplingParams(temperature=(index % 3) / 2, **limits[index % len(limits)]),
            uniform=(index + 0.5) / count,
            history=range(index * 10, index * 20),
            allowed=b"\x5a" * (vocab_size // 8) if index % 2 else None,
        )
        for index in range(count)
    ]
