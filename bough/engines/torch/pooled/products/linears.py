"""A model's linear layers as few and fast products.

Linear layers with the same input, such as q, k and v, become one product: the layer that is called first computes all, and
the others take their part of it. Every linear layer then has choices: which kernel computes its product at which number of
rows (`choices.py` finds them by measuring). Without choices torch computes it.

Always true after `join_products`:
- a joined weight has one owner, `JoinedLinear`, and the weights that it was made of are released;
- a module returns the result of the linear layer that it replaced, for any inputs, in any order of calls;
- a product is only used by the thread that computed it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FAMILIES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
"""Names of linear layers that transformers' modules call with one input."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_RELEASE_AFTER_BYTES = 2**30


@dataclass(frozen=True)
class ProductChoice:
    """The way to compute a product of up to `rows` rows: "cublas", "cublaslt", or our kernel "one_row" or "few_rows"."""

    rows: int
    way: str
    tiling: tuple[int, ...] = ()  # block_n, block_k, warps, stages of our kernels

    def __str__(self) -> str:
        return " ".join(map(str, (self.rows, self.way, *self.tiling)))


def write_choices(choices: list[ProductChoice]) -> str:
    """The text of the choices for one shape. A text, because compiled code takes it for a constant."""
    return ";".join(map(str, sorted(choices, key=lambda choice: choice.rows)))


@lru_cache(maxsize=1024)
def read_choices(text: str) -> tuple[ProductChoice, ...]:
    """The choices in a text of `write_choices`, by number of rows. Raises ValueError for any other text."""
    fields = [part.split() for part in text.split(";")]
    return tuple(ProductChoice(int(rows), way, tuple(map(int, tiling))) for rows, way, *tiling in fields)


@torch.library.custom_op("bough::product", mutates_args=())
def product(x: Tensor, weight: Tensor, bias: Tensor | None, choices: str) -> Tensor:
    """x [..., K] times weight [N, K] plus bias, by the first choice for that many rows or more, else by torch.

    It is one operator for any number of rows, so that compiled code does not depend on their number.
    """
    rows = x.numel() // x.shape[-1]
    choice = next((each for each in read_choices(choices) if rows <= each.rows), None)
    return F.linear(x, weight, bias) if choice is None else multiply(x, weight, bias, choice)


@product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, choices: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, choice: ProductChoice) -> Tensor:
    """x [..., K] times weight [N, K] plus bias, computed as the choice says."""
    if choice.tiling:
        from bough.engines.torch.pooled.products import kernels

        kernel = kernels.multiply_one_row if choice.way == "one_row" else kernels.multiply_few_rows
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return kernel(rows, weight, bias, *choice.tiling).view(*x.shape[:-1], weight.shape[0])
    if not x.is_cuda:
        return F.linear(x, weight, bias)
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(choice.way)  # of the process: products of other threads may see it too
    try:
        return F.linear(x, weight, bias)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _compute(x: Tensor, weight: Tensor, bias: Tensor | None, choices: str) -> Tensor:
    return product(x, weight, bias, choices) if choices else F.linear(x, weight, bias)


class ChosenLinear(nn.Linear):
    """A linear layer whose product follows choices."""

    choices: str = ""

    def forward(self, x: Tensor) -> Tensor:
        return _compute(x, self.weight, self.bias, self.choices)


@dataclass(frozen=True)
class _Parts:
    """The product of a joined weight with an input, and the layers that have not taken their part yet."""

    x: Tensor
    parts: tuple[Tensor, ...]
    left: tuple[int, ...]


class _Latest(threading.local):
    """The latest product of a joined layer in this thread; None when all its parts were taken."""

    def __init__(self) -> None:  # once in each thread
        self.value: _Parts | None = None

    def __reduce__(self) -> tuple[type[_Latest], tuple[()]]:
        return _Latest, ()  # a copy of a model starts with nothing


class JoinedLinear(nn.Module):
    """The first of several linear layers with one input. It owns the weights of all."""

    choices: str = ""
    joined_weight: nn.Parameter
    joined_bias: nn.Parameter | None

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.joined_weight = nn.Parameter(torch.cat([each.weight.data for each in linears]), requires_grad=False)
        bias = None if linears[0].bias is None else torch.cat([each.bias.data for each in linears])
        self.joined_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.sizes = [each.out_features for each in linears]
        self.in_features, self.out_features = linears[0].in_features, linears[0].out_features
        self.latest = _Latest()

    def forward(self, x: Tensor) -> Tensor:
        return self.take(x, 0)

    def take(self, x: Tensor, index: int) -> Tensor:
        """The product of one of the layers: a part of the latest one, if that has the same input, else of a new one.

        A part is taken once, so that a tensor that was overwritten between two calls never gets its earlier product.
        """
        latest = self.latest.value
        if latest is None or latest.x is not x or index not in latest.left:
            y = _compute(x, self.joined_weight, self.joined_bias, self.choices)
            latest = _Parts(x, torch.split(y, self.sizes, dim=-1), tuple(range(len(self.sizes))))
        left = tuple(each for each in latest.left if each != index)
        self.latest.value = _Parts(x, latest.parts, left) if left else None
        return latest.parts[index]

    def weight_of(self, index: int) -> Tensor:
        return torch.split(self.joined_weight, self.sizes)[index]

    def bias_of(self, index: int) -> Tensor | None:
        return None if self.joined_bias is None else torch.split(self.joined_bias, self.sizes)[index]

    @property
    def weight(self) -> Tensor:
        return self.weight_of(0)

    @property
    def bias(self) -> Tensor | None:
        return self.bias_of(0)


class LaterLinear(nn.Module):
    """Another linear layer of a `JoinedLinear`."""

    first: JoinedLinear

    def __init__(self, first: JoinedLinear, index: int) -> None:
        super().__init__()
        self.__dict__["first"] = first  # not a child: the weight has one owner
        self.index = index
        self.in_features, self.out_features = first.in_features, first.sizes[index]

    def forward(self, x: Tensor) -> Tensor:
        return self.first.take(x, self.index)

    @property
    def weight(self) -> Tensor:
        return self.first.weight_of(self.index)

    @property
    def bias(self) -> Tensor | None:
        return self.first.bias_of(self.index)


Product: TypeAlias = ChosenLinear | JoinedLinear


def join_products(model: nn.Module) -> int:
    """Join the linear layers that have one input, and make all others take choices; returns how many were joined.

    A weight that is tied, has another type than its neighbours, or belongs to a layer of another class or with hooks, is
    not changed. The weights of one family at a time are in memory twice.
    """
    owners = Counter(parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False))
    joined = waste_bytes = 0
    for parent in list(model.modules()):
        for names in _FAMILIES:
            linears: list[Any] = [getattr(parent, name, None) for name in names]
            if not _can_join(linears, owners):
                continue
            first = JoinedLinear(linears)
            setattr(parent, names[0], first)
            for index, name in enumerate(names[1:], 1):
                setattr(parent, name, LaterLinear(first, index))
            joined, waste_bytes = joined + len(names), waste_bytes + first.joined_weight.nbytes
            if waste_bytes >= _RELEASE_AFTER_BYTES and first.joined_weight.is_cuda:
                del linears
                torch.cuda.empty_cache()
                waste_bytes = 0
    for module in model.modules():
        if _is_plain(module):
            module.__class__ = ChosenLinear
    return joined


def list_products(model: nn.Module) -> Iterator[tuple[Product, Tensor, Tensor | None]]:
    """Each module that takes choices, with the weight [N, K] and the bias of its product."""
    for module in model.modules():
        if isinstance(module, JoinedLinear):
            yield module, module.joined_weight, module.joined_bias
        elif isinstance(module, ChosenLinear):
            yield module, module.weight, module.bias


def _can_join(linears: list[Any], owners: Counter[int]) -> bool:
    if not all(_is_plain(each) and owners[each.weight.data_ptr()] == 1 for each in linears):
        return False
    alike = {(each.in_features, each.weight.dtype, each.weight.device, each.bias is None) for each in linears}
    return len(alike) == 1


def _is_plain(module: object) -> bool:
    """Whether a module is torch's own linear layer, without hooks and with its class's forward."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return module.weight.is_floating_point() and not any(getattr(module, name, None) for name in _HOOKS)
