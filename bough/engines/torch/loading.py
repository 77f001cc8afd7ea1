"""From a folder to a model that is ready to run.

The fast way builds the model without allocating its weights and puts the tensors of the safetensors files in place. Where
names, shapes or types do not line up, or the family wants more than that, transformers' own loading is used. Either way a
weight that no file holds is an error: a model never runs with random weights. Only safetensors are read, never a pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import guard_torch_init_functions

from bough.config import Settings
from bough.engines.contract import ReportProgress
from bough.engines.shared.model_folder import hint_at_code, list_weight_files, require_config, require_suffixes
from bough.engines.torch.cpu.int4 import pack_int4
from bough.engines.torch.cpu.packing import Packing, install
from bough.engines.torch.cpu.route import WeightsChoice, choose_weights, require_packed
from bough.engines.torch.device import choose_device, choose_dtype
from bough.errors import SettingsError, UnsupportedModel
from bough.models.files import one_line, quiet_transformers
from bough.system.resources import limit_threads

_AUTO_MODEL: Any = AutoModelForCausalLM  # whose types say nothing about what it returns


@dataclass(frozen=True)
class TorchModel:
    """A model, and how its weights are kept."""

    model: Any
    weights: WeightsChoice


def load_model(folder: Path, settings: Settings, progress: ReportProgress | None = None) -> TorchModel:
    """The causal language model in `folder`, on the device and in the type that the settings ask for."""
    device, dtype, weights = _choose(settings)
    config = read_config(folder, settings.trust_remote_code)
    refuse_other_engines(folder, config)
    files = require_suffixes(folder, list_weight_files(folder), ".safetensors")
    if progress:
        progress("reading weights")
    model = _load_fast(files, config, device, dtype, settings.trust_remote_code, weights.packing)
    if model is None:
        model = _load_by_transformers(folder, device, dtype, settings.trust_remote_code)
        if weights.packing is not None:
            weights.packing.pack_loaded(model, folder)
    return _ready(model, weights)


def choose_weights_here(settings: Settings) -> WeightsChoice:
    """How weights are kept with these settings on this machine. Raises SettingsError or KernelsMissing."""
    device = choose_device(settings.device)
    return choose_weights(settings, device, choose_dtype(settings.dtype, device))


def _choose(settings: Settings) -> tuple[torch.device, torch.dtype, WeightsChoice]:
    set_threads(settings)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    return device, dtype, choose_weights(settings, device, dtype)


def set_threads(settings: Settings) -> None:
    """Let torch compute with as many threads as the settings, or else the machine, allow."""
    num_threads = settings.threads or limit_threads(torch.get_num_threads())
    if num_threads != torch.get_num_threads():  # the call alone changes how MKL chooses
        torch.set_num_threads(num_threads)


def _ready(model: Any, weights: WeightsChoice) -> TorchModel:
    if weights.quantization == "int4" and not pack_int4(model):
        raise SettingsError("weights is 'int4', and torch's product takes the shape of none of the model's linear layers")
    require_packed(model, weights)
    return TorchModel(prepare(model), weights)


def prepare(model: Any) -> Any:
    """A model for inference only."""
    return model.eval().requires_grad_(False)


def make_random_model(config: dict[str, Any], settings: Settings) -> TorchModel:
    """A model of this transformers configuration, built on the device; the same random weights every time.

    `bough bench --shape` measures sizes with it that would take long to download.
    """
    device, dtype, weights = _choose(settings)
    torch.manual_seed(0)
    shape = AutoConfig.for_model(**config)
    with torch.device(device):
        model = _AUTO_MODEL.from_config(shape, dtype=dtype)
    if weights.packing is not None and weights.packing.quantized:
        weights.packing.pack_loaded(model)
    return _ready(model, weights)


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """The model's transformers configuration. Raises ModelError if there is none, UnsupportedModel if it is not known."""
    require_config(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # unknown architectures, broken files and untrusted code raise errors of any type
        hint = hint_at_code(folder, trust_remote_code)
        raise UnsupportedModel(
            f"transformers cannot read the configuration in {folder}: {one_line(error)}{hint}"
        ) from error


def refuse_other_engines(folder: Path, config: Any) -> None:
    """Weights that MLX packed and GGUF files that were not converted need the MLX engine."""
    packing = getattr(config, "quantization", None)
    if isinstance(packing, dict) and "group_size" in packing:
        raise UnsupportedModel(
            f"the weights in {folder} are packed for MLX, in {packing.get('bits')} bits: use the engine mlx, "
            "or the model that they were made of"
        )
    if any(folder.glob("*.gguf")) and not list_weight_files(folder):
        raise UnsupportedModel(
            f"{folder} holds a GGUF file, which only the engine mlx reads as it is: "
            "`bough show --engine torch` with the file or the model's name converts it"
        )


def _load_fast(
    files: list[Path],
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool,
    packing: Packing | None,
) -> Any | None:
    """The model, or None where the files do not match it one to one."""
    if getattr(config, "quantization_config", None):
        return None
    try:
        with _weightless(), guard_torch_init_functions():
            model = _AUTO_MODEL.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception:  # transformers' own loading says what is wrong
        return None
    if dtype != torch.float32 and _keeps_float32(model):
        return None
    weights = _read_weights(files, device)
    return _assign(model, weights, device, packing, files[0].parent) if weights is not None else None


def _read_weights(files: list[Path], device: torch.device) -> dict[str, Tensor] | None:
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file, device=str(device))
        except Exception as error:  # safetensors has an exception type of its own, and passes others through
            raise UnsupportedModel(f"{file} cannot be read: {one_line(error)}") from error
    return weights


def _assign(
    model: Any, weights: dict[str, Tensor], device: torch.device, packing: Packing | None, folder: Path
) -> Any | None:
    wanted = model.state_dict()
    if any(name not in wanted or wanted[name].shape != tensor.shape for name, tensor in weights.items()):
        return None
    names = set(weights)
    packed = packing.take(model, weights, folder) if packing is not None else {}
    typed = {name: tensor.to(wanted[name].dtype) for name, tensor in weights.items()}
    model.load_state_dict(typed, strict=False, assign=True)
    model.tie_weights()
    install(model, packed)
    if any(each.is_meta for each in model.parameters()) or not _buffers_of(model) <= names:
        return None
    return model.to(device)


def _buffers_of(model: Any) -> set[str]:
    """The buffers that a checkpoint must hold."""
    return set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}


@contextmanager
def _weightless() -> Iterator[None]:
    """Parameters that modules make here have a shape and no memory; buffers are computed as always."""
    register = nn.Module.register_parameter

    def register_shape(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # no function that draws numbers runs on it
        register(module, name, parameter)

    nn.Module.register_parameter = register_shape  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _keeps_float32(model: Any) -> bool:
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return any(getattr(module, name, None) for module in model.modules() for name in names)


def _load_by_transformers(folder: Path, device: torch.device, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    try:
        with quiet_transformers():
            model, info = _AUTO_MODEL.from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, in one line
            )
    except Exception as error:  # transformers and the family's code may raise anything
        raise UnsupportedModel(f"transformers cannot load the model in {folder}: {one_line(error)}") from error
    require_filled(folder, info)
    return model.to(device)


def require_filled(folder: Path, info: dict[str, Any]) -> None:
    """Raise UnsupportedModel if a weight of the model is missing in the files, or has another shape there."""
    misshapen = sorted(info.get("mismatched_keys", ()))
    if misshapen:
        name, found, wanted = misshapen[0]
        raise UnsupportedModel(
            f"the weights in {folder} do not fill the model: {len(misshapen)} of another shape, such as {name} with "
            f"{list(found)} instead of {list(wanted)}"
        )
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        raise UnsupportedModel(
            f"the weights in {folder} do not fill the model: {len(missing)} are missing, such as {missing[0]}"
        )
