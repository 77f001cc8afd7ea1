"""A model's weight that stays packed: what stands in the place of a tensor in transformers' modules.

`F.linear` and `F.embedding` with such a weight call our kernels, for any number of rows. Every other operation sees the
float32 tensor that the weight unpacks to, so that code which does something unusual with its weights is slow but right.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.engines.torch.cpu.library import Kernels
from bough.engines.torch.cpu.matrix import Matrix
from bough.engines.torch.cpu.openmp import find_parallel


class Products:
    """Calls the kernels for single products. All packed weights of a model share one.

    With `uses_torch` weights are unpacked and torch computes the product: the self-check's reference.
    """

    def __init__(self, kernels: Kernels, num_threads: int) -> None:
        kernels.share_threads(find_parallel())
        self.kernels = kernels
        self.num_threads = num_threads
        self.uses_torch = False
        self._panels = empty_floats(0)

    def multiply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., columns] by the matrix: [..., rows]."""
        assert x.shape[-1] == matrix.num_columns, f"{list(x.shape)} by {matrix.num_columns} columns"
        x = x.contiguous()
        y = empty_floats(*x.shape[:-1], matrix.num_rows)
        panels = self._reserve(matrix.num_columns)
        num_rows = x.numel() // matrix.num_columns
        struct = matrix.as_struct(bias)
        self.kernels.linear(
            ctypes.addressof(struct), x.data_ptr(), y.data_ptr(), num_rows, panels.data_ptr(), self.num_threads
        )
        return y

    def unpack(self, matrix: Matrix) -> Tensor:
        """The matrix in float32, in memory of its own."""
        out = empty_floats(matrix.num_rows, matrix.num_columns)
        struct = matrix.as_struct()  # must live until the call is over
        self.kernels.unpack(ctypes.addressof(struct), out.data_ptr(), self.num_threads)
        return out

    def gather(self, matrix: Matrix, ids: Tensor) -> Tensor:
        """The rows of these numbers in float32: [..., columns]."""
        ids = ids.to(torch.int64).contiguous()
        _require_in_range(ids, matrix.num_rows)
        out = empty_floats(*ids.shape, matrix.num_columns)
        struct = matrix.as_struct()
        self.kernels.gather(ctypes.addressof(struct), ids.data_ptr(), ids.numel(), out.data_ptr())
        return out

    def _reserve(self, num_columns: int) -> Tensor:
        wanted = self.num_threads * self.kernels.panel_floats(num_columns)
        if self._panels.numel() < wanted:
            self._panels = empty_floats(wanted)
        return self._panels


def empty_floats(*shape: int) -> Tensor:
    """Memory for the kernels to write to, whatever torch's default type and device are in this program."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


class PackedWeight:
    """A weight of two or three axes in a matrix. It is no tensor, and looks like a float32 one."""

    dtype = torch.float32
    device = torch.device("cpu")
    requires_grad = False
    is_meta = False

    def __init__(self, matrix: Matrix, shape: Sequence[int], products: Products) -> None:
        assert math.prod(shape[:-1]) == matrix.num_rows, f"{matrix.num_rows} rows for the shape {tuple(shape)}"
        self.matrix = matrix
        self.shape = torch.Size(shape)
        self._products = products

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def numel(self) -> int:
        return self.shape.numel()

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def unpack(self) -> Tensor:
        """The float32 tensor, in memory of its own."""
        return self._products.unpack(self.matrix).view(self.shape)

    def __getitem__(self, index: Any) -> Any:
        """One expert of a weight of three axes stays packed; anything else is unpacked."""
        if self.ndim == 3 and isinstance(index, int | Tensor) and not (isinstance(index, Tensor) and index.ndim):
            rows, number = self.shape[1], range(len(self))[int(index)]  # counts from the end, and raises, as a tensor does
            return PackedWeight(self.matrix.slice(number * rows, number * rows + rows), self.shape[1:], self._products)
        return self.unpack()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_"):
            raise AttributeError(f"{name}: a packed weight cannot be changed")
        return getattr(self.unpack(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = _HANDLERS.get(func)
        result = known(*args, **kwargs or {}) if known is not None else NotImplemented
        if result is not NotImplemented:
            return result
        plain = [_as_tensor(each) for each in args]
        return func(*plain, **{name: _as_tensor(each) for name, each in (kwargs or {}).items()})

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x by this weight, as `F.linear` computes it."""
        return self._products.multiply(self.matrix, x, bias)

    def embed(self, ids: Tensor) -> Tensor:
        """The rows of these numbers."""
        return self._products.gather(self.matrix, ids)

    @property
    def has_kernel(self) -> bool:
        """Whether products are computed by the kernels, which take matrices only."""
        return not self._products.uses_torch and self.ndim == 2

    def can_multiply(self, x: Any, bias: Any) -> bool:
        """Whether the kernels take these; torch takes the others, or says what is wrong with them."""
        fits = _is_float32(x) and x.shape[-1:] == self.shape[1:]
        return self.has_kernel and fits and (bias is None or (_is_plain(bias) and bias.shape == self.shape[:1]))


def _unpacking(name: str) -> Callable[..., Any]:
    def call(weight: PackedWeight, *others: Any) -> Any:
        return getattr(weight.unpack(), name)(*map(_as_tensor, others))

    return call


_BINARY = [f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "matmul") for side in ("", "r")]
for _operator in ("__neg__", *_BINARY):  # Python looks for operators in the class, not by `__getattr__`
    setattr(PackedWeight, _operator, _unpacking(_operator))


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, PackedWeight) or not weight.can_multiply(input, bias):
        return NotImplemented
    return weight.linear(input, bias)


def _embedding(input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A padding index changes gradients only."""
    if not isinstance(weight, PackedWeight) or not weight.has_kernel or max_norm is not None:
        return NotImplemented
    return weight.embed(input)


_HANDLERS: dict[Any, Callable[..., Any]] = {F.linear: _linear, F.embedding: _embedding}


def _is_plain(bias: Tensor) -> bool:
    return _is_float32(bias) and bias.is_contiguous()


def _is_float32(value: Any) -> bool:
    """Whether the kernels can read it: they check nothing, so what they cannot read goes to torch."""
    return isinstance(value, Tensor) and value.dtype == torch.float32 and value.device.type == "cpu"


def _as_tensor(value: Any) -> Any:
    if isinstance(value, PackedWeight):
        return value.unpack()
    if isinstance(value, list | tuple) and any(isinstance(each, PackedWeight) for each in value):
        return type(value)(_as_tensor(each) for each in value)
    return value


def _require_in_range(ids: Tensor, num_rows: int) -> None:
    if not ids.numel():
        return
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0 or largest >= num_rows:
        raise IndexError(f"token ids from {smallest} to {largest}, and the embedding has {num_rows} rows")
