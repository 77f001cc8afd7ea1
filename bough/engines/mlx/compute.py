"""Runs a model whose state is in Bough's lanes, where it can be reused; `AheadCompute` runs them one step ahead.

A run of several tokens is waited for, so that its memory is free before the next one. A step of single tokens is only given
to the device. Either way no array stays behind that was not given to the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import zip_longest
from typing import Any
from weakref import WeakSet

import mlx.core as mx

from bough.engines.mlx.device import Allocator
from bough.engines.mlx.forward import MlxForward
from bough.engines.mlx.lane import MlxLane, arrange, computing
from bough.engines.mlx.layers import MlxBatchRowLayer, MlxRowLayer
from bough.engines.mlx.layout import MlxLayout, MlxPages
from bough.engines.mlx.library import cache
from bough.engines.mlx.sampling import find_likeliest, read_likeliest, sample
from bough.engines.sampling import is_plain
from bough.engines.shared.compute import GroupCompute, RunResult
from bough.engines.shared.row_memory import LaneSizes
from bough.types import Draw, SampledToken


class MlxLaneCompute(GroupCompute[MlxLane, mx.array]):
    """Runs a model whose groups are known, on Bough's lanes."""

    layout: MlxLayout
    pages: MlxPages

    def __init__(self, forward: MlxForward, layout: MlxLayout, pages: MlxPages, sizes: LaneSizes, can_batch: bool) -> None:
        self.layout = layout
        self.pages = pages
        self.can_batch = can_batch
        self._forward = forward
        self._sizes = sizes
        self._allocator = Allocator()

    def make_lane(self) -> MlxLane:
        return MlxLane(self.layout, self.pages, self._sizes)

    def run(self, lane: MlxLane, ids: Sequence[int], result: RunResult) -> mx.array:
        with lane.running(len(ids)):
            found = self._forward.run(ids, len(ids), lane.cache, result)
        with computing([lane]):
            mx.eval(found, lane.arrays)
        self._allocator.trim(len(ids))
        return found

    def step(self, lanes: Sequence[MlxLane], ids: Sequence[int]) -> list[mx.array]:
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
        """Give the device the computation of these arrays and of all that these lanes hold."""
        with computing(lanes):
            mx.async_eval([*arrays, *(array for lane in lanes for array in lane.arrays)])
        self._allocator.trim(1)

    def _build_together(self, lanes: Sequence[MlxLane], tokens: mx.array) -> list[mx.array]:
        batch = {index: _batch_layer([lane.layers[index] for lane in lanes]) for index in lanes[0].layers}
        logits = self._forward.last_logits(tokens[:, None], arrange(self.layout.tree, batch.__getitem__))
        for part in self.layout.parts:
            stacked = batch[part.layer][part.slot]
            for index, lane in enumerate(lanes):
                lane.layers[part.layer][part.slot] = stacked[index : index + 1]
        return [logits[index] for index in range(len(lanes))]


def _batch_layer(layers: Sequence[Any]) -> Any:
    """One cache for the same layer of several lanes: rows stay where they are, states are stacked."""
    if isinstance(layers[0], MlxRowLayer):
        return MlxBatchRowLayer(layers)
    batch = cache.ArraysCache(len(layers[0].cache))
    for slot, arrays in enumerate(zip(*(layer.cache for layer in layers), strict=True)):
        batch[slot] = None if arrays[0] is None else mx.concatenate(list(arrays))
    return batch


class AheadCompute(MlxLaneCompute):
    """Runs lanes one step ahead of the delivery of tokens. `sample` is part of it.

    As soon as tokens are chosen, the next step on their lanes is given to the device; for the largest logit even before the
    token itself is known here. A caller that then steps with these tokens finds the logits there, or on their way. If it
    does something else with a lane, the lane is unchanged, and the step is dropped. The last token of an answer costs one
    unused step: so only devices that compute beside the CPU go ahead.
    """

    def __init__(self, forward: MlxForward, layout: MlxLayout, pages: MlxPages, sizes: LaneSizes, can_batch: bool) -> None:
        super().__init__(forward, layout, pages, sizes, can_batch)
        self._lanes: WeakSet[MlxLane] = WeakSet()

    def make_lane(self) -> MlxLane:
        lane = MlxLane(self.layout, self.pages, self._sizes, has_spare=True)
        self._lanes.add(lane)
        return lane

    def run(self, lane: MlxLane, ids: Sequence[int], result: RunResult) -> mx.array:
        found = super().run(lane, ids, result)
        lane.latest = found if result is RunResult.LAST_LOGITS else None
        return found

    def step(self, lanes: Sequence[MlxLane], ids: Sequence[int]) -> list[mx.array]:
        """Append one token to each lane: where that was done ahead, take it."""
        wanted = dict(zip(lanes, ids, strict=True))
        behind = [lane for lane in lanes if lane.ahead is None or lane.ahead.token_id != wanted[lane]]
        found = {}
        if behind:  # first, because it may fail: then no lane has moved
            found = dict(zip(behind, super().step(behind, [wanted[lane] for lane in behind]), strict=True))
        rows = [found[lane] if lane in found else lane.take_ahead() for lane in lanes]
        for lane, row in zip(lanes, rows, strict=True):
            lane.latest = row
        return rows

    def sample(self, logits: Sequence[mx.array], draws: Sequence[Draw]) -> list[SampledToken]:
        """Choose one token for each, and start the next step on the lanes that have room."""
        lanes = self._lanes_of(logits)
        if lanes and all(map(is_plain, draws)):
            tokens = find_likeliest(logits)
            mx.async_eval(tokens)  # alone, so that reading the tokens does not wait for the next step
            self._go_ahead(lanes, tokens)
            sampled = read_likeliest(tokens)
        else:
            sampled = sample(logits, draws)
            self._go_ahead(lanes, mx.array([each.token_id for each in sampled]))
        for lane, index in lanes.items():
            if lane.ahead is not None:
                lane.ahead.token_id = sampled[index].token_id
        return sampled

    def _lanes_of(self, logits: Sequence[mx.array]) -> dict[MlxLane, int]:
        """The lanes that have one of these as their latest logits and room for a token, with the index of the logits."""
        indices = {id(row): index for index, row in reversed(list(enumerate(logits)))}
        known = [lane for lane in self._lanes if lane.latest is not None and id(lane.latest) in indices]
        ready = [lane for lane in known if lane.offset < self._sizes.context and lane.has_room()]
        return {lane: indices[id(lane.latest)] for lane in sorted(ready, key=lambda lane: indices[id(lane.latest)])}

    def _go_ahead(self, lanes: Mapping[MlxLane, int], tokens: mx.array) -> None:
        """Let the device compute one more token on each lane; the offsets of the lanes stay.

        If that fails, nothing was computed ahead: the caller's own step will raise the error.
        """
        if not lanes:
            return
        before = [(lane, lane.latest, lane.offset, lane.states) for lane in lanes]
        rows: list[mx.array] = []
        try:
            with suppress(Exception):
                rows = self.build_step(list(lanes), tokens[mx.array(list(lanes.values()))])
        finally:
            for (lane, latest, offset, states), row in zip_longest(before, rows):
                lane.step_back(offset, states, row)
                lane.latest = latest
            self.launch(list(lanes), [tokens, *rows])
