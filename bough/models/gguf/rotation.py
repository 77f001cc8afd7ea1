"""Scaled rotations of a GGUF file, which transformers reads for a few architectures alone.

A file has them in its metadata ("linear", "yarn"), as a divisor for each frequency (`rope_freqs.weight`: Llama 3.1 and
later), or as two lists of divisors (Phi 3 and 4). Without its scaling a model answers, and wrongly: so a scaling that
cannot be passed to transformers is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bough.errors import UnsupportedModel
from bough.models.gguf.reading import unpack_tensor
from bough.models.weights.gguf_header import GgufModel

_DIVISORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all models that have divisors; the factor is their largest."""
_NEARLY = 1e-3


def add_scaling(config: Any, model: GgufModel) -> None:
    """Add the file's scaling to a transformers configuration that has none. Raises UnsupportedModel if it is not known."""
    text = config.get_text_config(decoder=True)
    rotations = getattr(text, "rope_parameters", None)
    if not isinstance(rotations, dict):
        return
    full: dict[str, Any] = rotations.get("full_attention", rotations)  # sliding windows are never scaled
    if full.get("rope_type", "default") == "default":
        full |= _read_scaling(model, float(full.get("rope_theta", 10_000.0)))


def _read_scaling(model: GgufModel, theta: float) -> dict[str, Any]:
    tensors = {each.name: each for each in model.header.tensors}
    if _LONG in tensors or _SHORT in tensors:
        raise UnsupportedModel(
            f"{model.file.name} scales its rotations by two lists ({_LONG}), which cannot be read from GGUF files: use the "
            "model's original repository, with safetensors"
        )
    if _DIVISORS in tensors:
        return _of_llama3(model, [float(each) for each in unpack_tensor(model, tensors[_DIVISORS]).ravel()], theta)
    kind, factor = _get(model, "scaling.type") or "none", _get(model, "scaling.factor")
    if kind == "none" or factor in (None, 0, 1):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    original = _get(model, "scaling.original_context_length")
    if kind != "yarn" or not original:
        raise UnsupportedModel(
            f"{model.file.name} scales its rotations by {kind!r} and {factor:g}, which is not known here"
        )
    return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": int(original)}


def _of_llama3(model: GgufModel, divisors: Sequence[float], theta: float) -> dict[str, Any]:
    """The parameters that these divisors were made from."""
    factor = max(divisors)
    if factor == min(divisors) == 1:
        return {}
    expected = [_divisor(theta ** (-i / len(divisors)), factor) for i in range(len(divisors))]
    if not all(math.isclose(found, wanted, rel_tol=_NEARLY) for found, wanted in zip(divisors, expected, strict=True)):
        raise UnsupportedModel(
            f"{model.file.name} scales its rotations by divisors from {min(divisors):g} to {factor:g} ({_DIVISORS}), which "
            "are not those of Llama 3"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _divisor(frequency: float, factor: float) -> float:
    """By how much Llama 3 slows a frequency down: the low ones by the factor, the high ones not, those between in part."""
    turns = _LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)
    share = (turns - _LLAMA3["low_freq_factor"]) / (_LLAMA3["high_freq_factor"] - _LLAMA3["low_freq_factor"])
    share = min(1.0, max(0.0, share))
    return 1.0 / ((1.0 - share) / factor + share)


def _get(model: GgufModel, name: str) -> Any:
    return model.header.values.get(f"{model.header.architecture}.rope.{name}")
