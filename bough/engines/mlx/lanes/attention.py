"""Attention of several lanes in one step: each lane looks at its own rows, with no padding and no mask.

mlx-lm's models call `scaled_dot_product_attention` by a name in their own module, with the layer's cache among the
arguments. That name is made to lead here; for any other cache the library's own function answers as before.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from bough.engines.mlx.lanes.layers import BatchRowLayer
from bough.engines.mlx.library import base

_NAME = "scaled_dot_product_attention"
_STOCK = getattr(base, _NAME)


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> Any:
    """The library's function, and for a batch of lanes the same lane by lane."""
    if not isinstance(cache, BatchRowLayer):
        return _STOCK(queries, keys, values, cache, scale, mask, sinks)
    assert mask is None, "a batch of lanes has no mask"
    seen = [layer.keys_and_values() for layer in cache.layers]
    found = [_STOCK(queries[index : index + 1], *rows, cache, scale, None, sinks) for index, rows in enumerate(seen)]
    return mx.concatenate(found)


def install(model: Any) -> bool:
    """Let all of this model's code that uses the library's attention use ours. Returns whether there is any."""
    names = [getattr(type(module).__call__, "__globals__", {}) for module in model.modules()]
    users = [each for each in names if each.get(_NAME) in (_STOCK, attend)]
    for each in users:
        each[_NAME] = attend
    return bool(users)
