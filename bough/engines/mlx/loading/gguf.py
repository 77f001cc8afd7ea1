"""GGUF files as MLX reads them: quantized weights stay so where MLX has such a layout (Q4_0, Q4_1, Q8_0, Q4_K).

The configuration comes with the file's folder, in transformers' words; the file itself gives the weights and how its
llamas turn their heads: their queries and keys are stored in another order than elsewhere, for which MLX has a flag.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx

from bough.engines.mlx.library import nn, rope_utils, utils
from bough.engines.mlx.loading.families import model_classes
from bough.errors import UnsupportedModel
from bough.models.gguf.folder import ARCHITECTURES

_ROTARY_FACTORS = "rope_freqs.weight"
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(\w+)")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load(file: Path, config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model in the file, and its configuration with what the file adds to it.

    Raises UnsupportedModel for architectures and types of weights that are not known here, and whatever mlx-lm raises if
    the weights do not fill the model.
    """
    weights, architecture = read_weights(file)
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file} holds a model of the architecture {architecture!r}, and the mlx engine reads GGUF files of "
            f"{', '.join(ARCHITECTURES)}; the torch engine converts others"
        )
    factors = weights.pop(_ROTARY_FACTORS, None)
    named = {_name_of(name): weight for name, weight in weights.items()}
    config = config | {"rope_traditional": architecture == "llama"}
    model_class, arguments = model_classes(config)
    model = model_class(arguments.from_dict(config))
    config |= _quantize(model, named)
    model.load_weights(list(named.items()), strict=True)
    if factors is not None:
        _scale_rotation(model, config, factors)
    return model, config


def read_weights(file: Path) -> tuple[dict[str, mx.array], str]:
    """The weights under the file's own names, as MLX holds them, and the architecture.

    Raises UnsupportedModel if MLX cannot read the file.
    """
    load_file: Any = mx.load  # whose type does not depend on the arguments
    try:
        weights, metadata = load_file(str(file), format="gguf", return_metadata=True)
    except Exception as error:
        raise UnsupportedModel(f"MLX cannot read {file}: {error}; the torch engine may convert it") from error
    if any(_was_unpacked(*each) for each in weights.items()):
        _replace_misread(file, weights)
    return weights, str(metadata.get("general.architecture"))


def _was_unpacked(name: str, weight: mx.array) -> bool:
    """Whether MLX may have unpacked this matrix to float16."""
    return weight.ndim == 2 and weight.dtype == mx.float16 and not name.endswith((".scales", ".biases"))


def _replace_misread(file: Path, weights: dict[str, mx.array]) -> None:
    """Replace the weights that MLX misreads: bfloat16, whose range float16 lacks, and half of Q4_K."""
    import gguf

    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            weights[tensor.name] = mx.array(tensor.data.view("uint16")).view(mx.bfloat16)
        elif tensor.tensor_type == gguf.GGMLQuantizationType.Q4_K:
            stem = tensor.name.removesuffix("weight")
            weights |= {stem + part: each for part, each in unpack_q4_k(tensor.data).items()}


def unpack_q4_k(rows: Any) -> dict[str, mx.array]:
    """Rows of Q4_K, as bytes, in MLX's layout: both have four bits, and a scale and a bias for every 32 columns.

    A block of 144 bytes is 256 columns: two halves that scale it, eight scales and eight biases of six bits in twelve
    bytes, then the columns, two groups of 32 sharing their bytes. MLX has eight columns, the first lowest, in a word.
    """
    blocks = mx.array(rows.reshape(rows.shape[0], -1, 144))
    halves = blocks[..., :4].view(mx.float16).astype(mx.float32)
    sixes = blocks[..., 4:16]
    first, second, third = sixes[..., :4], sixes[..., 4:8], sixes[..., 8:]
    scales = mx.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    biases = mx.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    columns = mx.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(rows.shape[0], -1, 8)
    words = (columns.astype(mx.uint32) << (4 * mx.arange(8, dtype=mx.uint32))).sum(axis=-1).astype(mx.uint32)
    return {
        "weight": words,
        "scales": (halves[..., :1] * scales).flatten(1).astype(mx.float16),
        "biases": (-halves[..., 1:] * biases).flatten(1).astype(mx.float16),
    }


def _name_of(name: str) -> str:
    """mlx-lm's name of a weight; an unknown name stays, and loading the model then raises an error about it."""
    block = _BLOCK.fullmatch(name)
    if block:
        return f"model.layers.{block[1]}.{_NAMES.get(block[2], block[2])}.{block[3]}"
    kind, _, part = name.rpartition(".")
    return f"{_NAMES.get(kind, kind)}.{part}"


def _quantize(model: Any, weights: dict[str, mx.array]) -> dict[str, Any]:
    """Make layers quantized where the file has quantized weights. Returns the entry for the configuration."""
    found: dict[str, dict[str, Any]] = {}

    def how(path: str, module: Any) -> dict[str, Any] | bool:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        found[path] = utils.infer_quant_config(path, module, weights)
        return found[path]

    nn.quantize(model, class_predicate=how)
    if not found:
        return {}
    return {"quantization": {"group_size": 32, "bits": min(each["bits"] for each in found.values()), **found}}


def _scale_rotation(model: Any, config: dict[str, Any], factors: mx.array) -> None:
    """Llama 3.1 and later: the file has a factor for each wavelength."""
    for layer in model.layers:
        dims, base = layer.self_attn.head_dim, config["rope_theta"]
        rope = rope_utils.YarnRoPE(dims, traditional=config["rope_traditional"], base=base)
        rope._freqs = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims) * factors
        layer.self_attn.rope = rope
