"""Which groups a model has: two short forwards with mlx-lm's own caches, which are read by exact type.

A subclass of a known cache may behave in any way, so it counts as unknown, and the model runs without reuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from bough.cache.tree.state import Group, Kind
from bough.engines.mlx.forward import MlxForward
from bough.engines.mlx.layout import Branch, MlxLayout, MlxRowLayout, MlxStateLayout, MlxStatePart
from bough.engines.mlx.library import cache
from bough.engines.shared.shapes import LayerKind, RowKind, aligned, group_rows

PROBE_TOKENS = 8

_ROWS = {cache.KVCache, cache.RotatingKVCache}


class _UnknownState(Exception):
    """A model has state of a kind that Bough cannot keep."""


def probe(forward: MlxForward) -> MlxLayout:
    """The groups of this model and the shapes of their state."""
    vocab_size = 0
    try:
        caches, vocab_size = _run(forward, PROBE_TOKENS)
        short, _ = _run(forward, 1)
        return _layout(caches, list(_leaves(short)), vocab_size)
    except _UnknownState as error:
        return without_groups(str(error), vocab_size)
    except Exception as error:  # a model that must be called differently may raise anything
        reason = f"the model does not run with mlx-lm's own caches ({type(error).__name__}: {error})"
        return without_groups(reason, vocab_size)


def without_groups(reason: str, vocab_size: int) -> MlxLayout:
    """The layout of a model whose state is not known."""
    return MlxLayout((), {}, {}, (), {}, vocab_size, unknown=reason)


def _run(forward: MlxForward, num_tokens: int) -> tuple[list[Any], int]:
    caches = forward.make_cache()
    logits = forward.last_logits(mx.arange(num_tokens)[None], caches)
    mx.eval(logits, [_arrays(leaf) for leaf in _leaves(caches)])
    return caches, logits.shape[-1]


def _layout(caches: Sequence[Any], short: Sequence[Any], vocab_size: int) -> MlxLayout:
    leaves = list(_leaves(caches))
    if blank := [type(leaf).__name__ for leaf in leaves if not _arrays(leaf)]:
        raise _UnknownState(f"{len(blank)} of its caches stay empty: {', '.join(sorted(set(blank)))}")
    rows = group_rows(map(_row_kind, leaves), _row_layout)
    state = _state_layout(leaves, short)
    states = {Group(len(rows), Kind.RECURRENT, state_bytes=state.nbytes): state} if state.parts else {}
    if not rows and not states:
        raise _UnknownState("the model keeps no state in mlx-lm's caches")
    num_slots = {index: len(leaf.cache) for index, leaf in enumerate(leaves) if type(leaf) is cache.ArraysCache}
    tree, kinds = _tree(caches, iter(range(len(leaves)))), tuple(map(_layer_kind, leaves))
    return MlxLayout((*rows, *states), rows, states, tree, num_slots, vocab_size, kinds)


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """Every cache that holds something itself, in order."""
    for each in caches:
        if type(each) is cache.CacheList:
            yield from _leaves(each.caches)
        else:
            yield each


def _tree(caches: Sequence[Any], numbers: Iterator[int]) -> tuple[Branch, ...]:
    return tuple(_tree(each.caches, numbers) if type(each) is cache.CacheList else next(numbers) for each in caches)


def _arrays(leaf: Any) -> list[mx.array]:
    if type(leaf) is cache.ArraysCache:
        return [each for each in leaf.cache if each is not None]
    if type(leaf) in _ROWS:
        return [] if leaf.keys is None else [leaf.keys, leaf.values]
    raise _UnknownState(f"its caches are of a kind that Bough does not know: {type(leaf).__name__}")


def _row_kind(leaf: Any) -> RowKind | None:
    if type(leaf) not in _ROWS:
        return None
    keys, values = leaf.keys, leaf.values
    if keys.shape[1] != values.shape[1] or keys.dtype != values.dtype:
        raise _UnknownState(f"its keys {keys.shape} {keys.dtype} and values {values.shape} {values.dtype} are unlike")
    kind, window = (Kind.WINDOW, leaf.max_size) if type(leaf) is cache.RotatingKVCache else (Kind.FULL, 0)
    if window and leaf.keep:
        raise _UnknownState(f"its window of {window} rows keeps the first {leaf.keep} for ever")
    return RowKind(kind, window, keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)


def _row_layout(kind: RowKind, layers: tuple[int, ...]) -> MlxRowLayout:
    return MlxRowLayout(layers, kind.heads, kind.key_dim, kind.value_dim, kind.dtype.size, kind.dtype)


def _state_layout(leaves: Sequence[Any], short: Sequence[Any]) -> MlxStateLayout:
    parts: list[MlxStatePart] = []
    nbytes = 0
    for layer, (leaf, other) in enumerate(zip(leaves, short, strict=True)):
        if type(leaf) is not cache.ArraysCache:
            continue
        for slot, (array, after_one) in enumerate(zip(leaf.cache, other.cache, strict=True)):
            shape, short_shape = (None if each is None else tuple(each.shape) for each in (array, after_one))
            if shape != short_shape:
                raise _UnknownState(f"its recurrent state grows: {short_shape} after 1 token, then {shape}")
            if shape is not None:
                parts.append(MlxStatePart(layer, shape, array.dtype.size, nbytes, array.dtype, slot))
                nbytes += aligned(parts[-1].nbytes)
    return MlxStateLayout(tuple(parts), nbytes)


def _layer_kind(leaf: Any) -> LayerKind:
    rows = _row_kind(leaf)
    if rows is None:
        return LayerKind(None, states=tuple(slot for slot, array in enumerate(leaf.cache) if array is not None))
    return LayerKind(rows.kind, rows.window)
