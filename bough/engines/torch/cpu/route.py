"""How a model runs on a CPU: which weights stay packed, and which kernels compute with them.

`choose_weights` reads the settings. Without kernels, or on another device, there is no packing, and the model runs in
torch's own operations as it does everywhere; the reason is kept for `bough show`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bough.config import Settings
from bough.engines.torch.cpu.library import load_kernels
from bough.engines.torch.cpu.packing import Packing, packed_weights
from bough.engines.torch.cpu.step import WholeStep
from bough.engines.torch.cpu.structure import read_structure
from bough.engines.torch.cpu.weight import Products
from bough.engines.torch.device import dtype_of
from bough.engines.torch.layout import TorchLayout
from bough.errors import KernelsMissing, SettingsError

_QUANTIZED = {"q8_0": "Q8_0", "q4_0": "Q4_0"}
_TERMS = {"exact": 2, "int8": 1}  # of eight bits, that an activation has beside packed weights


@dataclass(frozen=True)
class WeightsChoice:
    """The kernels and the packing for one model, or why there are none.

    `setting` is the value that led here. `quantization` names a lossy type that the user asked for.
    """

    packing: Packing | None = None
    setting: str = "auto"
    why_not: str = ""
    quantization: str = ""

    @property
    def products(self) -> Products:
        assert self.packing is not None, "the model runs without kernels"
        return self.packing.products

    @property
    def title(self) -> str:
        """The kernels as people call them."""
        return self.products.kernels.title

    @property
    def numerics(self) -> str:
        """What makes this another model than the float32 one, for its fingerprint and for people; "" if nothing does."""
        return ", ".join(filter(None, [self.quantization, "int8 activations" if self.rounds_activations else ""]))

    def choose_rows(self, kv: str, layout: TorchLayout, model: Any) -> str:
        """The type in which the whole step keeps rows, by the setting `kv`; "" is the model's own.

        "auto" is 16 bits beside weights of 16 bits or fewer: beside those of float32 they would be the coarsest part.
        """
        if kv != "auto":
            return "" if kv == layout.kv else kv
        return "float16" if any(each.matrix.type != "F32" for each in packed_weights(model)) else ""

    @property
    def rounds_activations(self) -> bool:
        """Whether activations have so few bits that logits move as in half precision: another model, in effect."""
        return self.packing is not None and self.products.terms == 1

    def make_step(self, model: Any, layout: TorchLayout) -> WholeStep:
        """The whole step of a model. Raises UnknownStructure."""
        return WholeStep(read_structure(model, layout), self.products)

    @contextmanager
    def products_in_torch(self, *, rounds_activations: bool = False) -> Iterator[None]:
        """Inside, products with packed weights are computed by torch on the unpacked weights; nothing without kernels."""
        if self.packing is None:
            yield
            return
        self.products.uses_torch, self.products.rounds_in_torch = True, rounds_activations
        try:
            yield
        finally:
            self.products.uses_torch = self.products.rounds_in_torch = False


IN_TORCH = WeightsChoice()
"""Everything in torch's own operations."""


def choose_weights(settings: Settings, device: torch.device, dtype: torch.dtype) -> WeightsChoice:
    """What the setting `weights` means for a model on this device. Raises SettingsError or KernelsMissing."""
    wanted = settings.weights
    if device.type != "cpu" or dtype != torch.float32:
        return _without_kernels(wanted, device, dtype)
    if wanted == "float32":
        return WeightsChoice(why_not="the setting weights is float32")
    try:
        kernels = load_kernels()
    except KernelsMissing as error:
        if wanted != "auto":
            text = f"weights is {wanted!r}, and there are no kernels for this CPU: {error.reason}"
            raise KernelsMissing(text, error.todo) from error
        return WeightsChoice(why_not=f"there are no kernels for this CPU: {error.reason}")
    products = Products(kernels, torch.get_num_threads(), terms=_TERMS[settings.activations])
    quantized = _QUANTIZED.get(wanted, "")
    return WeightsChoice(Packing(products, quantized), wanted, quantization=wanted if quantized else "")


def count_parameters(model: Any) -> int:
    """The number of weights of a model, packed or not, each once."""
    return int(sum({id(each): each.numel() for each in [*model.parameters(), *packed_weights(model)]}.values()))


def describe_weights(model: Any, choice: WeightsChoice) -> str:
    """How the weights are kept, for people: "packed: Q4_1, Q8_0 (105 MB)", or why they are not."""
    packed = packed_weights(model)
    if not packed:
        kept = choice.quantization or _name(dtype_of(model))
        why_not = choice.why_not or ("as in its files" if choice.packing is not None else "")
        return f"{kept} ({why_not})" if why_not else kept
    types = sorted({each.matrix.type for each in packed})
    megabytes = sum(each.nbytes for each in packed) / 1e6
    kept = "quantized" if choice.quantization else "packed"
    return f"{kept}: {', '.join(types)} ({megabytes:,.0f} MB)"


def require_packed(model: Any, choice: WeightsChoice) -> None:
    """Raise SettingsError if the user asked for packed weights, and the model's files have none."""
    if choice.packing is not None and choice.setting == "packed" and not packed_weights(model):
        raise SettingsError(
            "weights is 'packed', and no weight in the model's files is packed or has 16 bits: auto runs it in float32, "
            "q8_0 and q4_0 quantize it"
        )


def _without_kernels(wanted: str, device: torch.device, dtype: torch.dtype) -> WeightsChoice:
    """On a GPU there is nothing to explain: its products are faster than those of any CPU."""
    if wanted not in ("auto", "float32"):
        raise SettingsError(f"weights is {wanted!r}, which needs the CPU and float32: this is {device} in {_name(dtype)}")
    return WeightsChoice(
        why_not=f"packed weights need float32, and dtype is {_name(dtype)}" if device.type == "cpu" else ""
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
