"""From what an encoder gives for each token to the numbers of a text: pooling and the steps behind it, or a score.

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


def _pool_first(states: Tensor, mask: Tensor) -> Tensor:
    return states[torch.arange(len(states), device=states.device), mask.argmax(dim=1)]


def _pool_last(states: Tensor, mask: Tensor) -> Tensor:
    positions = torch.arange(mask.shape[1], device=mask.device)
    return states[torch.arange(len(states), device=states.device), (mask * positions).argmax(dim=1)]


def _pool_max(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(mask[:, :, None] == 0, float("-inf")).amax(dim=1)


def _pool_mean(states: Tensor, mask: Tensor) -> Tensor:
    return _sum(states, mask) / mask.sum(dim=1, keepdim=True).clamp(min=1e-9)


def _pool_mean_sqrt(states: Tensor, mask: Tensor) -> Tensor:
    return _sum(states, mask) / mask.sum(dim=1, keepdim=True).clamp(min=1e-9).sqrt()


def _pool_weighted(states: Tensor, mask: Tensor) -> Tensor:
    """The mean with weights that grow with the position: 1, 2, 3 and so on."""
    return _pool_mean(states, mask * torch.arange(1, mask.shape[1] + 1, device=mask.device))


def _sum(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask[:, :, None]).sum(dim=1)


_POOLS: Mapping[str, Pool] = {
    "cls": _pool_first,
    "lasttoken": _pool_last,
    "max": _pool_max,
    "mean": _pool_mean,
    "mean_sqrt_len_tokens": _pool_mean_sqrt,
    "weightedmean": _pool_weighted,
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
        """The vectors [batch, dimensions] of texts whose tokens `mask` [batch, tokens] tells from padding."""
        if not self._includes_prompt:
            mask = mask * (torch.arange(mask.shape[1], device=mask.device) >= num_prompt[:, None])
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
        """The scores [batch, 1]."""
        scores: Tensor = self._activation(output.logits.float())
        return scores


Head = VectorHead | ScoreHead
_Step = Callable[[Tensor], Tensor]


def _load_steps(steps: Sequence[VectorStep], size: int, device: torch.device) -> tuple[list[_Step], int]:
    """The functions of the steps, and the size of the vectors that they give. Raises UnsupportedModel."""
    loaded: list[_Step] = []
    for step in steps:
        if isinstance(step, Dense):
            _require_size(step.folder, step.in_features, size)
            size = step.out_features
            loaded.append(_load_dense(step).to(device))
        elif isinstance(step, LayerNorm):
            _require_size(step.folder, step.size, size)
            loaded.append(_load_module(nn.LayerNorm(step.size), step.folder, "norm").to(device))
        else:
            loaded.append(nn.functional.normalize)
    return loaded, size


def _require_size(folder: Path, found: int, needed: int) -> None:
    if found != needed:
        raise UnsupportedModel(f"{folder / 'config.json'} is for vectors of {found} numbers, and they have {needed} there")


def _load_dense(step: Dense) -> nn.Module:
    linear = _load_module(nn.Linear(step.in_features, step.out_features, step.has_bias), step.folder, "linear")
    return nn.Sequential(linear, getattr(nn, step.activation)()).requires_grad_(False)


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
    return ", then ".join([modes, *map(_describe_step, description.steps)])


def _describe_step(step: VectorStep) -> str:
    if isinstance(step, Dense):
        return f"Dense {step.in_features} to {step.out_features} ({step.activation})"
    return type(step).__name__
