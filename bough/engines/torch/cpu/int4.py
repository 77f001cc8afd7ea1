"""torch's own products with weights of four bits, which round activations to bfloat16: only for users who ask for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_GROUP = 32  # columns that share a scale
_ROWS = 64  # a multiple that torch's kernel wants
_TILES = 2


class Int4Linear(nn.Module):
    """A linear layer with weights of four bits: q times a scale, plus a zero point, for each group of columns."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.data.float()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        groups = weight.view(weight.shape[0], -1, _GROUP)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = (high - low).clamp_min(1e-12) / 15
        levels = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).int().view(weight.shape)
        pack: Any = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self.levels = nn.Buffer(pack(levels.contiguous(), _TILES))
        self.scales = nn.Buffer(torch.stack([scale.t(), (low + 8 * scale).t()], -1).contiguous().bfloat16())

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).bfloat16()
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.levels, _GROUP, self.scales)
        y = product.float().view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def pack_int4(model: nn.Module) -> int:
    """Replace the linear layers whose shape torch's kernel takes; returns their number. The head stays as it is."""
    fit = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not module.in_features % _GROUP and not module.out_features % _ROWS
    ]
    inner = [(name, module) for name, module in fit if name != "lm_head"]
    for name, module in inner:
        model.set_submodule(name, Int4Linear(module))
    return len(inner)
