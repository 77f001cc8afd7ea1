"""Which groups a model has: one short forward with transformers' own cache, whose layers are read by exact type.

A subclass of a known layer may behave in any way, so it counts as unknown, and the model runs without reuse. Layouts are
kept as small JSON files, so that a model is probed only once.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from bough.cache.tree.state import Group, Kind
from bough.config import Settings
from bough.engines.shared.shapes import LayerKind, RowKind, aligned, group_rows
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.layout import TorchLayout, TorchRowLayout, TorchStateLayout, TorchStatePart
from bough.system.folders import write_private

PROBE_TOKENS = 8
_FORMAT = 1  # of layouts that are kept: raise it when the probe or the layout changes

_FULL = {DynamicLayer, LinearAttentionAndFullAttentionLayer}
_WINDOW = {DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer}
_RECURRENT = {LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer}
_HOLDS_NOTHING = {cache_utils.DummyLayer} if hasattr(cache_utils, "DummyLayer") else set()  # since transformers 5.23
_KNOWN = _FULL | _WINDOW | _RECURRENT | _HOLDS_NOTHING


def probe(forward: TorchForward) -> TorchLayout:
    """The groups of this model and the shapes of their state."""
    try:
        layers, vocab_size = _run(forward)
    except Exception as error:  # a model that needs another cache may raise anything
        return without_groups(f"the model does not run with transformers' DynamicCache ({type(error).__name__}: {error})")
    strange = sorted({type(layer).__name__ for layer in layers if type(layer) not in _KNOWN})
    if strange:
        return without_groups(f"its cache has layers of a kind that Bough does not know: {', '.join(strange)}", vocab_size)
    return _layout(layers, vocab_size)


def _run(forward: TorchForward) -> tuple[list[Any], int]:
    cache = DynamicCache(config=forward.model.config)
    ids = forward.tensor_of(range(PROBE_TOKENS))
    positions = torch.arange(PROBE_TOKENS, device=forward.device)[None]
    logits = forward.last_logits(ids, positions, cache)
    return list(cache.layers), logits.shape[-1]


def without_groups(reason: str, vocab_size: int = 0) -> TorchLayout:
    """The layout of a model whose state is not known, and why it is not."""
    return TorchLayout((), {}, {}, 0, vocab_size, unknown=reason)


def _layout(layers: list[Any], vocab_size: int) -> TorchLayout:
    rows = group_rows(map(_row_kind, layers), _row_layout)
    state = _state_layout(layers)
    states = {Group(len(rows), Kind.RECURRENT, state_bytes=state.nbytes): state} if state.parts else {}
    if not rows and not states:
        return without_groups("the model keeps no state in transformers' cache", vocab_size)
    kinds = tuple(map(_layer_kind, layers))
    empty = {i: _empty_class(layer) for i, layer in enumerate(layers) if kinds[i].is_empty}
    return TorchLayout((*rows, *states), rows, states, len(layers), vocab_size, kinds, empty)


def _empty_class(layer: Any) -> type[Any]:
    """The class of a layer that can be made in place of this one, which holds nothing."""
    return type(layer) if type(layer) in _HOLDS_NOTHING | {LinearAttentionLayer} else DynamicLayer


def _row_kind(layer: Any) -> RowKind | None:
    keys = getattr(layer, "keys", None)
    if type(layer) not in _FULL | _WINDOW or keys is None or not keys.numel():
        return None
    kind, window = (Kind.WINDOW, layer.sliding_window) if type(layer) in _WINDOW else (Kind.FULL, 0)
    return RowKind(kind, window, keys.shape[1], keys.shape[3], layer.values.shape[3], keys.dtype)


def _row_layout(kind: RowKind, layers: tuple[int, ...]) -> TorchRowLayout:
    return TorchRowLayout(layers, kind.heads, kind.key_dim, kind.value_dim, kind.dtype.itemsize, kind.dtype, kind.dtype)


def _state_layout(layers: list[Any]) -> TorchStateLayout:
    parts: list[TorchStatePart] = []
    num_states: dict[int, int] = {}
    marks: dict[int, tuple[bool, ...]] = {}
    nbytes = 0
    for layer_index, layer in enumerate(layers):
        if type(layer) not in _RECURRENT:
            continue
        for name, state_index, tensor in _tensors_of(layer):
            part = TorchStatePart(
                layer_index, tuple(tensor.shape), tensor.dtype.itemsize, nbytes, tensor.dtype, name, state_index
            )
            parts.append(part)
            nbytes += aligned(part.nbytes)
            num_states[layer_index] = len(layer.conv_states)
            marks[layer_index] = tuple(layer.has_previous_state.values())
    return TorchStateLayout(tuple(parts), num_states, marks, nbytes)


def _tensors_of(layer: Any) -> list[tuple[str, int, torch.Tensor]]:
    found = [
        (name, index, tensor)
        for name in ("conv_states", "recurrent_states")
        for index, tensor in getattr(layer, name).items()
    ]
    return [each for each in found if each[2] is not None]


def _layer_kind(layer: Any) -> LayerKind:
    rows = _row_kind(layer)
    states = tuple((name, index) for name, index, _ in _tensors_of(layer)) if type(layer) in _RECURRENT else ()
    return LayerKind(rows.kind if rows else None, rows.window if rows else 0, states)


def find_layout(settings: Settings, key: str, forward: TorchForward) -> TorchLayout:
    """The layout kept under the key of the model's verdict, or the one that the probe finds now, which is then kept.

    Only layouts in which every layer has rows and no state are kept: probing the others costs little of what loading them
    does. A file that cannot be read, or holds something else, counts as absent.
    """
    file = settings.cache_folder / "layouts" / f"{key}.json"
    layout = _read(file)
    if layout is None:
        layout = probe(forward)
        if layout.groups and not layout.states and not layout.empty:
            with contextlib.suppress(OSError):  # in a folder that cannot be written, the next load probes again
                file.parent.mkdir(parents=True, exist_ok=True)
                write_private(file, json.dumps(_describe(layout)))
    return layout


def _read(file: Path) -> TorchLayout | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return _make(found) if found["format"] == _FORMAT else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _describe(layout: TorchLayout) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "groups": [
            {
                "kind": group.kind.value,
                "window": group.window,
                "layers": rows.layers,
                "sizes": [rows.heads, rows.key_dim, rows.value_dim, rows.itemsize],
                "dtype": str(rows.dtype).removeprefix("torch."),
            }
            for group, rows in layout.rows.items()
        ],
        "layers": [[each.rows.value if each.rows else None, each.window] for each in layout.kinds],
        "vocab_size": layout.vocab_size,
    }


def _make(found: dict[str, Any]) -> TorchLayout:
    """The layout of a description. Raises KeyError, TypeError, ValueError or AttributeError if it is none."""
    rows: dict[Group, TorchRowLayout] = {}
    for index, each in enumerate(found["groups"]):
        heads, key_dim, value_dim, itemsize = each["sizes"]
        dtype = getattr(torch, each["dtype"])
        shape = TorchRowLayout(tuple(each["layers"]), heads, key_dim, value_dim, itemsize, dtype, dtype)
        rows[Group(index, Kind(each["kind"]), bytes_per_token=shape.row_bytes, window=each["window"])] = shape
    kinds = tuple(LayerKind(Kind(kind) if kind else None, window) for kind, window in found["layers"])
    return TorchLayout(tuple(rows), rows, {}, len(kinds), found["vocab_size"], kinds)
