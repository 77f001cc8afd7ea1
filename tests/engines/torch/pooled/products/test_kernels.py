"""The kernels for products of few rows against torch: on a GPU, or by Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from bough.engines.torch.pooled.products.choices import Bench, cuda_bench, measure_products
from bough.engines.torch.pooled.products.linears import ProductChoice, join_products, multiply, product, write_choices

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not (IS_INTERPRETED or torch.cuda.is_available()), reason="needs an NVIDIA GPU or the interpreter"),
]
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
DTYPES = [torch.float16, torch.float32] if IS_INTERPRETED else [torch.float16, torch.bfloat16]


def require_tma() -> None:
    if not IS_INTERPRETED and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs TMA")


def check(rows: int, n: int, k: int, choice: ProductChoice, dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(num, k, device=DEVICE).to(dtype) for num in (rows, n))
    bias = torch.randn(n, device=DEVICE).to(dtype) if has_bias else None
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    y = multiply(x[:, None], weight, bias, choice)

    assert y.shape == (rows, 1, n)
    assert y.dtype == dtype
    torch.testing.assert_close(y[:, 0].float(), expected, rtol=0.01, atol=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "tiling"), [(37, 64, (1, 64, 4, 1)), (50, 200, (2, 256, 4, 1)), (50, 200, (16, 64, 4, 4))]
)
def test_one_row(n: int, k: int, tiling: tuple[int, ...], has_bias: bool, dtype: torch.dtype) -> None:
    check(1, n, k, ProductChoice(1, "one_row", tiling), dtype, has_bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), [(2, 64, 64), (3, 50, 200), (16, 70, 128)])
def test_few_rows(rows: int, n: int, k: int, has_bias: bool, dtype: torch.dtype) -> None:
    require_tma()
    check(rows, n, k, ProductChoice(16, "few_rows", (32, 64, 4, 3)), dtype, has_bias)


def test_the_operator_chooses_by_the_number_of_rows() -> None:
    require_tma()
    torch.manual_seed(0)
    weight = torch.randn(40, 64, device=DEVICE).half()
    text = write_choices(
        [
            ProductChoice(1, "one_row", (1, 64, 4, 1)),
            ProductChoice(16, "few_rows", (32, 64, 4, 3)),
            ProductChoice(32, "cublaslt"),
        ]
    )

    for rows in (1, 2, 16, 17, 33):
        x = torch.randn(1, rows, 64, device=DEVICE).half()
        expected = F.linear(x.float(), weight.float())
        torch.testing.assert_close(product(x, weight, None, text).float(), expected, rtol=0.01, atol=0.05)


def test_an_input_with_gaps_is_read_where_its_numbers_lie() -> None:
    weight = torch.randn(40, 64, device=DEVICE).half()
    x = torch.randn(1, 1, 128, device=DEVICE).half()[..., ::2]

    y = multiply(x, weight, None, ProductChoice(1, "one_row", (1, 64, 4, 1)))

    torch.testing.assert_close(y.float(), F.linear(x.float(), weight.float()), rtol=0.01, atol=0.05)


def test_kernels_are_measured_and_chosen() -> None:
    require_tma()
    model = torch.nn.ModuleList([torch.nn.Linear(64, 48) for _ in range(2)]).to(DEVICE, torch.float16)
    join_products(model)
    timed: list[int] = []

    def time_us(launches: object) -> float:
        timed.append(len(timed))
        return 1.0 / len(timed)  # the later, the faster

    device = torch.device(DEVICE)
    bench = Bench(device, "a test", True, 0, time_us) if IS_INTERPRETED else cuda_bench(device)
    table = measure_products(model, [1, 16], bench, deadline_s=100)

    assert table.num_left_out == 0
    assert not [note for note in table.notes if "wrong" in note]
    if IS_INTERPRETED:
        assert dict(table.choices) == {"48x64 float16": "1 one_row 2 64 4 1;16 few_rows 64 256 8 4"}
