"""The description of a model for `bough show` and the APIs, without loading its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bough.models.defaults import read_defaults
from bough.models.encoders.files import ModelKind, find_kind, read_embedder, read_reranker
from bough.models.files import ModelFiles, hash_file
from bough.models.fingerprint import combine_hashes
from bough.models.tokenizer import Tokenizer, load_tokenizer
from bough.models.weights.check import check_weights, read_shapes
from bough.models.weights.gguf_header import read_gguf_header

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")

_ENCODER_CAPABILITIES: Mapping[ModelKind, tuple[str, ...]] = {
    ModelKind.EMBEDDER: ("embedding",),
    ModelKind.RERANKER: ("rerank",),
}


@dataclass(frozen=True)
class ModelInfo:
    """A description of a model. `context_tokens` is 0 if it is not known; `digest` is of the weights files."""

    name: str
    architecture: str
    num_parameters: int
    context_tokens: int
    dtype: str
    quantization: str
    source: str
    size_bytes: int
    digest: str
    has_tokenizer: bool
    has_chat_template: bool
    capabilities: tuple[str, ...]
    sampling: Mapping[str, Any]  # the model's own defaults, by the names of SamplingParams


def describe(files: ModelFiles, hashes: Mapping[str, str] | None = None) -> ModelInfo:
    """Describe a model from its files. The weights are read for their digest, unless `hashes` has them by name.

    Raises UnsupportedModel if the files are damaged.
    """
    check_weights(files)
    config = files.config | (files.config.get("text_config") or {})
    tokenizer = load_tokenizer(files)
    template = tokenizer.template if tokenizer.has_text else None
    known = hashes or {}
    limits = [next((int(config[key]) for key in _CONTEXT_KEYS if config.get(key)), 0), _read_limit(files)]
    return ModelInfo(
        name=files.name,
        architecture=str((files.config.get("architectures") or [config.get("model_type", "")])[0]),
        num_parameters=files.num_parameters or count_parameters(files),
        context_tokens=min(filter(None, limits), default=0),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        quantization=files.quantization or describe_quantization(files),
        source=files.source,
        size_bytes=files.size_bytes,
        digest="sha256:" + combine_hashes([known.get(file.name) or hash_file(file) for file in files.weights]),
        has_tokenizer=files.has_tokenizer,
        has_chat_template=template is not None and template.is_present,
        capabilities=_ENCODER_CAPABILITIES.get(find_kind(files)) or _capabilities(tokenizer),
        sampling=dict(read_defaults(files).values),
    )


def count_parameters(files: ModelFiles) -> int:
    """The number of weights, from the files' headers. Packed weights count as unpacked ones. Raises UnsupportedModel."""
    if files.is_gguf:
        return sum(read_gguf_header(file).num_parameters for file in files.weights)
    shapes: dict[str, list[int]] = {}
    for file in files.weights:
        shapes |= read_shapes(file)
    packing = _read_packing(files)
    return sum(_count(name, shape, shapes, packing) for name, shape in shapes.items())


def describe_quantization(files: ModelFiles) -> str:
    """The quantization by MLX, such as "4-bit"; empty if there is none."""
    packing = _read_packing(files)
    return f"{packing['bits']}-bit" if "bits" in packing else ""


def _read_packing(files: ModelFiles) -> dict[str, Any]:
    """The quantization by MLX in the configuration: for all weights, and by name for those that differ."""
    found = files.config.get("quantization")
    return found if isinstance(found, dict) else {}


def _count(name: str, shape: list[int], shapes: Mapping[str, Any], packing: dict[str, Any]) -> int:
    """The size of one weight. MLX stores a scale, and usually a bias, for each group of columns of a packed weight."""
    module, _, part = name.rpartition(".")
    if not packing or f"{module}.scales" not in shapes or part not in ("weight", "scales", "biases"):
        return math.prod(shape)
    own = packing.get(module)
    group_size = (own if isinstance(own, dict) else packing).get("group_size", 0)
    return math.prod(shape) * int(group_size) if part == "scales" else 0


def _read_limit(files: ModelFiles) -> int:
    """The most tokens of one text that the files of an encoder allow; 0 if they do not say. Raises UnsupportedModel."""
    kind = find_kind(files)
    if kind is ModelKind.GENERATOR:
        return 0
    return (read_embedder(files) if kind is ModelKind.EMBEDDER else read_reranker(files)).text.max_tokens or 0


def _capabilities(tokenizer: Tokenizer) -> tuple[str, ...]:
    insert = ("insert",) if tokenizer.infill is not None else ()
    template = tokenizer.template if tokenizer.has_text else None
    if template is None or not template.is_present:
        return ("completion", *insert)
    tools = ("tools",) if template.supports_tools else ()
    thinking = ("thinking",) if template.supports_thinking else ()
    return ("completion", "chat", *tools, *thinking, *insert)
