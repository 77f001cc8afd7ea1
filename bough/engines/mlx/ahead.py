"""One step ahead: while a token is delivered to the client, the device already computes the next step.

As soon as tokens are chosen, the next step on their lanes is given to the device; for the largest logit even before the
token itself is known here. If the caller then steps with these tokens, the logits are there, or on their way. If it does
something else with a lane, the lane is unchanged, and what was computed ahead is dropped. The last token of an answer costs
one unused step: so only devices that compute beside the CPU go ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from weakref import WeakSet

import mlx.core as mx

from bough.engines.mlx.compute import LaneCompute
from bough.engines.mlx.lanes.lane import MlxLane
from bough.engines.mlx.sampling import find_likeliest, read_likeliest, sample
from bough.engines.shared.sampling import is_plain
from bough.types import Draw, Sampled


class AheadCompute:
    """Runs a model on lanes as `LaneCompute` does, one step ahead. `sample` is part of it."""

    def __init__(self, compute: LaneCompute, context: int) -> None:
        self._compute = compute
        self._context = context
        self._lanes: WeakSet[MlxLane] = WeakSet()

    def make_lane(self) -> MlxLane:
        lane = self._compute.make_lane()
        lane.keep_spare_states()
        self._lanes.add(lane)
        return lane

    def evaluate(self, lane: MlxLane, ids: Sequence[int]) -> mx.array:
        """Append a run to the lane; returns the logits after its last token."""
        lane.latest = self._compute.evaluate(lane, ids)
        return lane.latest

    def evaluate_all(self, lane: MlxLane, ids: Sequence[int]) -> mx.array:
        """Append a run to the lane; returns the logits after each of its tokens. The next token is not chosen ahead."""
        lane.latest = None
        return self._compute.evaluate_all(lane, ids)

    def evaluate_state(self, lane: MlxLane, ids: Sequence[int]) -> mx.array:
        """Append a run to the lane; returns what the head reads after its last token. No token is chosen ahead."""
        lane.latest = None
        return self._compute.evaluate_state(lane, ids)

    def step(self, lanes: Sequence[MlxLane], ids: Sequence[int]) -> list[mx.array]:
        """Append one token to each lane: where that was done ahead, take it."""
        wanted = dict(zip(lanes, ids, strict=True))
        behind = [lane for lane in lanes if lane.ahead is None or lane.ahead.token_id != wanted[lane]]
        found = {}
        if behind:  # first, because it may fail: then no lane has moved
            found = dict(zip(behind, self._compute.step(behind, [wanted[lane] for lane in behind]), strict=True))
        rows = [found[lane] if lane in found else lane.take_ahead() for lane in lanes]
        for lane, row in zip(lanes, rows, strict=True):
            lane.latest = row
        return rows

    def sample(self, logits: Sequence[mx.array], draws: Sequence[Draw]) -> list[Sampled]:
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
        """The lanes that can go ahead and that these are the latest logits of, each with the index of its logits."""
        indices = {id(row): index for index, row in reversed(list(enumerate(logits)))}
        known = [lane for lane in self._lanes if lane.latest is not None and id(lane.latest) in indices]
        ready = [lane for lane in known if lane.offset < self._context and lane.has_room()]
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
                rows = self._compute.build_step(list(lanes), tokens[mx.array(list(lanes.values()))])
        finally:
            for (lane, latest, offset, states), row in zip_longest(before, rows):
                lane.step_back(offset, states, row)
                lane.latest = latest
            self._compute.launch(list(lanes), [tokens, *rows])
