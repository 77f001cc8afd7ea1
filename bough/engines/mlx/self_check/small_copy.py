"""A small random copy of a model: the same code paths in float32, at a size where windows and chunks are soon passed.

A short prompt on real weights never fills a window of thousands of rows, and rounding, of half precision or of quantized
weights, hides small mistakes. The copy has the first layers of each kind, a window of a few rows, weights that are not
quantized and large enough that every layer shows in the logits, and recurrent states that remember for a while.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from bough.engines.mlx.device import is_out_of_memory
from bough.engines.mlx.forward import MlxForward
from bough.engines.mlx.layout import MlxLayout
from bough.engines.mlx.loading.families import model_classes
from bough.engines.mlx.loading.model import MlxModel, weights_of
from bough.engines.mlx.self_check.probe import probe
from bough.engines.self_check.check import COPY_GAIN, COPY_SEED, COPY_WINDOW

_SLOWER = 3.0  # less in the logarithm of a decay: as models are first made, most states forget within a token
_MOST_BYTES = 2_500_000_000  # or a tenth of the model's own; gemma3 of 27 billion weights takes 1.7
_DEPTH_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WINDOW_NAMES = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")
_QUANTIZATION = ("quantization", "quantization_config")
_SMALLER = {
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 128,
    "block_ff_dim": 128,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
}


def make_small_copy(forward: MlxForward, layout: MlxLayout) -> MlxForward | None:
    """The copy in float32, evaluated, or None where none can be built that has every kind of layer."""
    most_bytes = max(_MOST_BYTES, _bytes_of(forward.model) // 10)
    for config in _small_configs(forward.config, layout):
        try:
            model = _model_of(config)
            if type(model) is not type(forward.model) or _bytes_of(model) > most_bytes:
                return None
            small = make_random(config, mx.float32)
        except Exception as error:  # any family may tie its sizes together, or need more layers than are left
            if is_out_of_memory(error):
                raise
            continue
        if _is_faithful(small, layout):
            return small
    return None


def make_random(config: dict[str, Any], dtype: mx.Dtype) -> MlxForward:
    """A model of this configuration, evaluated; the same weights every time, but for their type."""
    with _seeded():  # biases and decays stay near what modules start with, and some modules draw that
        model = _model_of(config)
    weights = weights_of(model)
    keys = mx.random.split(mx.random.key(COPY_SEED), len(weights))
    drawn = [(name, _draw(name, array, key)) for (name, array), key in zip(weights.items(), keys, strict=True)]
    model.update(tree_unflatten(drawn))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.state)
    return MlxForward(MlxModel(model, config))


@contextmanager
def _seeded() -> Iterator[None]:
    """Let MLX's own random numbers begin at `COPY_SEED` within this context; later ones depend on those before it."""
    following: Any = mx.random.randint(0, 2**31 - 1).item()  # the state itself cannot be put back
    mx.random.seed(COPY_SEED)
    try:
        yield
    finally:
        mx.random.seed(following)


def _model_of(config: dict[str, Any]) -> Any:
    return model_classes(config)[0](_args_of(config))


def _args_of(config: dict[str, Any]) -> Any:
    return model_classes(config)[1].from_dict(copy.deepcopy(config))  # some families write into their configuration


def _bytes_of(model: Any) -> int:
    return sum(array.nbytes for array in weights_of(model).values())


def _is_faithful(small: MlxForward, layout: MlxLayout) -> bool:
    """Whether the copy has every kind of layer that the model has, and small windows."""
    found = probe(small)
    kinds, wanted = ({replace(kind, window=0) for kind in each.kinds} for each in (found, layout))
    return kinds == wanted and all(group.window in (0, COPY_WINDOW) for group in found.groups)


def _draw(name: str, array: mx.array, key: mx.array) -> mx.array:
    noise = mx.random.normal(array.shape, dtype=mx.float32, key=key)
    if name.endswith("A_log"):
        return array.astype(mx.float32) - _SLOWER + 0.1 * noise
    if array.ndim < 2:  # norms and biases stay near what their modules start with
        return array.astype(mx.float32) + 0.1 * noise
    num_inputs = math.prod(array.shape[1:]) if "conv" in name else array.shape[-1]
    return COPY_GAIN / math.sqrt(num_inputs) * noise


def _small_configs(config: dict[str, Any], layout: MlxLayout) -> Iterator[dict[str, Any]]:
    """Small configurations with two and more layers that have a state of their own, the smallest first."""
    config = _with_defaults({name: value for name, value in config.items() if name not in _QUANTIZATION})
    text = _text_of(config)
    name = next((name for name in _DEPTH_NAMES if isinstance(text.get(name), int)), None)
    if name is None:
        return
    num_shared = text.get("num_kv_shared_layers") or 0
    for num_own in range(min(2, text[name] - num_shared), text[name] - num_shared + 1):
        small = copy.deepcopy(config)
        _shrink(small, layout)
        _cut_layers(_text_of(small), name, num_own, min(num_shared, num_own))
        yield small


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the library's defaults for the keys that get smaller here."""
    taken = vars(_args_of(config))
    names = (*_DEPTH_NAMES, *_WINDOW_NAMES, *_SMALLER, "num_kv_shared_layers")
    return {name: taken[name] for name in names if isinstance(taken.get(name), int)} | config


def _text_of(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _shrink(config: dict[str, Any], layout: MlxLayout) -> None:
    windows = {group.window for group in layout.groups if group.window}
    text = _text_of(config)
    if windows and not any(text.get(name) in windows for name in _WINDOW_NAMES):
        text["sliding_window"] = max(windows)
    for each in (config, text):
        for name in _WINDOW_NAMES:
            if each.get(name) in windows:
                each[name] = COPY_WINDOW
        for name, most in _SMALLER.items():
            if isinstance(each.get(name), int):
                each[name] = min(each[name], most)


def _cut_layers(text: dict[str, Any], name: str, num_own: int, num_shared: int) -> None:
    """Keep the first layers: cut lists, and strings with one letter for each layer."""
    num_before, num_after = text[name], num_own + num_shared
    for key, value in list(text.items()):
        if isinstance(value, list | str) and len(value) == num_before and key != "model_type":
            text[key] = value[:num_after]
    text[name] = num_after
    if num_shared:
        text["num_kv_shared_layers"] = num_shared
