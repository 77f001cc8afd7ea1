"""Which weights of a model stay packed, and puts them into its modules.

Packed are the weights of linear layers and embeddings, and the experts of a mixture. They come from the blocks of a GGUF
file, from 16-bit safetensors as they are, or, only if the user asks for it, from float weights that are quantized now. What
was packed exactly is the same model as in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bough.engines.torch.cpu.library import BLOCK_TYPES
from bough.engines.torch.cpu.matrix import PANEL_ROWS, Matrix, PanelMemory
from bough.engines.torch.cpu.weight import PackedWeight, Products
from bough.engines.torch.gguf_rows import read_rows, unpack_rows
from bough.models.weights.packed import PackedFile, PackedTensor

_EXPERTS = ("gate_up_proj", "down_proj")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXACT = {torch.bfloat16, torch.float16}
_BLOCK = 32  # columns of the blocks that a float model can be quantized to


@dataclass(frozen=True)
class Packing:
    """How weights are packed at load. `quantized` is the ggml type that linear layers become; "" packs exactly."""

    products: Products
    quantized: str = ""

    def take(self, model: nn.Module, weights: MutableMapping[str, Tensor]) -> dict[str, PackedWeight]:
        """Take the weights that can stay packed out of `weights`; returns them by name."""
        found: dict[str, PackedWeight] = {}
        for name, module in _find_packable(model):
            tensor = weights.get(name)
            matrix = self._pack(name, module, tensor) if tensor is not None else None
            if matrix is not None:
                found[name] = PackedWeight(matrix, weights.pop(name).shape, self.products)
        return found

    def pack_rows(self, model: nn.Module, packed: PackedFile, names: Collection[str]) -> dict[str, PackedWeight]:
        """Those of the named weights of a GGUF file that can stay packed, in memory, by name."""
        chosen = {name: module for name, module in _find_packable(model) if name in names}
        blocks = [packed.tensors[name] for name in chosen if self._stays_in_blocks(packed.tensors[name])]
        memory = PanelMemory(self.products.panels_bytes(each.type, each.num_rows, each.shape[-1]) for each in blocks)
        found: dict[str, PackedWeight] = {}
        for name, module in chosen.items():
            matrix = self._pack_rows(name, module, packed, memory)
            if matrix is not None:
                found[name] = PackedWeight(matrix, packed.tensors[name].shape, self.products)
        return found

    def _pack_rows(self, name: str, module: nn.Module, packed: PackedFile, memory: PanelMemory) -> Matrix | None:
        tensor = packed.tensors[name]
        if self._stays_in_blocks(tensor):
            read = partial(read_rows, packed, tensor)
            return self.products.pack(tensor.type, tensor.num_rows, tensor.shape[-1], read, memory)
        if self.quantized:
            floats = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
            unpack_rows(packed, tensor, floats)
            return self._pack(name, module, floats)
        if tensor.type not in _FLOATS:
            return None
        return Matrix.of_tensor(read_rows(packed, tensor, 0, tensor.num_rows).view(_FLOATS[tensor.type]))

    def _stays_in_blocks(self, tensor: PackedTensor) -> bool:
        return not self.quantized and tensor.type in BLOCK_TYPES and _begins_at_panels(tensor.shape)

    def pack_loaded(self, model: nn.Module) -> None:
        """Pack the weights of a model in float32: where that is exact, or all if they are to be quantized."""
        loaded = {name: model.get_parameter(name).data for name, _ in _find_packable(model)}
        install(model, self.take(model, {name: _narrowest(tensor) for name, tensor in loaded.items()}))

    def _pack(self, name: str, module: nn.Module, tensor: Tensor) -> Matrix | None:
        if self.quantized:
            return self._quantize(tensor, "Q8_0" if _is_embedding_or_head(name, module) else self.quantized)
        return Matrix.of_tensor(tensor.contiguous()) if tensor.dtype in _EXACT else None

    def _quantize(self, tensor: Tensor, type_name: str) -> Matrix | None:
        import gguf

        columns = tensor.shape[-1]
        if columns % _BLOCK or not _begins_at_panels(tensor.shape):
            return None
        values: Any = tensor.float().reshape(-1, columns).numpy()
        blocks = torch.from_numpy(gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name]))
        return self.products.pack(type_name, blocks.shape[0], columns, lambda first, last: blocks[first:last])


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


def _begins_at_panels(shape: Sequence[int]) -> bool:
    """Whether every expert of a weight of three axes begins at a panel, so that each can be taken apart."""
    return len(shape) == 2 or shape[1] % PANEL_ROWS == 0
