"""Which kernel computes a product: what is offered, what is chosen, the deadline, and the file that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bough.engines.torch.pooled.products.choices import (
    Bench,
    Launch,
    ProductTable,
    Shape,
    candidates,
    choose,
    find_products,
    measure_products,
    use_products,
)
from bough.engines.torch.pooled.products.linears import ProductChoice, join_products, list_products

CUBLAS, LT = ProductChoice(64, "cublas"), ProductChoice(64, "cublaslt")
OWN, WORSE = ProductChoice(64, "few_rows", (32, 256, 4, 4)), ProductChoice(64, "few_rows", (32, 256, 4, 5))
LLAMA_8B = [Shape(n, 4096, "bfloat16") for n in (6144, 4096, 28672, 128256)] + [Shape(4096, 14336, "bfloat16")]


def make_bench(*times: float) -> Bench:
    """A device whose launches take these times, again and again. The launches are run."""
    left = list(times)

    def time_us(launches: Sequence[Launch]) -> float:
        for launch in launches:
            launch()
        left.append(left.pop(0))
        return left[-1]

    return Bench(torch.device("cpu"), "a test", has_tma=False, cold_bytes=0, time_us=time_us)


def make_model() -> nn.Module:
    """Two shapes, the larger one three times."""
    model = nn.ModuleList([*(nn.Linear(32, 64) for _ in range(3)), nn.Linear(16, 24, bias=False)])
    model.to(torch.bfloat16)
    join_products(model)
    return model


def ticking(step_s: float) -> Callable[[], float]:
    now = [0.0]

    def clock() -> float:
        now[0] += step_s
        return now[0]

    return clock


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({CUBLAS: 10.0, LT: 9.9}, CUBLAS),
        ({CUBLAS: 10.0, LT: 9.7}, LT),
        ({CUBLAS: 10.0, LT: 10.0, OWN: 9.9}, CUBLAS),
        ({CUBLAS: 10.0, LT: 10.0, OWN: 9.8, WORSE: 9.9}, OWN),
        ({CUBLAS: 10.0, LT: 9.0, OWN: 8.9}, LT),
    ],
)
def test_a_kernel_is_chosen_if_it_is_clearly_faster(times: dict[ProductChoice, float], expected: ProductChoice) -> None:
    assert choose(times) == expected


def test_what_was_best_for_an_8b_llama_is_offered() -> None:
    for shape in LLAMA_8B:
        best = (1, 4096, 4, 1) if shape.k == 4096 else (16, 512, 4, 4)
        assert ProductChoice(1, "one_row", best) in candidates(shape, 1, has_tma=False)
        assert {(32, 256, 4, 4), (32, 256, 4, 5)} <= {each.tiling for each in candidates(shape, 16, has_tma=True)}


def test_kernels_are_not_offered_where_they_cannot_run() -> None:
    shape = LLAMA_8B[0]

    assert not any(each.tiling for each in candidates(shape, 16, has_tma=False))
    assert not any(each.tiling for each in candidates(replace(shape, k=4100), 16, has_tma=True))
    assert not any(each.tiling for each in candidates(shape, 32, has_tma=True))


def test_every_shape_gets_a_choice_for_each_number_of_rows() -> None:
    model = make_model()

    table = measure_products(model, [20, 40], make_bench(10.0, 5.0), deadline_s=100)
    use_products(model, table)

    assert dict(table.choices) == {
        "64x32 bfloat16": "20 cublaslt;40 cublaslt",
        "24x16 bfloat16": "20 cublaslt;40 cublaslt",
    }
    assert [module.choices for module, _, _ in list_products(model)] == ["20 cublaslt;40 cublaslt"] * 4
    assert model[0](torch.zeros(1, 32, dtype=torch.bfloat16)).shape == (1, 64)


def test_layers_call_torch_directly_where_nothing_is_faster() -> None:
    table = measure_products(make_model(), [20, 40], make_bench(10.0), deadline_s=100)

    assert set(table.choices.values()) == {""}


def test_after_the_deadline_the_largest_weights_have_been_measured() -> None:
    table = measure_products(make_model(), [20, 40], make_bench(10.0, 5.0), deadline_s=3.5, clock=ticking(1.0))

    assert dict(table.choices) == {"64x32 bfloat16": "20 cublaslt", "24x16 bfloat16": ""}
    assert table.num_left_out == 3


def test_a_second_start_does_not_measure_again(tmp_path: Path) -> None:
    model = make_model()
    first = find_products(tmp_path / "products", model, [20], make_bench(10.0, 5.0), 100)

    second = find_products(tmp_path / "products", model, [20], make_bench(), 100)

    assert second == first


@pytest.mark.parametrize("text", ["", "[]", '{"choices": {"64x32 bfloat16": "many cublas"}}'])
def test_a_damaged_file_is_measured_again(tmp_path: Path, text: str) -> None:
    model, bench = make_model(), make_bench(10.0, 5.0)
    first = find_products(tmp_path, model, [20], bench, 100)
    next(tmp_path.iterdir()).write_text(text, encoding="utf-8")

    assert find_products(tmp_path, model, [20], bench, 100).choices == first.choices


def test_an_incomplete_table_is_not_kept(tmp_path: Path) -> None:
    table = find_products(tmp_path, make_model(), [20], make_bench(10.0), deadline_s=-1)

    assert table.num_left_out == 2
    assert list(tmp_path.iterdir()) == []


def test_another_device_gets_its_own_table(tmp_path: Path) -> None:
    model = make_model()
    find_products(tmp_path, model, [20], make_bench(10.0), 100)

    other = find_products(tmp_path, model, [20], replace(make_bench(10.0, 5.0), name="another"), 100)

    assert set(other.choices.values()) == {"20 cublaslt"}


def test_a_layer_without_a_choice_computes_as_before() -> None:
    model = make_model()
    x = torch.randn(2, 32, dtype=torch.bfloat16)
    expected = model[0](x)

    use_products(model, ProductTable({"1x1 bfloat16": "20 cublaslt"}))

    assert torch.equal(model[0](x), expected)
