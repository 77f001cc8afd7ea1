"""The parts that run one model on a pool: its memory, its pages, the wiring of its modules and its passes."""

from __future__ import annotations

from pathlib import Path

import torch

from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.layout import TorchLayout
from bough.engines.torch.pooled.compiling import keep_compile_cache
from bough.engines.torch.pooled.compute import LONGEST_SHORT_RUN, PooledCompute
from bough.engines.torch.pooled.graphs import Passes
from bough.engines.torch.pooled.long_run import plan_lengths
from bough.engines.torch.pooled.memory import PoolMemory
from bough.engines.torch.pooled.pages import PooledPages
from bough.engines.torch.pooled.products.choices import cuda_bench, find_products, use_products
from bough.engines.torch.pooled.wiring import Wiring

LONGEST_RUN = 8_192
_MEASURED_ROWS = (1, 16, 32, 64)
_MEASURE_S = 20.0  # the longest time to choose products at the first start


class Pool:
    """A model on a pool of `budget_bytes`. Of several pools of one model only the last one can be used."""

    def __init__(
        self,
        forward: TorchForward,
        layout: TorchLayout,
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
        """Make steps fast, on a separate thread; measurements and compiled code are kept in `folder` for the next start."""
        problem = keep_compile_cache(folder / "compiled")
        self.passes.warm_up(num_lanes, lambda: self._choose_products(folder / "products"))
        if problem and self.passes.graphs is not None:
            self.passes.graphs.problems.append(problem)

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        return self.passes.graphs is None or self.passes.graphs.wait(timeout_s)

    def describe(self) -> str:
        return "eager" if self.passes.graphs is None else self.passes.graphs.describe()

    def close(self) -> None:
        """Stop the warm-up and release the memory, even if lanes are still referred to."""
        self.passes.close()
        self.compute.close()
        self._wiring.disconnect()
        self.memory.close()

    def _choose_products(self, folder: Path) -> None:
        model, device = self._forward.model, self._forward.device
        with torch.no_grad():
            use_products(model, find_products(folder, model, _MEASURED_ROWS, cuda_bench(device), _MEASURE_S))
            for group, shared in self._wiring.shared.items():
                plan_lengths(self.compute.layout.rows[group], shared, LONGEST_RUN, device)
