"""Triton kernels for matrix products with few rows of activations.

A step of a few lanes reads every weight once, and how fast it reads them is its whole cost. `multiply_one_row` has one row
of activations; each program reads a few rows of the weight. `multiply_few_rows` has up to 16 and reads tiles of the weight
by TMA, which needs compute capability 9. Sums are in float32, and the bias is added before rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_FEWEST_ROWS = 16  # of a tile of activations: a tensor core takes no fewer columns than 8, and Triton's dot 16


def multiply_one_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, block_n: int, block_k: int, warps: int, stages: int
) -> Tensor:
    """x [1, K] times weight [N, K]: [1, N]. A program takes `block_n` rows of the weight, `block_k` columns at a time."""
    n, k = weight.shape
    y = torch.empty(1, n, dtype=x.dtype, device=x.device)
    _one_row[(triton.cdiv(n, block_n),)](
        x, weight, bias if bias is not None else x, y, n,
        K=k, HAS_BIAS=bias is not None, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return y


def multiply_few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, block_n: int, block_k: int, warps: int, stages: int
) -> Tensor:
    """x [rows, K] times weight [N, K]: [rows, N]. The rows of a weight must begin at multiples of 16 bytes."""
    rows, k = x.shape
    n = weight.shape[0]
    tile = max(_FEWEST_ROWS, triton.next_power_of_2(rows))
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    _few_rows[(triton.cdiv(n, block_n),)](
        TensorDescriptor.from_tensor(x, [tile, block_k]),
        TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        bias if bias is not None else x, y, rows, n,
        K=k, HAS_BIAS=bias is not None, TILE=tile, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return y


@triton.jit
def _one_row(
    x_ptr, weight_ptr, bias_ptr, y_ptr, N,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_n = n < N
    weights = weight_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    if BLOCK_K >= K:  # no loop: all of the weight is asked for at once, before the activations
        is_k = k < K
        w = tl.load(weights, mask=is_n[:, None] & is_k[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + k, mask=is_k, other=0.0)
        total = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    else:
        products = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            is_k = at + k < K
            w = tl.load(weights + at, mask=is_n[:, None] & is_k[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + at + k, mask=is_k, other=0.0)
            products += w.to(tl.float32) * x.to(tl.float32)[None, :]
        total = tl.sum(products, 1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=is_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, total.to(y_ptr.dtype.element_ty), mask=is_n)


@triton.jit
def _few_rows(
    x_tiles, weight_tiles, bias_ptr, y_ptr, rows, N,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    row = tl.arange(0, TILE)
    is_n = n < N
    total = tl.zeros([BLOCK_N, TILE], tl.float32)
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        total = tl.dot(weight_tiles.load([first, at]), x_tiles.load([0, at]).T, total)  # zeros beyond N, K and rows
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=is_n, other=0.0).to(tl.float32)[:, None]
    places = y_ptr + row[None, :].to(tl.int64) * N + n[:, None]
    tl.store(places, total.to(y_ptr.dtype.element_ty), mask=(row < rows)[None, :] & is_n[:, None])
