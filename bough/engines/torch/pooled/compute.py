"""Runs a model on lanes whose rows lie in a pool: steps of many lanes, short and long runs, one step ahead of the host.

As soon as tokens are chosen, the next step on their lanes is given to the device, before the tokens are read here: while
the host delivers a token, the device computes the next one. If the caller then steps with these tokens, the logits are
there, or on their way. If it does something else with a lane, the lane is unchanged, and what was computed ahead on it is
dropped: its row lies beyond the lane's offset, and its state in the lane's other slot.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from bough.engines.shared.pool.plan import PlanTooLarge
from bough.engines.shared.pool.rows import PooledRows
from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch.forward import Forward
from bough.engines.torch.layout import Layout
from bough.engines.torch.pooled.attention.operator import attending
from bough.engines.torch.pooled.lanes.lane import PooledTorchLane, StatePair
from bough.engines.torch.pooled.lanes.pages import PooledPages
from bough.engines.torch.pooled.passes.long_run import LongRun
from bough.engines.torch.pooled.passes.passes import Passes
from bough.engines.torch.pooled.sampling.sampler import DeviceSampler
from bough.types import Draw, Sampled

log = logging.getLogger(__name__)

LONGEST_SHORT_RUN = 256
_USUAL_ROWS = 256  # that are sampled together; for more, a larger sampler is made


@dataclass(eq=False)
class _Ahead:
    """A step that was given to the device before it was asked for: its lanes, their epochs, the tokens they were fed."""

    rows: list[Tensor]
    lanes: list[PooledTorchLane]
    epochs: list[int]
    places: list[int]  # of the lanes among what was sampled
    token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._place_of = {lane: place for place, lane in enumerate(self.lanes)}

    def find(self, lane: PooledTorchLane, token_id: int) -> Tensor | None:
        """The logits after this token, if that was fed to the lane and the lane has not changed since."""
        place = self._place_of.get(lane)
        if place is None or self.epochs[place] != lane.epoch or self.token_ids[place] != token_id:
            return None
        return self.rows[place]


Args = ParamSpec("Args")
Result = TypeVar("Result")


def _on_device(
    run: Callable[Concatenate[PooledCompute, Args], Result],
) -> Callable[Concatenate[PooledCompute, Args], Result]:
    """Kernels start on the thread's current device: make that the model's own, whichever thread calls."""

    @wraps(run)
    def run_there(compute: PooledCompute, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with compute.on_device():
            return run(compute, *args, **kwargs)

    return run_there


class PooledCompute:
    """Implements `bough.engines.shared.compute.GroupCompute`; `sample` is part of it. Goes ahead if told so."""

    def __init__(
        self,
        forward: Forward,
        layout: Layout,
        pages: PooledPages,
        passes: Passes,
        sizes: LaneSizes,
        *,
        goes_ahead: bool,
        longest_short: int = LONGEST_SHORT_RUN,
    ) -> None:
        """Runs of up to `longest_short` tokens are entries of a step, as long as there are no states."""
        self.layout = layout
        self.pages = pages
        self._forward = forward
        self._passes = passes
        self._sizes = sizes
        self._goes_ahead = goes_ahead
        self._longest_short = longest_short
        self._sampler: DeviceSampler | None = None
        self._lanes: WeakSet[PooledTorchLane] = WeakSet()
        self._lost: deque[list[PooledRows | StatePair]] = deque()  # what lanes held that were dropped
        self._ahead: _Ahead | None = None
        self._batch: tuple[Tensor, list[Tensor]] | None = None  # the logits of the last step, whole and by row

    def on_device(self) -> AbstractContextManager[object]:
        """The model's device is the current one inside this context."""
        device = self._forward.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def close(self) -> None:
        """Clear all lanes; nothing can be computed afterwards."""
        self._ahead = self._batch = self._sampler = None
        self._give_back_lost()
        for lane in list(self._lanes):
            lane.clear()

    def make_lane(self) -> PooledTorchLane:
        self._give_back_lost()
        lane = PooledTorchLane(self.layout, self.pages, self._sizes)
        self._lanes.add(lane)
        finalize(lane, self._lost.append, [*lane.row_groups(), *lane.states])
        return lane

    def _give_back_lost(self) -> None:
        """Lanes that nobody refers to any more give their slots back: here, because the collector of garbage may run
        anywhere, even while a slot is being taken.
        """
        while self._lost:
            for each in self._lost.popleft():
                each.free()

    @_on_device
    def evaluate(self, lane: PooledTorchLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns the logits after its last token."""
        if len(ids) == 1:
            (row,) = self._step_any([lane], ids)
        elif self._is_short(ids):
            row = self._run_short(lane, ids)[-1]
        else:
            row = self._run_long(lane, ids, keep=1)[-1]
        lane.latest = row
        return row

    @_on_device
    def evaluate_all(self, lane: PooledTorchLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns the logits after each of its tokens, [run, vocabulary]."""
        lane.latest = None
        return self._run_long(lane, ids, keep=len(ids)).float()

    @_on_device
    def evaluate_state(self, lane: PooledTorchLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns what the head reads after its last token, [hidden], in float32.

        A short run is a graph, once there is one; else modules compute it.
        """
        lane.latest = None
        state = self._run_short_state(lane, ids) if self._is_short(ids) else None
        if state is not None:
            return state
        with self._forward.watching_head() as seen:
            self._run_long(lane, ids, keep=1)
        return seen.last

    def _is_short(self, ids: Sequence[int]) -> bool:
        """Whether a run is entries of one step. Where there are states, they must follow its tokens one by one."""
        return len(ids) <= self._longest_short and not self.layout.states

    @_on_device
    def step(self, lanes: Sequence[PooledTorchLane], ids: Sequence[int]) -> list[Tensor]:
        """Append one token to each lane: where that was done ahead, take it."""
        ahead, self._ahead = self._ahead, None
        found = [ahead.find(lane, token_id) if ahead else None for lane, token_id in zip(lanes, ids, strict=True)]
        behind = [(lane, token_id) for lane, token_id, row in zip(lanes, ids, found, strict=True) if row is None]
        if behind:  # first, because it may fail: then no lane has moved
            late = iter(self._step_any([lane for lane, _ in behind], [token_id for _, token_id in behind]))
        for lane, row in zip(lanes, found, strict=True):
            if row is not None:
                lane.end_step()
        rows = [next(late) if row is None else row for row in found]
        for lane, row in zip(lanes, rows, strict=True):
            lane.latest = row
        return rows

    @_on_device
    def sample(self, logits: Sequence[Tensor], draws: Sequence[Draw]) -> list[Sampled]:
        """Choose one token for each, and start the next step on the lanes that have room."""
        if not logits:
            return []
        rows = self._together(logits)
        if self._sampler is None or len(rows) > self._sampler.max_rows:
            self._sampler = DeviceSampler(rows.shape[1], max(_USUAL_ROWS, len(rows)), rows.device)
        choices = self._sampler.launch(rows, draws)
        ahead = self._go_ahead(logits, choices.ids) if self._goes_ahead else None
        sampled = choices.read()
        if ahead is not None:
            ahead.token_ids = [sampled[place].token_id for place in ahead.places]
        self._ahead = ahead
        return sampled

    def _go_ahead(self, logits: Sequence[Tensor], ids: Tensor) -> _Ahead | None:
        """Let the device compute one more token on each lane that these are the latest logits of; the offsets stay.

        If it fails, nothing was computed ahead: the caller's own step will raise the error.
        """
        self._ahead = None
        places = {id(row): place for place, row in enumerate(logits)}
        known = [(places[id(lane.latest)], lane) for lane in self._lanes if id(lane.latest) in places]
        ready = [(place, lane) for place, lane in known if lane.offset < self._sizes.context and lane.has_room()]
        if not ready or (self.layout.states and not all(lane.offset for _, lane in ready)):
            return None
        ready.sort(key=lambda found: found[0])
        chosen, lanes = [place for place, _ in ready], [lane for _, lane in ready]
        fed = ids if len(chosen) == len(ids) else ids[torch.tensor(chosen).to(ids.device, non_blocking=True)]
        try:
            rows = self._launch(lanes, fed)
        except Exception as error:  # no memory, too large a plan, or whatever the model's code and the device raise
            log.debug("a step ahead was left to the caller: %s: %s", type(error).__name__, error)
            return None
        return _Ahead(rows, lanes, [lane.epoch for lane in lanes], chosen)

    def _step_any(self, lanes: Sequence[PooledTorchLane], ids: Sequence[int]) -> list[Tensor]:
        """Append one token to each lane. Lanes run one by one if the recurrent state of one has not begun, or if their rows
        lie in more pieces than a plan takes.
        """
        if not self.layout.states or all(lane.offset for lane in lanes):
            with suppress(PlanTooLarge):
                return self._step(lanes, ids)
        return [self._run_long(lane, [token_id], keep=1)[0] for lane, token_id in zip(lanes, ids, strict=True)]

    def _step(self, lanes: Sequence[PooledTorchLane], ids: Sequence[int]) -> list[Tensor]:
        rows = self._launch(lanes, ids)
        for lane in lanes:
            lane.end_step()
        return rows

    def _launch(self, lanes: Sequence[PooledTorchLane], ids: Sequence[int] | Tensor) -> list[Tensor]:
        """Give a step to the device. The lanes have room for the token; they do not contain it yet."""
        for lane in lanes:
            lane.begin_run(1)
        logits = self._passes.step(lanes, ids)
        rows = list(logits.unbind())
        self._batch = logits, rows
        return rows

    def _together(self, logits: Sequence[Tensor]) -> Tensor:
        """The logits as one tensor: that of the last step, if these are its rows."""
        if self._batch is not None:
            whole, rows = self._batch
            if len(rows) == len(logits) and all(row is each for row, each in zip(rows, logits, strict=True)):
                return whole
        types = {row.dtype for row in logits}
        return torch.stack([row.float() for row in logits] if len(types) > 1 else list(logits))

    def _run_short(self, lane: PooledTorchLane, ids: Sequence[int]) -> Tensor:
        lane.begin_run(len(ids))
        try:
            logits = self._passes.run(lane, ids)
        except PlanTooLarge:
            return self._run_long(lane, ids, keep=1)
        lane.end_short_run(len(ids))
        return logits

    def _run_short_state(self, lane: PooledTorchLane, ids: Sequence[int]) -> Tensor | None:
        lane.begin_run(len(ids))
        try:
            state = self._passes.run_state(lane, ids)
        except PlanTooLarge:
            return None
        if state is not None:
            lane.end_short_run(len(ids))
        return state

    @torch.no_grad()
    def _run_long(self, lane: PooledTorchLane, ids: Sequence[int], keep: int) -> Tensor:
        """The logits after the last `keep` tokens of a run that is computed as one sequence."""
        lane.begin_long_run(len(ids))
        device = self._forward.device
        positions = torch.arange(lane.offset, lane.offset + len(ids), device=device)[None]
        with attending(LongRun(lane, len(ids), device)), self._passes.long_run():
            logits = self._forward.logits(self._forward.tensor_of(ids), positions, lane.cache, keep)[0, -keep:].clone()
        lane.end_long_run(len(ids))
        return logits
