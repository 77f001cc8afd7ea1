"""One step ahead of delivery: while a token is on its way to the reader, the device computes what follows it.

As soon as tokens are chosen, the next step on their lanes is given to the device; for the largest logit even before the
token itself is known here. If the caller then steps with these tokens, the logits are there, or on their way. If it does
something else with a lane, nothing has happened to it, and what was computed ahead is forgotten. An answer's last token
costs one step that nobody asks for: so only devices that compute by themselves go ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import mlx.core as mx

from bough.engine_parts.draws import is_plain
from bough.mlx_engine.compute import LaneCompute
from bough.mlx_engine.lane import MlxLane
from bough.mlx_engine.sampling import find_likeliest, read_likeliest, sample
from bough.types import Draw, Sampled


@dataclass(frozen=True)
class _Step:
    """A step that was taken ahead on a lane: after which token, and the logits after it."""

    token_id: int
    logits: mx.array


class AheadCompute:
    """Runs a model on lanes as `LaneCompute` does, one step ahead. `sample` is part of it."""

    def __init__(self, compute: LaneCompute, context: int) -> None:
        self._compute = compute
        self._context = context
        self._latest: dict[MlxLane, mx.array] = {}  # the logits that each lane's next token is chosen from
        self._steps: dict[MlxLane, _Step] = {}

    def make_lane(self) -> MlxLane:
        return self._compute.make_lane()

    def evaluate(self, lane: MlxLane, ids: Sequence[int]) -> mx.array:
        """Append a run to the lane; returns the logits after its last token."""
        self._forget([lane])
        logits = self._compute.evaluate(lane, ids)
        self._latest[lane] = logits
        return logits

    def step(self, lanes: Sequence[MlxLane], ids: Sequence[int]) -> list[mx.array]:
        """Append one token to each lane: where that was done ahead, take it."""
        found = {lane: self._take(lane, token_id) for lane, token_id in zip(lanes, ids, strict=True)}
        missing = [(lane, token_id) for lane, token_id in zip(lanes, ids, strict=True) if found[lane] is None]
        if missing:
            behind = [lane for lane, _ in missing]
            found |= zip(behind, self._compute.step(behind, [token_id for _, token_id in missing]), strict=True)
        logits = [row for lane in lanes if (row := found[lane]) is not None]
        self._latest |= zip(lanes, logits, strict=True)
        return logits

    def sample(self, logits: Sequence[mx.array], draws: Sequence[Draw]) -> list[Sampled]:
        """Choose one token for each, and let the device go on with them on the lanes that can."""
        lanes = self._lanes_of(logits)
        if all(map(is_plain, draws)) and lanes:
            tokens = find_likeliest(logits)
            rows = self._go_ahead(lanes, tokens)
            sampled = read_likeliest(tokens)
        else:
            sampled = sample(logits, draws)
            rows = self._go_ahead(lanes, mx.array([each.token_id for each in sampled]))
        self._steps |= {lanes[place]: _Step(sampled[place].token_id, row) for place, row in rows.items()}
        return sampled

    def _lanes_of(self, logits: Sequence[mx.array]) -> dict[int, MlxLane]:
        """By their places here, the lanes that can go ahead and that these are the latest logits of."""
        by_logits = {id(row): lane for lane, row in self._latest.items() if self._can_go_ahead(lane)}
        return {place: by_logits[id(row)] for place, row in enumerate(logits) if id(row) in by_logits}

    def _can_go_ahead(self, lane: MlxLane) -> bool:
        return lane.offset < self._context and lane.has_room()

    def _go_ahead(self, lanes: Mapping[int, MlxLane], tokens: mx.array) -> dict[int, mx.array]:
        """By the places of lanes, the logits after one more token, on which none of them stands.

        A step that cannot be had gives none: the caller's own step will say why.
        """
        if not lanes:
            return {}
        self._forget(lanes.values())
        before = [(lane.offset, lane.states) for lane in lanes.values()]
        rows: list[mx.array] = []
        with suppress(Exception):
            rows = self._compute.build_step(list(lanes.values()), tokens[mx.array(list(lanes))])
        for lane, (offset, states) in zip(lanes.values(), before, strict=True):
            lane.step_back(offset, states)
        self._compute.launch([tokens, *rows, *(array for lane in lanes.values() for array in lane.arrays)])
        return dict(zip(lanes, rows, strict=False))

    def _take(self, lane: MlxLane, token_id: int) -> mx.array | None:
        step = self._steps.pop(lane, None)
        self._latest.pop(lane, None)
        if step is None or step.token_id != token_id or lane.ahead is None:
            return None
        lane.take_ahead()
        return step.logits

    def _forget(self, lanes: Iterable[MlxLane]) -> None:
        for lane in lanes:
            self._steps.pop(lane, None)
            self._latest.pop(lane, None)
