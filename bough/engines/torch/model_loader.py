"""From a folder to a model that is ready to run.

The fast way builds the model without allocating its weights and puts the tensors of the safetensors files in place. Where
names, shapes or types do not match, or the family needs more than that, transformers' own loading is used. The weights of
a GGUF file stay packed on a CPU that has kernels, and are else unpacked one by one where they are used: there is never a
float copy of them beside the model. A weight that no file holds is always an error: a model never runs with random weights.
Only safetensors and GGUF files are read, never a pickle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
from bough.engines.torch.cpu.packing import Packing, install
from bough.engines.torch.cpu.route import WeightsChoice, choose_weights, require_packed
from bough.engines.torch.device import choose_device, choose_dtype
from bough.engines.torch.gguf_rows import unpack_rows
from bough.errors import UnsupportedModel
from bough.models.files import FLOATS_FILE, PACKED_FILE, one_line, quiet_transformers
from bough.models.weights.packed import PackedFile, read_packed
from bough.system.resources import limit_threads

_AUTO_MODEL: Any = AutoModelForCausalLM  # whose results are not typed
_KEPT = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")  # float32 in every 16-bit type, and in float16


@dataclass(frozen=True)
class TorchModel:
    """A model, and how its weights are kept."""

    model: Any
    weights: WeightsChoice


def load_model(folder: Path, settings: Settings, progress: ReportProgress | None = None) -> TorchModel:
    """The causal language model in `folder`, on the device and in the type that the settings ask for."""
    device, dtype, weights = _choose_placement(settings)
    config = read_config(folder, settings.trust_remote_code)
    refuse_other_engines(folder, config)
    packed = read_packed(folder)
    files = require_suffixes(folder, list_weight_files(folder), ".safetensors") if packed is None else []
    if progress:
        progress("reading weights")
    if packed is not None:
        return _finish_model(_load_gguf(folder, packed, config, device, dtype, weights.packing), weights)
    model = _load_fast(files, config, device, dtype, settings.trust_remote_code, weights.packing)
    if model is None:
        options = {"dtype": dtype, "trust_remote_code": settings.trust_remote_code}
        model, info = load_pretrained(_AUTO_MODEL, folder, "model", **options)
        require_filled(folder, info)
        model = model.to(device)
        if weights.packing is not None:
            weights.packing.pack_loaded(model)
    return _finish_model(model, weights)


def _choose_placement(settings: Settings) -> tuple[torch.device, torch.dtype, WeightsChoice]:
    set_threads(settings)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    return device, dtype, choose_weights(settings, device, dtype)


def set_threads(settings: Settings) -> None:
    """Let torch use as many threads as the settings, or else the machine, allow."""
    num_threads = settings.threads or limit_threads(torch.get_num_threads())
    if num_threads != torch.get_num_threads():  # the call alone changes how MKL chooses
        torch.set_num_threads(num_threads)


def _finish_model(model: Any, weights: WeightsChoice) -> TorchModel:
    require_packed(model, weights)
    return TorchModel(prepare(model), weights)


def prepare(model: Any) -> Any:
    """A model for inference only."""
    return model.eval().requires_grad_(False)


def make_random_model(config: dict[str, Any], settings: Settings) -> TorchModel:
    """A model of this transformers configuration, built on the device; the same random weights every time.

    `bough bench --shape` measures sizes with it that would take long to download.
    """
    device, dtype, weights = _choose_placement(settings)
    torch.manual_seed(0)
    shape = AutoConfig.for_model(**config)
    with torch.device(device):
        model = _AUTO_MODEL.from_config(shape, dtype=dtype)
    if weights.packing is not None and weights.packing.quantized:
        weights.packing.pack_loaded(model)
    return _finish_model(model, weights)


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """The model's transformers configuration. Raises ModelError if there is none, UnsupportedModel if it is unknown."""
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
    if any(folder.glob("*.gguf")) and not list_weight_files(folder) and not (folder / PACKED_FILE).is_file():
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
        model = _build_weightless(config, dtype, trust_remote_code=trust_remote_code)
    except Exception:  # transformers' own loading reports the error
        return None
    if dtype != torch.float32 and any(_names_kept_float32(model, _KEPT)):
        return None
    return _assign(model, _read_weights(files, device), device, packing)


def _read_weights(files: list[Path], device: torch.device) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file, device=str(device))
        except Exception as error:  # safetensors has an exception type of its own, and passes others through
            raise UnsupportedModel(f"{file} cannot be read: {one_line(error)}") from error
    return weights


def _assign(model: Any, weights: dict[str, Tensor], device: torch.device, packing: Packing | None) -> Any | None:
    wanted = model.state_dict()
    if any(name not in wanted or wanted[name].shape != tensor.shape for name, tensor in weights.items()):
        return None
    names = set(weights)
    packed = packing.take(model, weights) if packing is not None else {}
    typed = {name: tensor.to(wanted[name].dtype) for name, tensor in weights.items()}
    model.load_state_dict(typed, strict=False, assign=True)
    model.tie_weights()
    install(model, packed)
    if any(each.is_meta for each in model.parameters()) or not _buffers_of(model) <= names:
        return None
    return model.to(device)


def _load_gguf(
    folder: Path, table: PackedFile, config: Any, device: torch.device, dtype: torch.dtype, packing: Packing | None
) -> Any:
    """The model whose weights are rows of a GGUF file and the small floats beside the table."""
    try:
        model = _build_weightless(config, dtype)
    except Exception as error:  # transformers may raise anything
        raise UnsupportedModel(f"transformers cannot build the model in {folder}: {one_line(error)}") from error
    wanted = dict(model.state_dict(keep_vars=True))
    floats = _read_weights([folder / FLOATS_FILE], torch.device("cpu"))
    _require_fit(folder, {name: tuple(each.shape) for name, each in wanted.items()}, table, floats)
    rows = {id(wanted[name]): name for name in table.tensors if name not in floats}  # each once, under one of its names
    packed = packing.pack_rows(model, table, set(rows.values())) if packing is not None else {}
    dtypes = _choose_dtypes(model, wanted, dtype)
    values = {name: each.to(device, dtypes[name]) for name, each in floats.items()}
    for name in set(rows.values()) - set(packed):
        values[name] = torch.empty(table.tensors[name].shape, dtype=dtypes[name], device=device)
        unpack_rows(table, table.tensors[name], values[name])
    model.load_state_dict(values, strict=False, assign=True)
    model.tie_weights()
    install(model, packed)
    missing = [name for name, each in model.named_parameters() if each.is_meta]
    missing += sorted(_buffers_of(model) - set(values))
    if missing:
        raise UnsupportedModel(f"the table in {folder} lacks {len(missing)} weights, such as {missing[0]}")
    return model.to(device)


def _require_fit(
    folder: Path, wanted: Mapping[str, tuple[int, ...]], table: PackedFile, floats: Mapping[str, Tensor]
) -> None:
    found = {name: each.shape for name, each in table.tensors.items()}
    found |= {name: tuple(each.shape) for name, each in floats.items()}
    wrong = sorted(name for name, shape in found.items() if wanted.get(name) != shape)
    if wrong:
        raise UnsupportedModel(
            f"{len(wrong)} weights in {folder} are not those of the model, such as {wrong[0]} of the shape "
            f"{list(found[wrong[0]])} instead of {list(wanted.get(wrong[0], ()))}"
        )


def _choose_dtypes(model: Any, wanted: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The type of each weight. Families keep some modules in float32 where transformers loads the others in 16 bits."""
    kept = set(_names_kept_float32(model, _KEPT if dtype == torch.float16 else _KEPT[:1]))
    is_kept = re.compile("|".join(rf"((^|\.){re.escape(each)}($|\.))" for each in sorted(kept)) or "$^")
    return {name: torch.float32 if is_kept.search(name) else each.dtype for name, each in wanted.items()}


def _names_kept_float32(model: Any, attributes: Sequence[str]) -> Iterator[str]:
    for module in model.modules():
        for attribute in attributes:
            yield from getattr(module, attribute, None) or ()


def _buffers_of(model: Any) -> set[str]:
    """The buffers that a checkpoint must hold."""
    return set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _build_weightless(config: Any, dtype: torch.dtype, **options: Any) -> Any:
    """The model, whose parameters have a shape and no memory; buffers are computed as always."""
    register = nn.Module.register_parameter

    def register_shape(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # no function that draws numbers runs on it
        register(module, name, parameter)

    nn.Module.register_parameter = register_shape  # type: ignore[method-assign, assignment]
    try:
        with guard_torch_init_functions():
            return _AUTO_MODEL.from_config(config, dtype=dtype, **options)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_pretrained(auto_model: Any, folder: Path, kind: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model by transformers' own loading, and its report for `require_filled`."""
    options |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with quiet_transformers():
            model, info = auto_model.from_pretrained(folder, **options)
            return model, info
    except Exception as error:  # transformers and the family's code may raise anything
        raise UnsupportedModel(f"transformers cannot load the {kind} in {folder}: {one_line(error)}") from error


def require_filled(folder: Path, info: dict[str, Any]) -> None:
    """Raise UnsupportedModel if a weight of the model is missing in the files, or has another shape there."""
    problem = ""
    if misshapen := sorted(info.get("mismatched_keys", ())):
        name, found, wanted = misshapen[0]
        problem = f"{len(misshapen)} of another shape, such as {name} with {list(found)} instead of {list(wanted)}"
    elif missing := sorted(info.get("missing_keys", ())):
        problem = f"{len(missing)} are missing, such as {missing[0]}"
    if problem:
        raise UnsupportedModel(f"the weights in {folder} do not fill the model: {problem}")
