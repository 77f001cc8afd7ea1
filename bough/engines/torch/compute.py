"""Runs a model whose state is in Bough's lanes, where it can be reused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bough.engines.shared.compute import GroupCompute, RunResult
from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch.cpu.step import WholeStep
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.lanes.lane import TorchLane
from bough.engines.torch.lanes.layers import BatchCache
from bough.engines.torch.lanes.pages import TorchPages
from bough.engines.torch.layout import TorchLayout
from bough.engines.torch.row_types import ClippedNumbers

if TYPE_CHECKING:
    from bough.engines.torch.lanes.kernels import TritonKernels


class TorchLaneCompute(GroupCompute[TorchLane, Tensor]):
    """Runs a model whose groups are known: by the whole step in one call if there is one, else by its modules."""

    layout: TorchLayout
    pages: TorchPages

    def __init__(
        self,
        forward: TorchForward,
        layout: TorchLayout,
        pages: TorchPages,
        sizes: LaneSizes,
        can_batch: bool,
        whole_step: WholeStep | None = None,
    ) -> None:
        self.layout = layout
        self.pages = pages
        self.can_batch = can_batch
        self._forward = forward
        self._sizes = sizes
        self._parts = [part for state in layout.states.values() for part in state.parts]
        self._kernels = find_kernels(layout, forward.device)
        self._whole_step = whole_step
        self.clipped = ClippedNumbers(forward.device)

    def make_lane(self) -> TorchLane:
        return TorchLane(self.layout, self.pages, self._forward.device, self._sizes, self.clipped)

    def run(self, lane: TorchLane, ids: Sequence[int], result: RunResult) -> Tensor:
        found = self._run(lane, ids, result)
        self.clipped.log_once()
        return found

    def _run(self, lane: TorchLane, ids: Sequence[int], result: RunResult) -> Tensor:
        if self._whole_step is not None:
            return self._whole_step.run(lane, ids, result)
        lane.begin_run(len(ids))
        found = self._forward.run(ids, len(ids), lane.cache, result, first=lane.offset)
        lane.end_run(len(ids))
        return found

    def step(self, lanes: Sequence[TorchLane], ids: Sequence[int]) -> list[Tensor]:
        """Append one token to each lane: in one forward pass where the self-check found that right, else one by one."""
        if self._whole_step is not None:
            return self._whole_step.step(lanes, ids)
        is_batch = len(lanes) > 1 or self._kernels is not None  # one lane uses the same kernels, and so gets the same bits
        if is_batch and self.can_batch and (not self._parts or all(lane.offset for lane in lanes)):
            return self._step_together(lanes, ids)
        return super().step(lanes, ids)

    def _step_together(self, lanes: Sequence[TorchLane], ids: Sequence[int]) -> list[Tensor]:
        for lane in lanes:
            lane.begin_run(1)
        positions = torch.tensor([[lane.offset] for lane in lanes], device=self._forward.device)
        tables = self._kernels.tables(lanes) if self._kernels is not None else {}
        cache = BatchCache([lane.cache for lane in lanes], self._parts, [lane.state_views() for lane in lanes], tables)
        tokens = torch.tensor([[token_id] for token_id in ids], device=self._forward.device)
        logits = self._forward.last_logits(tokens, positions, cache)
        with torch.inference_mode():
            cache.scatter()
        for lane in lanes:
            lane.end_run(1)
        return list(logits.unbind())


def find_kernels(layout: TorchLayout, device: torch.device) -> TritonKernels | None:
    """Kernels that serve all lanes of a batch at once; None where there are none, and each lane runs by itself."""
    if device.type != "cuda":
        return None
    try:
        from bough.engines.torch.lanes.kernels import TritonKernels
    except ImportError:  # triton does not come with every build of torch
        return None
    return TritonKernels(layout, device)
