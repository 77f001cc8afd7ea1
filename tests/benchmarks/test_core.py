"""The benchmark of the core measures what it says, in small."""

from __future__ import annotations

import pytest

from benchmarks.core.run import CoreSizes, measure_core
from benchmarks.core.step_cost import measure_step_s


def test_every_lane_decodes_in_every_step_that_is_measured():
    assert measure_step_s(2) > 0  # it raises if a lane got no token in some step


@pytest.mark.parametrize(
    "sizes",
    [
        CoreSizes((1, 100), (1000, 10_000), (1000,), (1, 16), (1000, 10_000)),
        pytest.param(CoreSizes(), marks=pytest.mark.slow),
    ],
)
def test_the_core_benchmark_reports_every_size(sizes: CoreSizes) -> None:
    figures = measure_core(sizes)
    assert tuple(figures.match_ms) == sizes.edges
    assert tuple(figures.evict_us) == sizes.nodes
    assert all(value > 0 for value in [*figures.match_ms.values(), *figures.evict_us.values()])
    assert set(figures.chunk_us) == {"memory", "memory, full", "disk"}
    assert all(tuple(depths) == sizes.depths and min(depths.values()) > 0 for depths in figures.chunk_us.values())
