"""Every tiny architecture against an uncached forward with the attention that its own code defines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bough.engines.choice import find_installed
from tests.contract.parity import WITHOUT_REUSE, Row, parity_row
from tests.packed_models import has_kernels
from tests.tiny_models import CONFIGS, ON_MLX

NEEDS_MLX = [pytest.mark.mlx, pytest.mark.skipif("mlx" not in find_installed(), reason="MLX is not installed")]
NEEDS_KERNELS = [pytest.mark.skipif(not has_kernels(), reason="there are no CPU kernels")]
PACKED = [("q4_0", "llama"), ("bf16", "gemma3_text"), ("q8_0", "mistral")]
PACKED_SLOW = [(kind, name) for kind in ("bf16", "q8_0") for name in CONFIGS if (kind, name) not in PACKED]
STATE_TOLERANCE = {"torch": 1e-5, "mlx": 1e-5, "bf16": 2e-5, "q8_0": 5e-4, "q4_0": 5e-4}  # as a share of its norm
IN_BLOCKS = {"q8_0", "q4_0"}
OF_16_BITS = 1e-3  # spreads of the logits: activations beside blocks have so many bits, those of the reference 24


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def tolerance(engine: str, row: Row) -> float:
    """How far logits may lie from the reference's. Wide models of packed weights have larger logits than tiny ones."""
    if engine in IN_BLOCKS:
        return OF_16_BITS * row.spread
    return 3e-4 if engine == "bf16" else 1e-4


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("torch", name) for name in CONFIGS if name not in WITHOUT_REUSE),
        *(pytest.param("mlx", name, marks=NEEDS_MLX) for name in ON_MLX),
        *(pytest.param(*each, marks=NEEDS_KERNELS) for each in PACKED),
        *(
            pytest.param(*each, marks=[*NEEDS_KERNELS, pytest.mark.slow])
            for each in PACKED_SLOW
            if each[1] not in WITHOUT_REUSE
        ),
    ],
)
def test_reuse_changes_no_logit_and_no_state_by_more_than_rounding(engine: str, name: str, tmp_path: Path) -> None:
    row = parity_row(name, tmp_path, engine)

    assert row.capabilities.can_reuse, row.capabilities.reason
    assert set(row.differences) >= {"stepped", "chunked", "restored", "rewound", "branched"}
    assert max(row.differences.values()) <= tolerance(engine, row), (row.differences, row.spread)
    if engine in IN_BLOCKS and row.step.startswith("whole"):
        assert row.own_difference == 0
    assert row.state_difference <= STATE_TOLERANCE[engine], row.state_difference


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("torch", name) for name in sorted(WITHOUT_REUSE & set(CONFIGS))),
        *(
            pytest.param(*each, marks=[*NEEDS_KERNELS, pytest.mark.slow])
            for each in PACKED_SLOW
            if each[1] in WITHOUT_REUSE
        ),
    ],
)
def test_an_architecture_that_is_wrong_when_reused_is_found_out_and_still_runs_right(
    engine: str, name: str, tmp_path: Path
) -> None:
    row = parity_row(name, tmp_path, engine)

    assert not row.capabilities.can_reuse
    assert row.capabilities.reason
    assert row.differences["stepped"] <= tolerance(engine, row), (row.differences, row.spread)
    assert row.state_difference <= STATE_TOLERANCE[engine]
