"""The three ways of running a model on lanes.

`LaneCompute` keeps the state in our own lanes, where it can be reused. `LibraryCompute` leaves it in the cache that the
model makes for itself. `RecomputeCompute` keeps none and starts from the first token each time. The last two are for models
whose state we do not know, or that are wrong with a cache. The self-check chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bough.cache.tree.state import Group
from bough.engines.shared import compute
from bough.engines.shared.plain_lane import PlainCompute, PlainLane, tensors_in
from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch.attention import Table
from bough.engines.torch.cpu.step import WholeStep
from bough.engines.torch.forward import Forward
from bough.engines.torch.lanes.lane import TorchLane, has_started
from bough.engines.torch.lanes.layers import BatchCache
from bough.engines.torch.lanes.pages import Pages
from bough.engines.torch.layout import Layout

Compute = compute.Compute[Tensor]


class LaneCompute:
    """Runs a model whose groups are known, on our own lanes: by the whole step, if there is one, or else by its modules."""

    def __init__(
        self,
        forward: Forward,
        layout: Layout,
        pages: Pages,
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

    def make_lane(self) -> TorchLane:
        return TorchLane(self.layout, self.pages, self._forward.device, self._sizes)

    def evaluate(self, lane: TorchLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns the logits after its last token."""
        if self._whole_step is not None:
            return self._whole_step.evaluate(lane, ids)
        lane.begin_run(len(ids))
        logits = self._forward.last_logits(self._forward.tensor_of(ids), self._positions(lane, ids), lane.cache)
        lane.end_run(len(ids))
        return logits[0]

    def evaluate_all(self, lane: TorchLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns the logits after each of its tokens, [run, vocabulary]."""
        if self._whole_step is not None:
            return self._whole_step.evaluate_all(lane, ids)
        lane.begin_run(len(ids))
        tokens, positions = self._forward.tensor_of(ids), self._positions(lane, ids)
        logits = self._forward.run_logits(tokens, positions, lane.cache, len(ids))
        lane.end_run(len(ids))
        return logits

    def evaluate_state(self, lane: TorchLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns what the head reads after its last token, [hidden], in float32."""
        if self._whole_step is not None:
            return self._whole_step.evaluate_state(lane, ids)
        with self._forward.watching_head() as seen:
            self.evaluate(lane, ids)
        return seen.last

    def _positions(self, lane: TorchLane, ids: Sequence[int]) -> Tensor:
        return torch.arange(lane.offset, lane.offset + len(ids), device=self._forward.device)[None]

    def step(self, lanes: Sequence[TorchLane], ids: Sequence[int]) -> list[Tensor]:
        """Append one token to each lane: in one forward pass where the self-check found that right, else one by one."""
        if self._whole_step is not None:
            return self._whole_step.step(lanes, ids)
        is_batch = len(lanes) > 1 or self._kernels is not None  # one lane uses the same kernels, and so gets the same bits
        if is_batch and self.can_batch and (has_started(lanes) or not self._parts):
            return self._step_together(lanes, ids)
        return [self.evaluate(lane, [token_id]) for lane, token_id in zip(lanes, ids, strict=True)]

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


class LaneKernels(Protocol):
    """Kernels that serve all lanes of a batch at once."""

    def tables(self, lanes: Sequence[TorchLane]) -> Mapping[Group, Table]:
        """A table for each group that the kernels can serve, for the run that has begun on these lanes."""
        ...


def find_kernels(layout: Layout, device: torch.device) -> LaneKernels | None:
    """Kernels for this model's lanes; None where there are none, and each lane runs by itself."""
    if device.type != "cuda":
        return None
    try:
        from bough.engines.torch.cuda.lane_kernels import TritonKernels
    except ImportError:  # triton does not come with every build of torch
        return None
    return TritonKernels(layout, device)


class _PlainCompute(PlainCompute[Tensor]):
    """What the two ways without our own lanes have in common."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def evaluate_state(self, lane: PlainLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns what the head reads after its last token, [hidden], in float32."""
        with self._forward.watching_head() as seen:
            self.evaluate(lane, ids)
        return seen.last

    def _bytes_of(self, cache: Any) -> int:
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_in(cache, Tensor)}.values())


class LibraryCompute(_PlainCompute):
    """Runs a model with the cache that it makes for itself."""

    def evaluate(self, lane: PlainLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns the logits after its last token."""
        return self._extend(lane, ids, keeps_all=False)[0]

    def evaluate_all(self, lane: PlainLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns the logits after each of its tokens, [run, vocabulary]."""
        return self._extend(lane, ids, keeps_all=True)

    def _extend(self, lane: PlainLane, ids: Sequence[int], *, keeps_all: bool) -> Tensor:
        positions = torch.arange(lane.offset, lane.offset + len(ids), device=self._forward.device)[None]
        with lane.extending(ids):
            tokens = self._forward.tensor_of(ids)
            logits, lane.cache = self._forward.continue_cache(tokens, positions, lane.cache, keeps_all=keeps_all)
        return logits


class RecomputeCompute(_PlainCompute):
    """Runs a model without any cache: every token costs the whole sequence. Slow, and right for every model."""

    def evaluate(self, lane: PlainLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns the logits after its last token."""
        everything = [*lane.ids, *ids]
        with lane.extending(ids):
            tokens = self._forward.tensor_of(everything)
            return self._forward.last_logits(tokens, self._positions(everything), None)[0]

    def evaluate_all(self, lane: PlainLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns the logits after each of its tokens, [run, vocabulary]."""
        everything = [*lane.ids, *ids]
        with lane.extending(ids):
            tokens = self._forward.tensor_of(everything)
            return self._forward.run_logits(tokens, self._positions(everything), None, len(ids))

    def _positions(self, ids: Sequence[int]) -> Tensor:
        return torch.arange(len(ids), device=self._forward.device)[None]
