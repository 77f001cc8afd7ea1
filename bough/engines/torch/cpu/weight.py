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

from bough.engines.torch.cpu.library import TYPES, Kernels, find_parallel
from bough.engines.torch.cpu.matrix import PANEL_ROWS, Matrix, PanelMemory
from bough.models.weights.packed import row_bytes

ReadRows = Callable[[int, int], Tensor]
"""Returns rows [first, last) of a weight as bytes [rows, bytes of a row]."""

_READ_BYTES = 8 * 2**20  # of a file at a time
_UNPACKED_FLOATS = 4 * 2**20  # at a time
_BLOCK_COLUMNS = 32
_LARGEST_ACTIVATIONS = {1: 127, 2: 127 * 256}  # of a block, in whole steps, by the number of terms


class Products:
    """Calls the kernels for single products. All packed weights of a model share one.

    With `uses_torch` torch computes the products with the unpacked weights: the self-check's reference. With
    `rounds_in_torch`, too, activations are rounded before as the kernels round them.
    """

    def __init__(self, kernels: Kernels, num_threads: int, terms: int = 2) -> None:
        """`terms` is how many terms of eight bits an activation has beside block types: 2 is exact, 1 is coarse."""
        kernels.share_threads(find_parallel())
        self.kernels = kernels
        self.num_threads = num_threads
        self.terms = terms
        self.uses_torch = self.rounds_in_torch = False
        self._work = empty_floats(0)

    def panels_bytes(self, type_name: str, num_rows: int, num_columns: int) -> int:
        """Bytes of the panels of a weight of a block type."""
        return int(self.kernels.panels_bytes(TYPES[type_name], num_rows, num_columns))

    def pack(
        self, type_name: str, num_rows: int, num_columns: int, read_rows: ReadRows, memory: PanelMemory | None = None
    ) -> Matrix:
        """Read a weight of a block type and turn it into panels, a few rows at a time: little more memory is needed."""
        stride, size = self.panels_bytes(type_name, PANEL_ROWS, num_columns), row_bytes(type_name, num_columns)
        total = self.panels_bytes(type_name, num_rows, num_columns)
        matrix = Matrix(type_name, num_rows, num_columns, (memory or PanelMemory([total])).take(total), 0, stride)
        some = max(1, _READ_BYTES // size // PANEL_ROWS) * PANEL_ROWS
        for first in range(0, num_rows, some):
            part = matrix.slice(first, min(first + some, num_rows))
            rows = read_rows(first, first + part.num_rows).contiguous()
            assert rows.shape == (part.num_rows, size), f"{list(rows.shape)} for {part.num_rows} rows of {size} bytes"
            struct = part.as_struct()
            struct.stride = size  # of the rows that are read
            self.kernels.pack(ctypes.addressof(struct), rows.data_ptr(), self.num_threads)
        return matrix

    def multiply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., columns] by the matrix: [..., rows]."""
        assert x.shape[-1] == matrix.num_columns, f"{list(x.shape)} by {matrix.num_columns} columns"
        if self.uses_torch:
            return self._multiply_in_torch(matrix, x, bias)
        x = x.contiguous()
        y = empty_floats(*x.shape[:-1], matrix.num_rows)
        num_rows = x.numel() // matrix.num_columns
        struct = matrix.as_struct(bias)
        address = ctypes.addressof(struct)
        work = self._reserve(int(self.kernels.linear_floats(address, num_rows, self.num_threads)))
        self.kernels.linear(address, x.data_ptr(), y.data_ptr(), num_rows, self.terms, work.data_ptr(), self.num_threads)
        return y

    def _multiply_in_torch(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Unpacks some rows at a time into the same memory: there is never a float copy of a large matrix."""
        if self.rounds_in_torch and matrix.is_panels:
            x = _round_activations(x, _LARGEST_ACTIVATIONS[self.terms])
        some = max(1, _UNPACKED_FLOATS // matrix.num_columns // PANEL_ROWS) * PANEL_ROWS
        memory, y = self._reserve(some * matrix.num_columns), empty_floats(*x.shape[:-1], matrix.num_rows)
        for first in range(0, matrix.num_rows, some):
            part = matrix.slice(first, min(first + some, matrix.num_rows))
            unpacked = memory[: part.num_rows * part.num_columns].view(part.num_rows, part.num_columns)
            self._unpack_to(unpacked, part)
            y[..., first : first + part.num_rows] = F.linear(x, unpacked)
        return y if bias is None else y + bias

    def unpack(self, matrix: Matrix) -> Tensor:
        """The matrix in float32, in memory of its own."""
        out = empty_floats(matrix.num_rows, matrix.num_columns)
        self._unpack_to(out, matrix)
        return out

    def _unpack_to(self, out: Tensor, matrix: Matrix) -> None:
        struct = matrix.as_struct()  # must live until the call is over
        self.kernels.unpack(ctypes.addressof(struct), out.data_ptr(), self.num_threads)

    def gather(self, matrix: Matrix, ids: Tensor) -> Tensor:
        """The rows of these numbers in float32: [..., columns]."""
        ids = ids.to(torch.int64).contiguous()
        _require_in_range(ids, matrix.num_rows)
        out = empty_floats(*ids.shape, matrix.num_columns)
        struct = matrix.as_struct()
        self.kernels.gather(ctypes.addressof(struct), ids.data_ptr(), ids.numel(), out.data_ptr())
        return out

    def _reserve(self, num_floats: int) -> Tensor:
        if self._work.numel() < num_floats:
            self._work = empty_floats(num_floats)
        return self._work


def _round_activations(x: Tensor, largest: int) -> Tensor:
    """Each block of columns as whole steps of its largest number, which is `largest` steps."""
    blocks = x.reshape(*x.shape[:-1], -1, _BLOCK_COLUMNS)
    steps = blocks.abs().amax(-1, keepdim=True) / largest
    return torch.where(steps > 0, (blocks / steps).round() * steps, blocks).flatten(-2)


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
    def is_matrix(self) -> bool:
        """Whether products and rows of it are computed without unpacking: not for experts, which are taken one by one."""
        return self.ndim == 2

    def can_multiply(self, x: Any, bias: Any) -> bool:
        """Whether `linear` takes these; torch takes the others, or says what is wrong with them."""
        fits = _is_float32(x) and x.shape[-1:] == self.shape[1:]
        return self.is_matrix and fits and (bias is None or (_is_plain(bias) and bias.shape == self.shape[:1]))


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
    if not isinstance(weight, PackedWeight) or not weight.is_matrix or max_norm is not None:
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
