"""Packed weights in the place of tensors: the same numbers as float32, whatever is done with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bough.engines.torch.cpu.library import BLOCK_TYPES, TYPES, load_kernels
from bough.engines.torch.cpu.matrix import Matrix
from bough.engines.torch.cpu.weight import PackedWeight, Products
from bough.errors import KernelsMissing
from tests.packed_models import random_blocks

ROWS, COLUMNS, THREADS = 71, 512, 3
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture(scope="module")
def products() -> Products:
    try:
        return Products(load_kernels(), THREADS)
    except KernelsMissing as missing:
        pytest.skip(str(missing))


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pack(blocks: np.ndarray, type_name: str, num_columns: int, products: Products) -> Matrix:
    return products.pack(type_name, len(blocks), num_columns, lambda first, last: torch.from_numpy(blocks[first:last]))


def make_pair(type_name: str, products: Products, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> tuple[PackedWeight, Tensor]:
    """A packed weight, and the float32 tensor that gguf-py or torch unpack the same bytes to."""
    rows = int(np.prod(shape[:-1]))
    if type_name in FLOATS:
        stored = (random_tensor(rows, shape[-1]) / 8).to(FLOATS[type_name])
        return PackedWeight(Matrix.of_tensor(stored), shape, products), stored.float().view(shape)
    blocks = random_blocks(type_name, rows, shape[-1], spread=0.2)
    plain = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name])
    matrix = pack(blocks, type_name, shape[-1], products)
    return PackedWeight(matrix, shape, products), torch.from_numpy(plain).view(shape)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    if wanted.numel():
        assert float((found - wanted).abs().max()) <= 2e-4 * max(1.0, float(wanted.abs().max()))  # activations have 16 bits


@pytest.mark.parametrize("type_name", TYPES)
def test_every_type_unpacks_to_the_bits_that_its_definition_gives(type_name: str, products: Products) -> None:
    weight, plain = make_pair(type_name, products)

    assert torch.equal(weight.unpack(), plain)


@pytest.mark.parametrize("type_name", TYPES)
def test_linear_gives_what_the_unpacked_weight_gives_for_any_number_of_rows(type_name: str, products: Products) -> None:
    weight, plain = make_pair(type_name, products)
    bias = random_tensor(ROWS, seed=1)
    for num_rows in range(71):
        x = random_tensor(num_rows, COLUMNS, seed=num_rows)

        assert_close(F.linear(x, weight), F.linear(x, plain))  # type: ignore[arg-type]
        assert_close(F.linear(x, weight, bias), F.linear(x, plain, bias))  # type: ignore[arg-type]


@pytest.mark.parametrize("type_name", TYPES)
def test_a_row_has_the_same_bits_whatever_rows_are_computed_with_it(type_name: str, products: Products) -> None:
    weight, _ = make_pair(type_name, products)
    x = random_tensor(40, COLUMNS)
    together = F.linear(x, weight)  # type: ignore[arg-type]

    for start, end in ((0, 1), (3, 5), (5, 12), (12, 21), (21, 40)):
        assert torch.equal(F.linear(x[start:end], weight), together[start:end])  # type: ignore[arg-type]


@pytest.mark.parametrize("type_name", TYPES)
def test_embedding_gives_the_rows_of_the_unpacked_weight(type_name: str, products: Products) -> None:
    weight, plain = make_pair(type_name, products)
    ids = torch.tensor([[3, 70, 0], [3, 3, 41]])

    assert torch.equal(F.embedding(ids, weight), F.embedding(ids, plain))  # type: ignore[arg-type]
    assert F.embedding(ids[:, :0], weight, padding_idx=0).shape == (2, 0, COLUMNS)  # type: ignore[arg-type]


@pytest.mark.parametrize("type_name", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("columns", [1, 31, 33, 100])
def test_floats_may_have_any_number_of_columns(type_name: str, columns: int, products: Products) -> None:
    weight, plain = make_pair(type_name, products, (ROWS, columns))
    for num_rows in (1, 2, 5, 9, 30):
        x = random_tensor(num_rows, columns)

        assert_close(F.linear(x, weight), F.linear(x, plain))  # type: ignore[arg-type]
    assert torch.equal(weight.unpack(), plain)


def test_a_slice_of_panels_begins_at_a_panel(products: Products) -> None:
    weight, plain = make_pair("Q4_1", products)
    x = random_tensor(3, COLUMNS)

    part = PackedWeight(weight.matrix.slice(16, 40), (24, COLUMNS), products)

    assert torch.equal(part.unpack(), plain[16:40])
    assert torch.equal(F.linear(x, part), F.linear(x, weight)[:, 16:40])  # type: ignore[arg-type]
    assert not weight.matrix.can_slice(17)


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_a_row_has_the_same_bits_alone_in_a_batch_in_a_run_and_on_any_number_of_threads(
    type_name: str, products: Products
) -> None:
    columns = 512 if "_K" in type_name else 576
    weight, _ = make_pair(type_name, products, (ROWS, columns))
    x = random_tensor(40, columns)
    run = products.multiply(weight.matrix, x, None)

    for num_rows in (1, 2, 3, 4, 7, 8, 9, 12):
        assert torch.equal(products.multiply(weight.matrix, x[-num_rows:], None), run[-num_rows:])
    assert torch.equal(Products(products.kernels, 3).multiply(weight.matrix, x, None), run)


@pytest.mark.parametrize(("terms", "error"), [(2, 4e-5), (1, 2e-2)])
def test_activations_of_two_terms_are_a_hundred_times_as_exact_as_of_one(
    terms: int, error: float, products: Products
) -> None:
    weight, plain = make_pair("Q4_K", products, (ROWS, 512))
    x = random_tensor(20, 512)
    wanted = x.double() @ plain.double().T

    found = Products(products.kernels, 2, terms).multiply(weight.matrix, x, None)

    assert (found - wanted).norm() / wanted.norm() < error


def test_zeros_very_small_and_not_finite_activations_are_no_other_rows_problem(products: Products) -> None:
    weight, _ = make_pair("Q8_0", products)
    x = random_tensor(4, COLUMNS)
    plain = products.multiply(weight.matrix, x, None)
    x[0], x[1], x[2, 3] = 0.0, 1e-40, float("nan")

    found = products.multiply(weight.matrix, x, None)

    assert not found[0].any() and not found[1].any()
    assert found[2].isnan().all()
    assert torch.equal(found[3], plain[3])


def test_inputs_of_any_number_of_axes_and_strides_are_taken(products: Products) -> None:
    weight, plain = make_pair("Q8_0", products)
    wide = random_tensor(2, 3, 2 * COLUMNS)
    for x in (wide[..., ::2], wide[0, 0, :COLUMNS], wide[:0, :, :COLUMNS], wide[:, :, :COLUMNS].transpose(0, 1)):
        assert_close(F.linear(x, weight), F.linear(x, plain))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [random_tensor(4, 2 * COLUMNS), random_tensor(4, 1), torch.tensor(1.0)])
def test_an_input_that_does_not_fit_is_refused_as_torch_does(bad: Tensor, products: Products) -> None:
    weight, _ = make_pair("Q8_0", products)

    with pytest.raises(RuntimeError):
        F.linear(bad, weight)  # type: ignore[arg-type]


def test_a_bias_that_does_not_fit_is_refused_or_spread_as_torch_does(products: Products) -> None:
    weight, plain = make_pair("Q8_0", products)
    x = random_tensor(2, COLUMNS)

    with pytest.raises(RuntimeError):
        F.linear(x, weight, torch.ones(ROWS - 1))  # type: ignore[arg-type]
    strided = random_tensor(2 * ROWS)[::2]
    assert_close(F.linear(x, weight, strided), F.linear(x, plain, strided))  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[-1], [ROWS], [0, ROWS + 5]])
def test_ids_out_of_range_are_an_error(ids: list[int], products: Products) -> None:
    weight, _ = make_pair("Q8_0", products)

    with pytest.raises(IndexError):
        F.embedding(torch.tensor(ids), weight)  # type: ignore[arg-type]


UNUSUAL: dict[str, Callable[[Any], Any]] = {
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "data": lambda w: w.data,
    "to": lambda w: w.to(torch.float64),
    "float": lambda w: w.float(),
    "view": lambda w: w.view(-1),
    "index": lambda w: w[3],
    "slice": lambda w: w[2:5, ::2],
    "choice": lambda w: w[torch.tensor([1, 2])],
    "add": lambda w: w + 1,
    "radd": lambda w: 1 + w,
    "sub": lambda w: 2 - w,
    "mul": lambda w: w * w,
    "div": lambda w: w / 3,
    "neg": lambda w: -w,
    "pow": lambda w: w**2,
    "with a tensor": lambda w: torch.ones(COLUMNS) + w,
    "matmul": lambda w: torch.matmul(torch.ones(2, COLUMNS), w.t()),
    "matmul of itself": lambda w: torch.matmul(w, torch.ones(COLUMNS, 2)),
    "at": lambda w: w @ torch.ones(COLUMNS),
    "rat": lambda w: torch.ones(ROWS) @ w,
    "cat": lambda w: torch.cat([w, w], dim=1),
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "first argument of linear": lambda w: F.linear(w, torch.ones(2, COLUMNS)),
    "keywords": lambda w: F.linear(input=torch.ones(1, COLUMNS), weight=w, bias=None),
    "norms of embeddings": lambda w: F.normalize(w, dim=-1),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_any_other_operation_sees_the_unpacked_tensor(name: str, products: Products) -> None:
    weight, plain = make_pair("Q4_0", products)

    found, wanted = UNUSUAL[name](weight), UNUSUAL[name](plain)

    assert isinstance(found, Tensor)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_it_looks_like_a_float32_tensor_on_the_cpu(products: Products) -> None:
    weight, plain = make_pair("Q4_0", products, (5, 7, 32))
    for name in ("shape", "dtype", "device", "ndim", "is_meta", "requires_grad", "is_cuda"):
        assert getattr(weight, name) == getattr(plain, name), name
    assert (weight.numel(), weight.dim(), weight.size(), weight.size(-1)) == (1120, 3, plain.shape, 32)
    assert len(weight) == 5
    assert weight.nbytes == 48 * 18 + 32 * 3  # three panels of 16 rows, each with scales of whole lines


def test_it_cannot_be_changed_without_a_word(products: Products) -> None:
    weight, _ = make_pair("Q4_0", products)

    with pytest.raises(AttributeError, match="cannot be changed"):
        weight.mul_(2)
    with pytest.raises(TypeError):
        weight[0] = 1  # type: ignore[index]


def test_an_expert_stays_packed(products: Products) -> None:
    weight, plain = make_pair("Q8_0", products, (4, 16, 64))
    x = random_tensor(3, 64)
    for index in (0, 3, -1, torch.tensor(2)):
        expert = weight[index]

        assert isinstance(expert, PackedWeight)
        assert_close(F.linear(x, expert), F.linear(x, plain[index]))  # type: ignore[arg-type]
    for index in (4, -5):
        with pytest.raises(IndexError):
            weight[index]
    assert [torch.equal(a.unpack(), b) for a, b in zip(weight, plain, strict=True)] == [True] * 4
    assert torch.equal(weight[1:3], plain[1:3])
    assert torch.equal(weight.transpose(1, 2), plain.transpose(1, 2))


def test_the_reference_of_the_self_check_is_computed_by_torch(products: Products) -> None:
    weight, plain = make_pair("Q4_1", products)
    exact = PackedWeight(weight.matrix, weight.shape, Products(products.kernels, THREADS))
    exact._products.uses_torch = True
    x = random_tensor(5, COLUMNS)

    assert torch.equal(F.linear(x, exact), F.linear(x, plain))  # type: ignore[arg-type]
