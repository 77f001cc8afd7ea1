"""Decoder layers compiled once for all layers of a kind.

Compiling a whole model takes minutes, and again for each length. A layer is compiled in seconds, and its code serves all
layers of its kind: one graph for any number of lanes, a second for a single lane, a third for runs of tokens.

Always true:
- a thread uses compiled code only inside `CompiledLayers.use`; other threads are not affected;
- no cache and no layer number reach compiled code: either would need a graph for each layer.

Guards tell dynamo which graph fits, and they see the grad mode: compile and run both under `torch.inference_mode`.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Cache

from bough.system.folders import why_not_writable

_MOST_GRAPHS = 64  # of one class: kinds of layers times three, for each model of that class in this process
_BY_LENGTH = {"dynamic", "longrope"}  # rotary embeddings whose frequencies depend on positions, which the host reads
_ROW_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_WORDS_OF_EXPERTS = ("expert", "moe", "sparse")
_HOST_READS = ("nonzero(", ".tolist()", ".item()")
_CAPTURED_EXPERTS = "grouped_mm"

Forward = Callable[..., Any]


class _Use(threading.local):
    is_on = False

    def __reduce__(self) -> tuple[type[_Use], tuple[()]]:
        return _Use, ()


class _Switch:
    """The forward of one module: compiled code in threads that use it, else its class's own."""

    def __init__(self, module: nn.Module, compiled: Forward, use: _Use) -> None:
        self._module = module
        self._compiled = compiled
        self._use = use

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._use.is_on:
            return type(self._module).forward(self._module, *args, **kwargs)
        assert not any(isinstance(value, Cache) for value in (*args, *kwargs.values())), "compiled layers take no cache"
        return self._compiled(self._module, *args, **kwargs)


class CompiledLayers:
    """Modules of one model with compiled code, which is made at the first use with inputs of a kind."""

    def __init__(self, modules: Sequence[nn.Module], backend: str | Callable[..., Any]) -> None:
        self._modules = list(modules)
        self._use = _Use()
        compiled: dict[type[nn.Module], Forward] = {}
        for module in self._modules:
            kind = type(module)
            if kind not in compiled:
                compiled[kind] = torch.compile(kind.forward, dynamic=True, fullgraph=True, backend=backend)
            module.forward = _Switch(module, compiled[kind], self._use)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Use compiled code in this thread. Raises torch's errors if a layer cannot be compiled."""
        before, self._use.is_on = self._use.is_on, True
        try:
            yield
        finally:
            self._use.is_on = before

    def remove(self) -> None:
        """Restore the modules. Call it when no thread uses them."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules.clear()


@dataclass(frozen=True)
class Decoder:
    """A model's decoder layers, and the module that calls them."""

    parent: nn.Module
    layers: nn.ModuleList


def compile_layers(model: Any, backend: str | Callable[..., Any] = "inductor") -> CompiledLayers:
    """The model's decoder layers, final norm and rotary embedding, to be compiled at first use. Check `why_not` before."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    decoder = find_decoder(model)
    assert decoder is not None
    beside = [module for module in decoder.parent.children() if _is_fit_beside_layers(module)]
    return CompiledLayers([*decoder.layers, *beside], backend)


def why_not(model: Any) -> str:
    """Why the layers of this model cannot be compiled, for people; "" if they can."""
    decoder = find_decoder(model)
    if decoder is None:
        return f"{type(model).__name__} has no list of decoder layers that is known"
    recurrent = _count_recurrent(model, decoder.layers)
    if recurrent:
        return f"{recurrent} of {len(decoder.layers)} layers keep a recurrent state"
    if any("forward" in vars(layer) for layer in decoder.layers):
        return "the layers' forward was replaced"
    return next(filter(None, map(_why_not_experts, decoder.layers.modules())), "")


def find_decoder(model: Any) -> Decoder | None:
    """The one list with as many layers as the configuration says, each with modules that know their layer's number."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    found = [
        Decoder(parent, child)
        for parent in model.modules()
        for child in parent.children()
        if isinstance(child, nn.ModuleList) and len(child) == count and all(map(_is_numbered, child))
    ]
    return found[0] if len(found) == 1 else None


def prepare_experts(model: Any) -> Callable[[], None]:
    """Compute experts by grouped products, which can be traced and captured; returns a function that undoes it.

    Does nothing to a model without experts, or whose experts transformers cannot switch.
    """
    if not any(map(_can_switch_experts, model.modules())):
        return lambda: None
    before = model.get_experts_implementation()
    model.set_experts_implementation(_CAPTURED_EXPERTS)
    return lambda: model.set_experts_implementation(before)


def keep_compile_cache(folder: Path) -> str:
    """Keep compiled code in this folder, unless the environment names others; returns why that is not possible, or "".

    Call it before anything is compiled. Only the user can access the folder, because torch runs the code in it.
    """
    problem = why_not_writable(folder)
    if problem:
        return f"compiled code is not kept: {folder} cannot be written: {problem}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    return ""


def _is_numbered(layer: nn.Module) -> bool:
    return any(hasattr(module, "layer_idx") for module in layer.modules())


def _count_recurrent(model: Any, layers: nn.ModuleList) -> int:
    """How many layers have a recurrent state: by the configuration, or because they contain a convolution."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ["full_attention"] * len(layers)
    convolves = (any(isinstance(module, nn.Conv1d) for module in layer.modules()) for layer in layers)
    return sum(kind not in _ROW_LAYERS or convolved for kind, convolved in zip(kinds, convolves, strict=True))


def _is_fit_beside_layers(module: nn.Module) -> bool:
    """Norms and rotary embeddings of transformers; torch's own norms are one kernel already."""
    name = type(module).__name__
    if "Rotary" in name:
        kinds = getattr(module, "rope_type", "default")
        return not _BY_LENGTH & set(kinds.values() if isinstance(kinds, dict) else [kinds])
    return "Norm" in name and not type(module).__module__.startswith("torch.")


def _can_switch_experts(module: nn.Module) -> bool:
    """Whether transformers' choice of an experts implementation reaches this module."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "config")


def _why_not_experts(module: Any) -> str:
    name = type(module).__name__
    if not _can_switch_experts(module):
        has_experts = any(word in name.lower() for word in _WORDS_OF_EXPERTS)
        is_read = has_experts and _reads_on_host(type(module).forward)
        return f"{name} reads on the host which experts are chosen" if is_read else ""
    implementation = module.config._experts_implementation
    if implementation != _CAPTURED_EXPERTS:
        return f"{name} computes its experts in the way {implementation!r}, not {_CAPTURED_EXPERTS!r}"
    weight = next(module.parameters())
    if weight.is_cuda and weight.dtype != torch.bfloat16:
        return f"grouped products of experts are compiled in bfloat16 only, and {name} has {weight.dtype}"
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return "grouped products of experts need compute capability 8"
    return ""


def _reads_on_host(forward: Forward) -> bool:
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return False
    return any(call in source for call in _HOST_READS)
