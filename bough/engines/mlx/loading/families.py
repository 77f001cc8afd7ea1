"""Classes that replace mlx-lm's own, for models that need help to load what transformers saves.

A verdict of the self-check depends on the content of this file, for the models whose class is here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx

from bough.engines.mlx.library import falcon_h1, gpt_oss, llama, mamba2, nn, utils

Weights = dict[str, mx.array]


class WindowedLlama(llama.Model):  # type: ignore[misc]
    """A llama with a window in all layers, as in the first Mistral: mlx-lm requires one layer without."""

    def __init__(self, args: Any) -> None:
        super().__init__(replace(args, layer_types=None))
        for layer in self.model.layers:
            layer.use_sliding = True
        self.model.swa_idx = 0


class GptOss(gpt_oss.Model):  # type: ignore[misc]
    """Takes experts that are not quantized, too: mlx-lm splits these along the wrong axis and gives them a wrong name.

    Rotates by frequencies whose bounds are not rounded, if the configuration says so: mlx-lm rounds them always.
    """

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        scaling = args.rope_scaling or {}
        if scaling.get("rope_type") == "yarn" and scaling.get("truncate") is False:
            frequencies = _yarn_frequencies(args.head_dim, args.rope_theta, scaling)
            for layer in self.layers:
                layer.self_attn.rope._freqs = frequencies

    def sanitize(self, weights: Weights) -> Weights:
        if not any(name.endswith("experts.gate_up_proj") for name in weights):
            return dict(super().sanitize(weights))
        return {name: weight for item in weights.items() for name, weight in _plain_experts(*item)}


def _plain_experts(name: str, weight: mx.array) -> Iterator[tuple[str, mx.array]]:
    """transformers has experts as [expert, in, out], gates and ups interleaved; mlx-lm separately, as [expert, out, in]."""
    prefix, _, kind = name.rpartition(".")
    if kind in ("gate_up_proj", "down_proj"):
        weight = weight.swapaxes(-1, -2)
    part = "bias" if kind.endswith("_bias") else "weight"
    if kind in ("gate_up_proj", "gate_up_proj_bias"):
        yield f"{prefix}.gate_proj.{part}", mx.contiguous(weight[:, ::2])
        yield f"{prefix}.up_proj.{part}", mx.contiguous(weight[:, 1::2])
    elif kind in ("down_proj", "down_proj_bias"):
        yield f"{prefix}.down_proj.{part}", mx.contiguous(weight)
    else:
        yield name, weight


def _yarn_frequencies(dims: int, base: float, scaling: dict[str, Any]) -> mx.array:
    """The wavelengths of YaRN, over 2π: short ones as they are, long ones stretched, a ramp between two bounds."""

    def bound(rotations: float) -> float:
        length = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return dims * math.log(length) / (2 * math.log(base))

    low, high = max(bound(scaling.get("beta_fast") or 32), 0), min(bound(scaling.get("beta_slow") or 1), dims - 1)
    stretched = mx.clip((mx.arange(dims // 2, dtype=mx.float32) - low) / max(high - low, 0.001), 0, 1)
    plain = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    frequencies: mx.array = plain / (stretched / scaling["factor"] + 1 - stretched)
    return frequencies


class FalconH1(falcon_h1.Model):  # type: ignore[misc]
    """Multiplies keys and values as the configuration says: mlx-lm looks for these weights under other names."""

    def sanitize(self, weights: Weights) -> Weights:
        conv = weights["model.layers.0.mamba.conv1d.weight"]
        if conv.shape[-1] <= conv.shape[1]:
            return weights  # mlx-lm converted them: they were multiplied then
        factors = {"k_proj.weight": self.args.key_multiplier, "v_proj.weight": self.args.attention_in_multiplier}
        for name in weights:
            weights[name] = weights[name] * factors.get(".".join(name.split(".")[-2:]), 1)
        return dict(super().sanitize(weights))


class Mamba2(mamba2.Model):  # type: ignore[misc]
    """Norms each group of channels by itself, as the model was trained: mlx-lm norms all channels together."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        for layer in self.layers:
            layer.mixer.norm = _GroupedNorm(layer.mixer.norm, args.n_groups)


class _GroupedNorm(nn.Module):  # type: ignore[misc]
    """The gated norm of Mamba 2, by groups."""

    def __init__(self, norm: Any, num_groups: int) -> None:
        super().__init__()
        self.weight, self.eps, self.num_groups = norm.weight, norm.eps, num_groups

    def __call__(self, hidden: mx.array, gate: mx.array) -> mx.array:
        groups = mx.unflatten(nn.silu(gate) * hidden, -1, (self.num_groups, -1))
        normed: mx.array = self.weight * mx.fast.rms_norm(groups, None, self.eps).flatten(-2)
        return normed


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """The classes of the model and of its arguments. Raises ValueError if mlx-lm has none."""
    model, args = utils._get_classes(config)
    if model is llama.Model and set(config.get("layer_types") or ()) == {"sliding_attention"}:
        return WindowedLlama, args
    return {gpt_oss.Model: GptOss, falcon_h1.Model: FalconH1, mamba2.Model: Mamba2}.get(model, model), args
