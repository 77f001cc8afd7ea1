"""Smaller models with a model's code: a small random copy, and the model cut to its first layers.

The copy has the same code paths in float32, at a size where windows and chunks are soon passed.

A short prompt on real weights never fills a window of thousands of rows, and rounding in bfloat16 hides small mistakes. The
copy has the first layers of each kind, a window of a few rows, and weights large enough that every layer is heard in the
logits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch

from bough.engines.self_check.check import COPY_GAIN, COPY_SEED, COPY_WINDOW
from bough.engines.shared.shapes import LayerKind
from bough.engines.torch.cpu.packing import packed_weights
from bough.engines.torch.device import device_of, is_out_of_memory

_MOST_PARAMETERS = 300_000_000  # or a tenth of the model's own
_WINDOW_NAMES = ("sliding_window", "attention_chunk_size", "attention_window_size")
_FEWEST_LAYERS = 8  # code may depend on a layer's number: it does so in cycles of up to six layers
_PLAIN = (bool, int, float, str, NoneType)
_SMALLER = {
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "intermediate_size": 128,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
}


def make_small_copy(model: Any, kinds: Sequence[LayerKind]) -> Any | None:
    """The copy on the model's device, or None where it cannot be built. `kinds` are those of the model's cache layers."""
    try:
        config = _small_config(model.config, kinds)
        with torch.device("meta"):
            num_parameters = sum(each.numel() for each in type(model)(copy.deepcopy(config)).parameters())
        if num_parameters > max(_MOST_PARAMETERS, sum(each.numel() for each in model.parameters()) // 10):
            return None
        with torch.random.fork_rng(), torch.device("cpu"):
            torch.manual_seed(COPY_SEED)
            small = type(model)(config)
        device = device_of(model)
        return small.to(device=device, dtype=torch.float32).eval().requires_grad_(False)
    except Exception as error:  # any family may tie its sizes together in its own way
        if is_out_of_memory(error):
            raise
        return None


@contextmanager
def first_layers(model: Any) -> Iterator[None]:
    """Inside, the decoder named `model` has only its first layers: enough to have every kind of layer in the model.

    The configuration is cut in place as well, because attention modules refer to it.
    """
    text, layers = model.config.get_text_config(decoder=True), model.model.layers
    kinds = [_kind_of(layer) for layer in layers]
    num_layers = max(_FEWEST_LAYERS, 1 + max(kinds.index(kind) for kind in kinds))
    before = _cut_layers(text, len(layers), min(num_layers, len(layers)))
    model.model.layers = layers[:num_layers]
    try:
        yield
    finally:
        model.model.layers = layers
        for name, value in before.items():
            setattr(text, name, value)


def _kind_of(layer: Any) -> tuple[Any, ...]:
    """Everything that may make a layer compute something else than another one, except the values of its weights."""
    types = [each.matrix.type for each in packed_weights(layer)]
    modules = [(name, type(module), *_plain_attributes(module)) for name, module in layer.named_modules()]
    return *types, *modules


def _plain_attributes(module: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(module).items() if name != "layer_idx" and isinstance(value, _PLAIN)]


def _small_config(config: Any, kinds: Sequence[LayerKind]) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    num_before, shared = text.num_hidden_layers, getattr(text, "num_kv_shared_layers", 0) or 0
    kinds = kinds[: num_before - shared]  # transformers 5.23 has cache layers for those that share another's, too
    num_own = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
    num_own = min(max(num_own, 2), len(kinds))
    num_shared = min(shared, num_own)
    _cut_layers(text, num_before, num_own + num_shared)
    if shared:
        text.num_kv_shared_layers = num_shared
    for name in _WINDOW_NAMES:
        if getattr(text, name, None):
            setattr(text, name, COPY_WINDOW)
    for name, most in _SMALLER.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), most))
    text.pad_token_id = None
    if hasattr(text, "initializer_range"):
        text.initializer_range = COPY_GAIN * text.hidden_size**-0.5
    return config


def _cut_layers(text: Any, num_before: int, num_after: int) -> dict[str, Any]:
    """Keep the first layers: cut lists with one entry for each layer, and filter lists of layer numbers.

    Returns what has changed, by name, as it was.
    """
    changed: dict[str, Any] = {"num_hidden_layers": num_after}
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == num_before:
            changed[name] = value[:num_after]
        elif isinstance(value, list) and name.endswith(("layer_indices", "layer_ids", "layer_idx")):
            changed[name] = [index for index in value if index < num_after]
    before = {name: getattr(text, name) for name in changed}
    for name, value in changed.items():
        setattr(text, name, value)
    return before
