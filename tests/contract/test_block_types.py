"""Every block type of GGUF files that the kernels know, on four kinds of models, against the same weights in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.engines.torch.cpu.library import BLOCK_TYPES
from tests.contract.parity import block_pair, row_of
from tests.packed_models import has_kernels

NAMES = ("llama", "qwen3", "gemma3_text", "gpt_oss")
OF_16_BITS = 1e-3  # spreads of the logits: activations beside blocks have so many bits, those of the reference 24


def cases() -> Iterator[Any]:
    """One case for each type at once, all others with --slow. Blocks of 256 columns do not fit into 576."""
    for number, type_name in enumerate(BLOCK_TYPES):
        for name in NAMES:
            for columns in (256, 576) if "K" not in type_name else (256,):
                is_quick = name == NAMES[number % 3] and columns == (256 if "K" in type_name else 576)
                yield pytest.param(type_name, name, columns, marks=[] if is_quick else [pytest.mark.slow])


@pytest.mark.skipif(not has_kernels(), reason="there are no CPU kernels")
@pytest.mark.parametrize(("type_name", "name", "columns"), list(cases()))
def test_blocks_give_the_logits_of_the_same_weights_in_float32(
    type_name: str, name: str, columns: int, tmp_path: Path
) -> None:
    torch.set_num_threads(1)

    row = row_of(name, tmp_path, block_pair(name, tmp_path, type_name, columns))

    assert row.capabilities.can_reuse, row.capabilities.reason
    assert row.step.startswith("whole") == (name != "gpt_oss"), row.step
    assert max(row.differences.values()) <= OF_16_BITS * row.spread, (row.differences, row.spread)
    if name != "gpt_oss":
        assert row.own_difference == 0
    assert row.state_difference <= OF_16_BITS
