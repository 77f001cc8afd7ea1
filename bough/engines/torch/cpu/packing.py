"""Which weights of a model stay packed, and puts them into its modules.

Packed are the weights of linear layers and embeddings, and the experts of a mixture. They come from the blocks of a GGUF
file that a converted model names, from 16-bit safetensors as they are, or, only if the user asks for it, from float weights
that are quantized now. What was packed exactly is the same model as in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bough.engines.torch.cpu.matrix import TYPES, Matrix, map_file
from bough.engines.torch.cpu.weight import PackedWeight, Products
from bough.models.weights.packed import PackedFile, read_packed

_EXPERTS = ("gate_up_proj", "down_proj")
_EXACT = {torch.bfloat16, torch.float16}
_BLOCK = 32  # columns of the blocks that a float model can be quantized to


@dataclass(frozen=True)
class Packing:
    """How weights are packed at load. `quantized` is the ggml type that linear layers become; "" packs exactly."""

    products: Products
    quantized: str = ""

    def take(self, model: nn.Module, weights: MutableMapping[str, Tensor], folder: Path | None) -> dict[str, PackedWeight]:
        """Take the weights that can stay packed out of `weights`; returns them by name. `folder` may hold their blocks."""
        table = read_packed(folder) if folder is not None and not self.quantized else None
        blocks = _Blocks(table) if table is not None else None
        found: dict[str, PackedWeight] = {}
        for name, module in _find_packable(model):
            tensor = weights.get(name)
            matrix = self._pack(name, module, tensor, blocks) if tensor is not None else None
            if matrix is not None:
                found[name] = PackedWeight(matrix, weights.pop(name).shape, self.products)
        return found

    def pack_loaded(self, model: nn.Module, folder: Path | None = None) -> None:
        """Pack the weights of a model in float32: where that is exact, or all if they are to be quantized."""
        loaded = {name: model.get_parameter(name).data for name, _ in _find_packable(model)}
        narrow = {name: _narrowest(tensor) for name, tensor in loaded.items()}
        install(model, self.take(model, narrow, folder))

    def _pack(self, name: str, module: nn.Module, tensor: Tensor, blocks: _Blocks | None) -> Matrix | None:
        if self.quantized:
            return _quantize(tensor, "Q8_0" if _is_embedding_or_head(name, module) else self.quantized)
        if blocks is not None and name in blocks:
            return blocks.find(name, tensor)
        return Matrix.of_tensor(tensor.contiguous()) if tensor.dtype in _EXACT else None


class _Blocks:
    """The weights of a converted model in its GGUF file, which is mapped, not read."""

    def __init__(self, table: PackedFile) -> None:
        self._tensors = table.tensors
        self._file = map_file(table.path, table.num_bytes)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def find(self, name: str, tensor: Tensor) -> Matrix | None:
        known = self._tensors[name]
        is_fit = known.shape == tuple(tensor.shape) and known.type in TYPES
        return Matrix.of_file(self._file, known) if is_fit else None


def install(model: nn.Module, packed: Mapping[str, PackedWeight]) -> None:
    """Put packed weights into the modules they belong to, and into those that are tied to them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_parameter = {id(parameters[name]): weight for name, weight in packed.items()}
    for name, parameter in parameters.items():
        weight = by_parameter.get(id(parameter))
        if weight is not None:
            module_name, _, attribute = name.rpartition(".")
            module = model.get_submodule(module_name)
            del module._parameters[attribute]
            setattr(module, attribute, weight)
    choose_experts: Any = getattr(model, "set_experts_implementation", None)
    if choose_experts and any(weight.ndim == 3 for weight in packed.values()):
        choose_experts("eager")  # one expert after the other: other ways take all of them, unpacked at every step


def packed_weights(model: nn.Module) -> list[PackedWeight]:
    """Every packed weight in a model, each once."""
    found = {
        id(each): each for module in model.modules() for each in vars(module).values() if isinstance(each, PackedWeight)
    }
    return list(found.values())


def _find_packable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The names of the weights that may be packed, and their modules."""
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            yield f"{prefix}.weight", module
        for name in _EXPERTS:
            parameter = module._parameters.get(name)
            if parameter is not None and parameter.ndim == 3:
                yield f"{prefix}.{name}", module


def _is_embedding_or_head(name: str, module: nn.Module) -> bool:
    """There a coarser type costs much quality and saves little."""
    return isinstance(module, nn.Embedding) or name == "lm_head.weight"


def _narrowest(tensor: Tensor) -> Tensor:
    """The same weights in 16 bits if no bit is lost, as where the file had them so."""
    for dtype in sorted(_EXACT, key=str) if tensor.dtype == torch.float32 else ():
        narrow = tensor.to(dtype)
        if torch.equal(narrow.float(), tensor):
            return narrow
    return tensor


def _quantize(tensor: Tensor, type_name: str) -> Matrix | None:
    import gguf

    columns = tensor.shape[-1]
    if columns % _BLOCK:
        return None
    values: Any = tensor.float().reshape(-1, columns).numpy()
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name])
    return Matrix.of_blocks(torch.from_numpy(blocks), type_name, columns)
