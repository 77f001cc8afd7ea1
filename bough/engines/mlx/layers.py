"""The caches that a lane gives to an mlx-lm model: they write into the lane's buffers.

A model reads a cache's `offset` and mask, passes it the keys and values of a run, and receives those to look at. All layers
of a lane are at its offset; one that has taken a run in is ahead of it until the run is over. Recurrent layers are mlx-lm's
own `ArraysCache`.

In a step of several lanes each lane looks at its own rows, with no padding and no mask. mlx-lm's models call
`scaled_dot_product_attention` by a name in their own module, with the layer's cache among the arguments. That name is made
to refer to `attend`, which calls the library's function for any other cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from bough.engines.mlx.buffers import MlxRowBuffer
from bough.engines.mlx.library import base
from bough.engines.shared.lane import HasOffset

Mask = mx.array | str | None

_ATTENTION = "scaled_dot_product_attention"
_STOCK_ATTENTION = getattr(base, _ATTENTION)


class MlxRowLayer:
    """The keys and values of one layer, in the buffer of its group. Stands for a KVCache or RotatingKVCache."""

    def __init__(self, lane: HasOffset, buffer: MlxRowBuffer, layer_in_group: int) -> None:
        self._lane = lane
        self.buffer = buffer
        self.layer_in_group = layer_in_group
        self._taken = 0

    def begin_run(self) -> None:
        self._taken = 0

    @property
    def offset(self) -> int:
        return self._lane.offset + self._taken

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the run's rows and return those that its queries may look at, the run's own included."""
        self.buffer.write_run(self.layer_in_group, keys, values)
        self._taken = keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The same again, for layers that look at another layer's rows."""
        return self.buffer.seen(self.layer_in_group)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The rows that each of `N` new tokens may look at; the arguments have the names that mlx-lm's models use."""
        group = self.buffer.group
        held = self._lane.offset - group.first_needed(self._lane.offset)
        if group.window:
            window_size = min(window_size or group.window, group.window)
        is_cut = window_size is not None and held + N > window_size and (N > 1 or window_size != group.window)
        if N == 1 and not is_cut:
            return None
        if not is_cut and not return_array:
            return "causal"
        mask: mx.array = base.create_causal_mask(N, held, window_size=window_size if is_cut else None)
        return mask

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        return self.keys_and_values()


class MlxBatchRowLayer:
    """One layer of several lanes within one step: each lane's row goes into its own buffer.

    `attend` attends to each lane's rows separately, without padding and without a mask.
    """

    def __init__(self, layers: Sequence[MlxRowLayer]) -> None:
        self.layers = layers
        self.offset = mx.array([layer.offset for layer in layers])
        self._taken: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write each lane's row. The returned arrays are never read: `attend` reads each lane's own rows."""
        for index, layer in enumerate(self.layers):
            layer.update_and_fetch(keys[index : index + 1], values[index : index + 1])
        self._taken = keys, values
        return self._taken

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The same again, for layers that look at another layer's rows."""
        assert self._taken is not None, "a layer reads rows that no layer has written"
        return self._taken

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: a single new token may look at all rows of its lane, if the model means the same window."""
        window = self.layers[0].buffer.group.window
        assert N == 1 and window_size in (None, window), f"{N} tokens a lane, a window of {window_size} over {window} rows"


class LayerTuple:
    """Several caches of one layer. Stands for a CacheList."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self.caches = tuple(caches)

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> Any:
    """The library's attention, for a batch of lanes lane by lane."""
    if not isinstance(cache, MlxBatchRowLayer):
        return _STOCK_ATTENTION(queries, keys, values, cache, scale, mask, sinks)
    assert mask is None, "a batch of lanes has no mask"
    seen = [layer.keys_and_values() for layer in cache.layers]
    found = [
        _STOCK_ATTENTION(queries[index : index + 1], *rows, cache, scale, None, sinks) for index, rows in enumerate(seen)
    ]
    return mx.concatenate(found)


def install_attention(model: Any) -> bool:
    """Replace the library's attention by ours in all of this model's code. Returns whether there is any."""
    names = [getattr(type(module).__call__, "__globals__", {}) for module in model.modules()]
    users = [each for each in names if each.get(_ATTENTION) in (_STOCK_ATTENTION, attend)]
    for each in users:
        each[_ATTENTION] = attend
    return bool(users)
