"""The host cost of a step: what is measured are steps in which every lane gets a token."""

from __future__ import annotations

from bough.bench.core.step_cost import measure_step_s


def test_every_lane_decodes_in_every_step_that_is_measured():
    assert measure_step_s(2) > 0  # it raises if a lane got no token in some step
