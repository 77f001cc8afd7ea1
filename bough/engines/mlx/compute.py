"""The three ways of running a model on lanes.

`LaneCompute` keeps the state in our own lanes, where it can be reused. `LibraryCompute` leaves it in the caches that
mlx-lm makes. `RecomputeCompute` keeps none and starts from the first token each time. The last two are for models whose
state we do not know, or that are wrong with a cache. The self-check chooses.

A run of several tokens is waited for, so that its memory is free before the next one. A step of single tokens is only given
to the device. Either way no array stays behind that was not given to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import mlx.core as mx

from bough.engines.mlx.device import Allocator
from bough.engines.mlx.forward import Forward
from bough.engines.mlx.lanes.lane import MlxLane, arrange, computing
from bough.engines.mlx.lanes.layers import BatchRowLayer, RowLayer
from bough.engines.mlx.lanes.pages import Pages
from bough.engines.mlx.layout import Layout
from bough.engines.mlx.library import cache
from bough.engines.shared import compute
from bough.engines.shared.plain_lane import PlainCompute, PlainLane, tensors_in
from bough.engines.shared.row_memory import LaneSizes

Compute = compute.Compute[mx.array]


class LaneCompute:
    """Runs a model whose groups are known, on our own lanes."""

    def __init__(self, forward: Forward, layout: Layout, pages: Pages, sizes: LaneSizes, can_batch: bool) -> None:
        self.layout = layout
        self.pages = pages
        self.can_batch = can_batch
        self._forward = forward
        self._sizes = sizes
        self._allocator = Allocator()

    def make_lane(self) -> MlxLane:
        return MlxLane(self.layout, self.pages, self._sizes)

    def evaluate(self, lane: MlxLane, ids: Sequence[int]) -> mx.array:
        """Append a run to the lane; returns the logits after its last token."""
        return self._run(lane, ids, lambda tokens, cache: self._forward.last_logits(tokens, cache)[0])

    def evaluate_all(self, lane: MlxLane, ids: Sequence[int]) -> mx.array:
        """Append a run to the lane; returns the logits after each of its tokens, [run, vocabulary]."""
        return self._run(lane, ids, lambda tokens, cache: self._forward.run_logits(tokens, cache, len(ids)))

    def evaluate_state(self, lane: MlxLane, ids: Sequence[int]) -> mx.array:
        """Append a run to the lane; returns what the head reads after its last token, [hidden], in float32."""
        return self._run(lane, ids, self._forward.last_state)

    def _run(self, lane: MlxLane, ids: Sequence[int], forward: Callable[[mx.array, Any], mx.array]) -> mx.array:
        """Append a run to the lane; returns what `forward` makes of its tokens, evaluated."""
        with lane.running(len(ids)):
            result = forward(mx.array([list(ids)]), lane.cache)
        with computing([lane]):
            mx.eval(result, lane.arrays)
        self._allocator.trim(len(ids))
        return result

    def step(self, lanes: Sequence[MlxLane], ids: Sequence[int]) -> list[mx.array]:
        """Append one token to each lane."""
        rows = self.build_step(lanes, mx.array(list(ids)))
        self.launch(lanes, rows)
        return rows

    def build_step(self, lanes: Sequence[MlxLane], tokens: mx.array) -> list[mx.array]:
        """The logits after one more token on each lane, not given to the device yet; the lanes contain the token.

        In one forward pass where the self-check found that right, else one by one. If it fails, no lane has moved.
        """
        has_started = all(lane.offset for lane in lanes) or not self.layout.states
        with ExitStack() as runs:
            for lane in lanes:
                runs.enter_context(lane.running(1))
            if len(lanes) > 1 and self.can_batch and has_started:
                return self._build_together(lanes, tokens)
            return [
                self._forward.last_logits(tokens[index].reshape(1, 1), lane.cache)[0] for index, lane in enumerate(lanes)
            ]

    def launch(self, lanes: Sequence[MlxLane], arrays: Sequence[mx.array]) -> None:
        """Give the device what it takes to compute these arrays, and all that these lanes hold."""
        with computing(lanes):
            mx.async_eval([*arrays, *(array for lane in lanes for array in lane.arrays)])
        self._allocator.trim(1)

    def _build_together(self, lanes: Sequence[MlxLane], tokens: mx.array) -> list[mx.array]:
        batch = {index: _batch_layer([lane.layers[index] for lane in lanes]) for index in lanes[0].layers}
        logits = self._forward.last_logits(tokens[:, None], arrange(self.layout.tree, batch.__getitem__))
        self._scatter(batch, lanes)
        return [logits[index] for index in range(len(lanes))]

    def _scatter(self, batch: dict[int, Any], lanes: Sequence[MlxLane]) -> None:
        """Copy the recurrent states back to each lane."""
        for part in self.layout.parts:
            stacked = batch[part.layer][part.slot]
            for index, lane in enumerate(lanes):
                lane.layers[part.layer][part.slot] = stacked[index : index + 1]


class _PlainCompute(PlainCompute[mx.array]):
    """What the two ways without our own lanes have in common."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._allocator = Allocator()

    def _bytes_of(self, cache: Any) -> int:
        return sum({id(array): array.nbytes for array in tensors_in(cache, mx.array)}.values())


class LibraryCompute(_PlainCompute):
    """Runs a model with the caches that mlx-lm makes for it."""

    def evaluate(self, lane: PlainLane, ids: Sequence[int]) -> mx.array:
        """Append a run to the lane; returns the logits after its last token."""
        return self._run(lane, ids, lambda tokens, cache: self._forward.last_logits(tokens, cache)[0])

    def evaluate_all(self, lane: PlainLane, ids: Sequence[int]) -> mx.array:
        """Append a run to the lane; returns the logits after each of its tokens, [run, vocabulary]."""
        return self._run(lane, ids, lambda tokens, cache: self._forward.run_logits(tokens, cache, len(ids)))

    def evaluate_state(self, lane: PlainLane, ids: Sequence[int]) -> mx.array:
        """Append a run to the lane; returns what the head reads after its last token, [hidden], in float32."""
        return self._run(lane, ids, self._forward.last_state)

    def _run(self, lane: PlainLane, ids: Sequence[int], forward: Callable[[mx.array, Any], mx.array]) -> mx.array:
        with lane.extending(ids):
            lane.cache = self._forward.make_cache() if lane.cache is None else lane.cache
            result = forward(mx.array([list(ids)]), lane.cache)
            mx.eval(result, list(tensors_in(lane.cache, mx.array)))
        self._allocator.trim(len(ids))
        return result


class RecomputeCompute(_PlainCompute):
    """Runs a model anew each time: every token costs the whole sequence. Slow, and right for every model.

    It gets fresh caches, as mlx-lm always gives it some: a few models answer otherwise without.
    """

    def evaluate(self, lane: PlainLane, ids: Sequence[int]) -> mx.array:
        """Append a run to the lane; returns the logits after its last token."""
        return self._run(lane, ids, lambda tokens, cache: self._forward.last_logits(tokens, cache)[0])

    def evaluate_all(self, lane: PlainLane, ids: Sequence[int]) -> mx.array:
        """Append a run to the lane; returns the logits after each of its tokens, [run, vocabulary]."""
        return self._run(lane, ids, lambda tokens, cache: self._forward.run_logits(tokens, cache, len(ids)))

    def evaluate_state(self, lane: PlainLane, ids: Sequence[int]) -> mx.array:
        """Append a run to the lane; returns what the head reads after its last token, [hidden], in float32."""
        return self._run(lane, ids, self._forward.last_state)

    def _run(self, lane: PlainLane, ids: Sequence[int], forward: Callable[[mx.array, Any], mx.array]) -> mx.array:
        with lane.extending(ids):
            result = forward(mx.array([[*lane.ids, *ids]]), self._forward.make_cache())
            mx.eval(result)
        self._allocator.trim(lane.offset)
        return result


def _batch_layer(layers: Sequence[Any]) -> Any:
    """One cache for the same layer of several lanes: rows stay where they are, states are stacked."""
    if isinstance(layers[0], RowLayer):
        return BatchRowLayer(layers)
    batch = cache.ArraysCache(len(layers[0].cache))
    for slot, arrays in enumerate(zip(*(layer.cache for layer in layers), strict=True)):
        batch[slot] = None if arrays[0] is None else mx.concatenate(list(arrays))
    return batch
