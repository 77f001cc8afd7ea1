"""Runs a model on lanes whose rows are in a pool: steps of many lanes, short and long runs, one step ahead of the host.

As soon as tokens are chosen, the next step on their lanes is launched, before the tokens are read by the host: the device
computes the next token while the host delivers the last one. If the caller then steps with these tokens, the logits are
computed already. Otherwise the lane is unchanged, and what was computed ahead on it is dropped: its row is beyond the
lane's offset, and its state in the lane's other slot.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from bough.engines.shared.compute import GroupCompute, RunResult
from bough.engines.shared.pool.plan import PlanTooLarge
from bough.engines.shared.pool.slot_rows import PooledRows
from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.layout import TorchLayout
from bough.engines.torch.pooled.graphs import Passes
from bough.engines.torch.pooled.lane import PooledTorchLane, StatePair
from bough.engines.torch.pooled.long_run import LongRun
from bough.engines.torch.pooled.pages import PooledPages
from bough.engines.torch.pooled.sampling.sampler import DeviceSampler
from bough.engines.torch.pooled.wiring import attending
from bough.types import Draw, SampledToken

log = logging.getLogger(__name__)

LONGEST_SHORT_RUN = 256


@dataclass(frozen=True)
class _Ahead:
    """A step on one lane that was launched before it was asked for: its logits, the lane's epoch, the token it was fed."""

    row: Tensor
    epoch: int
    token_id: int


Args = ParamSpec("Args")
Result = TypeVar("Result")


def _on_device(
    run: Callable[Concatenate[PooledCompute, Args], Result],
) -> Callable[Concatenate[PooledCompute, Args], Result]:
    """Make the model's device the current one of the calling thread, because kernels start there."""

    @wraps(run)
    def run_there(compute: PooledCompute, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        device = compute._forward.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return run(compute, *args, **kwargs)

    return run_there


class PooledCompute(GroupCompute[PooledTorchLane, Tensor]):
    """Runs a model on lanes of a pool; `sample` chooses tokens and launches the step after them."""

    layout: TorchLayout
    pages: PooledPages

    def __init__(
        self,
        forward: TorchForward,
        layout: TorchLayout,
        pages: PooledPages,
        passes: Passes,
        sizes: LaneSizes,
        *,
        goes_ahead: bool,
        longest_short: int = LONGEST_SHORT_RUN,
    ) -> None:
        """Runs of up to `longest_short` tokens are entries of a step, unless the model has states."""
        self.layout = layout
        self.pages = pages
        self._forward = forward
        self._passes = passes
        self._sizes = sizes
        self._goes_ahead = goes_ahead
        self._longest_short = longest_short
        self._sampler = DeviceSampler()
        self._lanes: WeakSet[PooledTorchLane] = WeakSet()
        self._lost: deque[list[PooledRows | StatePair]] = deque()  # the memory of lanes that were garbage collected
        self._ahead: dict[PooledTorchLane, _Ahead] = {}
        self._batch: tuple[Tensor, list[Tensor]] | None = None  # the logits of the last step, whole and by row

    def close(self) -> None:
        """Clear all lanes; nothing can be computed afterwards."""
        self._ahead = {}
        self._batch = None
        self._sampler = DeviceSampler()
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
        """Free the slots of lanes that were garbage collected, which may happen anywhere, even while a slot is taken."""
        while self._lost:
            for each in self._lost.popleft():
                each.free()

    @_on_device
    def run(self, lane: PooledTorchLane, ids: Sequence[int], result: RunResult) -> Tensor:
        if result is RunResult.LAST_LOGITS:
            lane.latest = self._evaluate_last(lane, ids)
            return lane.latest
        lane.latest = None
        if result is RunResult.ALL_LOGITS:
            return self._run_long(lane, ids, keep=len(ids)).float()
        state = self._run_short(lane, ids, self._passes.run_state)  # by a graph, if one is ready, otherwise by modules
        if state is not None:
            return state
        with self._forward.watching_head() as seen:
            self._run_long(lane, ids, keep=1)
        return seen.last

    def _evaluate_last(self, lane: PooledTorchLane, ids: Sequence[int]) -> Tensor:
        if len(ids) == 1:
            return self._step_any([lane], ids)[0]
        logits = self._run_short(lane, ids, self._passes.run)
        return (self._run_long(lane, ids, keep=1) if logits is None else logits)[-1]

    @_on_device
    def step(self, lanes: Sequence[PooledTorchLane], ids: Sequence[int]) -> list[Tensor]:
        """Append one token to each lane. Logits that were computed ahead are used."""
        ahead, self._ahead = self._ahead, {}
        rows: dict[PooledTorchLane, Tensor] = {}
        for lane, token_id in zip(lanes, ids, strict=True):
            found = ahead.get(lane)
            if found is not None and (found.epoch, found.token_id) == (lane.epoch, token_id):
                rows[lane] = found.row
        behind = {lane: token_id for lane, token_id in zip(lanes, ids, strict=True) if lane not in rows}
        late = (
            self._step_any(list(behind), list(behind.values())) if behind else []
        )  # first: if it fails, no lane has moved
        for lane in rows:
            lane.end_step()
        rows.update(zip(behind, late, strict=True))
        for lane, row in rows.items():
            lane.latest = row
        return [rows[lane] for lane in lanes]

    @_on_device
    def sample(self, logits: Sequence[Tensor], draws: Sequence[Draw]) -> list[SampledToken]:
        """Choose one token for each row, and launch the next step on the lanes that have room."""
        if not logits:
            return []
        rows = self._together(logits)
        choices = self._sampler.launch(rows, draws)
        self._ahead = {}
        ahead = self._go_ahead(logits, choices.ids) if self._goes_ahead else {}
        sampled = choices.read()
        self._ahead = {lane: _Ahead(row, lane.epoch, sampled[place].token_id) for lane, (row, place) in ahead.items()}
        return sampled

    def _go_ahead(self, logits: Sequence[Tensor], ids: Tensor) -> dict[PooledTorchLane, tuple[Tensor, int]]:
        """Launch one more token on each lane whose latest logits are among these; their offsets stay the same.

        Returns the next logits of each lane, and the place of the latest ones in `logits`. If the launch fails, nothing was
        computed ahead: the caller's own step will raise the error.
        """
        places = {id(row): place for place, row in enumerate(logits)}
        known = [(places[id(lane.latest)], lane) for lane in self._lanes if id(lane.latest) in places]
        ready = [(place, lane) for place, lane in known if lane.offset < self._sizes.context and lane.has_room()]
        if not ready or (self.layout.states and not all(lane.offset for _, lane in ready)):
            return {}
        ready.sort(key=lambda found: found[0])
        chosen, lanes = [place for place, _ in ready], [lane for _, lane in ready]
        fed = ids if len(chosen) == len(ids) else ids[torch.tensor(chosen).to(ids.device, non_blocking=True)]
        try:
            rows = self._launch(lanes, fed)
        except Exception as error:  # no memory, too large a plan, or whatever the model's code and the device raise
            log.debug("a step ahead was left to the caller: %s: %s", type(error).__name__, error)
            return {}
        return dict(zip(lanes, zip(rows, chosen, strict=True), strict=True))

    def _step_any(self, lanes: Sequence[PooledTorchLane], ids: Sequence[int]) -> list[Tensor]:
        """Append one token to each lane. Lanes run one by one if the recurrent state of one has not begun, or if their rows
        are in more pieces than a plan takes.
        """
        if not self.layout.states or all(lane.offset for lane in lanes):
            with suppress(PlanTooLarge):
                rows = self._launch(lanes, ids)
                for lane in lanes:
                    lane.end_step()
                return rows
        return [self._run_long(lane, [token_id], keep=1)[0] for lane, token_id in zip(lanes, ids, strict=True)]

    def _launch(self, lanes: Sequence[PooledTorchLane], ids: Sequence[int] | Tensor) -> list[Tensor]:
        """Launch a step on lanes that have room for the token; it is not part of them yet."""
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

    def _run_short(
        self, lane: PooledTorchLane, ids: Sequence[int], run: Callable[[PooledTorchLane, Sequence[int]], Tensor | None]
    ) -> Tensor | None:
        """Append a run whose tokens are entries of one step; returns None and appends nothing if that is not possible.

        A model's states must take the tokens one by one.
        """
        if len(ids) > self._longest_short or self.layout.states:
            return None
        lane.begin_run(len(ids))
        with suppress(PlanTooLarge):
            found = run(lane, ids)
            if found is not None:
                lane.end_short_run(len(ids))
            return found
        return None

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
