"""Everything that runs one model on a pool: its memory, its pages, the wiring of its modules and its passes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch.forward import Forward
from bough.engines.torch.layout import Layout
from bough.engines.torch.pooled.compute import LONGEST_SHORT_RUN, PooledCompute
from bough.engines.torch.pooled.lanes.memory import PoolMemory
from bough.engines.torch.pooled.lanes.pages import PooledPages
from bough.engines.torch.pooled.passes.compiling import keep_compile_cache
from bough.engines.torch.pooled.passes.long_run import plan_lengths
from bough.engines.torch.pooled.passes.passes import Passes
from bough.engines.torch.pooled.passes.wiring import Wiring
from bough.engines.torch.pooled.products.choices import cuda_bench, find_products, use_products
from bough.engines.torch.pooled.products.linears import join_products

LONGEST_RUN = 8_192
_MEASURED_ROWS = (1, 16, 32, 64)
_MEASURE_S = 20.0  # what choosing products may take at the first start


def prepare_model(model: nn.Module) -> None:
    """Give a model the modules that steps are fast with. That takes memory for a moment: do it before the pool is taken."""
    join_products(model)


class Pool:
    """A model on a pool of `budget_bytes`. Of the pools of one model only the last one that was connected can be used."""

    def __init__(
        self,
        forward: Forward,
        layout: Layout,
        wiring: Wiring,
        sizes: LaneSizes,
        budget_bytes: int,
        *,
        goes_ahead: bool,
        longest_short: int = LONGEST_SHORT_RUN,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.memory = PoolMemory(layout, forward.device, budget_bytes)
        self.pages = PooledPages(layout, self.memory)
        self.passes = Passes(forward, layout, self.memory, wiring)
        self.compute = PooledCompute(
            forward, layout, self.pages, self.passes, sizes, goes_ahead=goes_ahead, longest_short=longest_short
        )
        self._forward = forward
        self._wiring = wiring
        wiring.connect(self.memory)

    def warm_up(self, folder: Path, num_lanes: int) -> None:
        """Make steps fast, on a thread of its own; what is learnt and compiled is kept in `folder` for the next start."""
        problem = keep_compile_cache(folder / "compiled")
        self.passes.warm_up(num_lanes, lambda: self._choose_products(folder / "products"))
        if problem and self.passes.graphs is not None:
            self.passes.graphs.readiness.problems.append(problem)

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the warm-up is over; False if it is not yet."""
        return self.passes.graphs is None or self.passes.graphs.wait(timeout_s)

    def describe(self) -> str:
        """How steps are computed, for people."""
        return "eager" if self.passes.graphs is None else self.passes.graphs.describe()

    def close(self) -> None:
        """Stop the warm-up and give the memory back, whoever still knows a lane."""
        self.passes.close()
        self.compute.close()
        self._wiring.disconnect()
        self.memory.close()

    def _choose_products(self, folder: Path) -> None:
        model, device = self._forward.model, self._forward.device
        with torch.no_grad():
            use_products(model, find_products(folder, model, _MEASURED_ROWS, cuda_bench(device), _MEASURE_S))
            for shape in self._wiring.shapes.values():
                plan_lengths(shape, LONGEST_RUN, device)
