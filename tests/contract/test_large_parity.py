"""Half precision against float32, next to stock transformers: a small llama here, larger models of six kinds on CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.contract.large_parity import MOST, NAMES, SMALL, WAYS, Seen, Stock, judge, make_model, parity_rows

NEEDS_CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
MODES = ("off", "wait")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_small_models_in_bfloat16_are_as_near_to_float32_as_stock_transformers(name: str, tmp_path: Path) -> None:
    rows = list(parity_rows(name, tmp_path, sizes=SMALL, device="cpu"))

    assert {row.way for row in rows} == set(WAYS)
    assert {row.way: row.ratio for row in rows if not row.ratio <= MOST} == {}


@pytest.mark.parametrize("graphs", MODES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS_CUDA) for name in NAMES])
@pytest.mark.timeout(600)
def test_larger_models_on_cuda_are_as_near_to_float32_as_stock_transformers(name: str, graphs: str, tmp_path: Path) -> None:
    rows = list(parity_rows(name, tmp_path, graphs=graphs))

    assert {row.way: row.ratio for row in rows if not row.ratio <= MOST} == {}


def test_logits_of_one_row_too_few_are_further_away_than_rounding() -> None:
    ids = [5, 8, 13, 21, 34, 55]
    stock = Stock(make_model("llama", SMALL, "cpu", torch.bfloat16))
    at = [4, 5, 6]
    _, half = stock.logits(ids, at)
    _, without_first = stock.logits(ids[1:], [each - 1 for each in at])

    assert judge("llama", "right", "", [Seen(ids, at, list(half))], stock).ratio == 1
    assert judge("llama", "wrong", "", [Seen(ids, at, list(without_first))], stock).ratio > MOST
