"""From an encoder's states of tokens to the numbers of a text: pooling and the steps behind it, or a score.

Everything here computes in float32, whatever the encoder computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bough.errors import UnsupportedModel
from bough.models.encoders.files import STEP_WEIGHTS, Dense, EmbedderFiles, LayerNorm, RerankerFiles, VectorStep
from bough.models.files import one_line

Pool = Callable[[Tensor, Tensor], Tensor]
"""From states [batch, tokens, size] and a mask [batch, tokens] of 1 and 0 to vectors [batch, size]."""


def _pick(states: Tensor, positions: Tensor) -> Tensor:
    return states[torch.arange(len(states), device=states.device), positions]


def _positions(mask: Tensor) -> Tensor:
    return torch.arange(mask.shape[1], device=mask.device)


def _pool_mean(states: Tensor, mask: Tensor, exponent: float = 1.0) -> Tensor:
    """The sum of the states by the number of tokens to the power of `exponent`."""
    return (states * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1e-9) ** exponent


_POOLS: Mapping[str, Pool] = {
    "cls": lambda states, mask: _pick(states, mask.argmax(dim=1)),
    "lasttoken": lambda states, mask: _pick(states, (mask * _positions(mask)).argmax(dim=1)),
    "max": lambda states, mask: states.masked_fill(mask[:, :, None] == 0, float("-inf")).amax(dim=1),
    "mean": _pool_mean,
    "mean_sqrt_len_tokens": lambda states, mask: _pool_mean(states, mask, 0.5),
    "weightedmean": lambda states, mask: _pool_mean(states, mask * (_positions(mask) + 1)),  # weights 1, 2, 3 and so on
}


class VectorHead:
    """Makes the vector of each text from the states of its tokens."""

    def __init__(self, description: EmbedderFiles, state_size: int, device: torch.device) -> None:
        pooling = description.pooling
        self._pools = [_POOLS[mode] for mode in pooling.modes]
        self._includes_prompt = pooling.includes_prompt
        self._steps, size = _load_steps(description.steps, state_size * len(self._pools), device)
        self.dimensions = min(size, description.dimensions or size)
        self.text = _describe(description)

    def __call__(self, output: Any, mask: Tensor, num_prompt: Tensor) -> Tensor:
        """The vectors [batch, dimensions] of texts; `mask` [batch, tokens] is 0 for padding."""
        if not self._includes_prompt:
            mask = mask * (_positions(mask) >= num_prompt[:, None])
        states = output.last_hidden_state.float()
        vectors = torch.cat([pool(states, mask.float()) for pool in self._pools], dim=1)
        for step in self._steps:
            vectors = step(vectors)
        return vectors[:, : self.dimensions]


class ScoreHead:
    """Makes the score of each pair from its one logit."""

    dimensions = 1

    def __init__(self, description: RerankerFiles) -> None:
        self._activation: nn.Module = getattr(nn, description.activation)()
        self.text = f"{description.activation} of one logit"

    def __call__(self, output: Any, mask: Tensor, num_prompt: Tensor) -> Tensor:
        scores: Tensor = self._activation(output.logits.float())
        return scores


Head = VectorHead | ScoreHead
_Step = Callable[[Tensor], Tensor]


def _load_steps(steps: Sequence[VectorStep], size: int, device: torch.device) -> tuple[list[_Step], int]:
    """The functions of the steps, and the size of the resulting vectors. Raises UnsupportedModel."""
    loaded: list[_Step] = []
    for step in steps:
        if isinstance(step, Dense):
            _require_size(step.folder, step.in_features, size)
            size = step.out_features
            linear = _load_module(nn.Linear(step.in_features, size, step.has_bias), step.folder, "linear")
            loaded.append(nn.Sequential(linear, getattr(nn, step.activation)()).to(device))
        elif isinstance(step, LayerNorm):
            _require_size(step.folder, step.size, size)
            loaded.append(_load_module(nn.LayerNorm(step.size), step.folder, "norm").to(device))
        else:
            loaded.append(nn.functional.normalize)
    return loaded, size


def _require_size(folder: Path, found: int, needed: int) -> None:
    if found != needed:
        raise UnsupportedModel(f"{folder / 'config.json'} is for vectors of {found} numbers, and they have {needed} there")


def _load_module(module: nn.Module, folder: Path, prefix: str) -> nn.Module:
    """The module with the weights in the folder, in float32. The file must have these and no others."""
    file = folder / STEP_WEIGHTS
    try:
        found = {name.removeprefix(f"{prefix}."): tensor.float() for name, tensor in load_file(file).items()}
        module.load_state_dict(found)
    except Exception as error:  # safetensors has an exception type of its own; torch lists the weights in several lines
        text = " ".join(str(error).split())
        raise UnsupportedModel(f"{file} cannot be used: {one_line(type(error)(text))}") from error
    return module.eval().requires_grad_(False)


def _describe(description: EmbedderFiles) -> str:
    modes = " and ".join(description.pooling.modes)
    if description.is_default:
        return f"{modes}: the folder does not say how, and this is the default of sentence-transformers"
    steps = [
        f"Dense {step.in_features} to {step.out_features} ({step.activation})"
        if isinstance(step, Dense)
        else type(step).__name__
        for step in description.steps
    ]
    return ", then ".join([modes, *steps])
