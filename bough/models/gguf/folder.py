"""Makes a model folder around a GGUF file: the file itself, and the configuration and tokenizer that it contains.

This is for engines that read GGUF themselves: quantized weights stay small, and torch is not needed. The llama.cpp fields
of the file are translated to a transformers configuration; the engine handles the order of the weights. transformers builds
the tokenizer. Also here, for every folder made from such a file: the parts of its tokenizer that transformers does not
read, its sampling defaults and its type.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.errors import UnsupportedModel
from bough.models.files import CONFIG_FILE, GENERATION_FILE, GGUF_FILE, link_or_copy, read_json
from bough.models.gguf.reading import report_reading
from bough.models.weights.gguf_header import GgufHeader, GgufModel, read_gguf_header
from bough.sampling_params import PARAMETERS
from bough.system.distribution import install_command
from bough.types import Progress

log = logging.getLogger(__name__)

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_READABLE_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K")
_SPECIAL_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
_DIGITS = 6  # of a 32-bit float that are exact

_LLAMA_3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_WITH_START = {"model": ("llama", "bert"), "pre": (*_LLAMA_3, "tekken", "chameleon")}
"""Vocabularies and pre-tokenizers whose prompts begin with a start token unless the file says otherwise."""


@dataclass(frozen=True)
class MadeModel:
    """A model that was made from a file: the number of weights, and their type (`Q4_K_M`, `BF16`, …)."""

    num_parameters: int
    quantization: str
    is_packed: bool = False  # the folder names the file, and needs it


def make_folder(model: GgufModel, folder: Path, progress: Progress) -> MadeModel:
    """Write a folder for the model in `file`, with a hard link to the file, or else a copy.

    Raises UnsupportedModel if the file cannot be read, or has weights that no engine reads from a GGUF file.
    """
    file = model.file
    if len(model.files) > 1:
        raise UnsupportedModel(f"{file.name} is split into {len(model.files)} files: {install_command('torch')} reads them")
    with report_reading(f"Reading {file.name}, once", file, progress):
        _require_readable(model)
        folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps(_config_of(model), indent=2)
        (folder / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")
        _write_tokenizer(model.header, folder)
        save_sampling(model.header, folder)
        link_or_copy(file, folder / GGUF_FILE)
    return MadeModel(model.header.num_parameters, describe_type(model.header))


def _get(model: GgufModel, name: str, default: Any = None) -> Any:
    """A value of this architecture. Raises UnsupportedModel if there is neither a value nor a default."""
    value = model.header.values.get(f"{model.header.architecture}.{name}", default)
    if value is None:
        raise UnsupportedModel(f"{model.file.name} does not say its {name}")
    return value


def _require_readable(model: GgufModel) -> None:
    name, kind = model.file.name, model.header.architecture
    if kind not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{name} holds a model of the architecture {kind!r}; without torch GGUF files of {', '.join(ARCHITECTURES)} "
            f"can be read: {install_command('torch')} to convert others"
        )
    others = sorted({each.type for each in model.header.tensors} - set(_READABLE_TYPES))
    if others:
        raise UnsupportedModel(
            f"{name} holds weights as {', '.join(others)}; without torch {', '.join(_READABLE_TYPES)} can be read: "
            f"{install_command('torch')} to convert others"
        )
    unusual = [each for each in ("expert_count", "attention.sliding_window") if _get(model, each, 0)]
    if _get(model, "rope.scaling.type", "none") not in ("none", "linear", "yarn"):
        unusual.append("rope.scaling.type")
    if unusual:
        raise UnsupportedModel(f"{name} has {', '.join(unusual)}: {install_command('torch')} to convert it")


def _config_of(model: GgufModel) -> dict[str, Any]:
    tensors = {each.name: each for each in model.header.tensors}
    if "token_embd.weight" not in tensors:
        raise UnsupportedModel(f"{model.file.name} lacks token_embd.weight among its {len(tensors)} weights")
    heads, width = _get(model, "attention.head_count"), _get(model, "embedding_length")
    config = {
        "architectures": [ARCHITECTURES[model.header.architecture]],
        "model_type": model.header.architecture,
        "dtype": "float16",
        "hidden_size": width,
        "intermediate_size": _get(model, "feed_forward_length"),
        "num_hidden_layers": _get(model, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _get(model, "attention.head_count_kv", heads),
        "head_dim": _get(model, "attention.key_length", width // heads),
        "rms_norm_eps": _get(model, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _get(model, "context_length"),
        "vocab_size": int(tensors["token_embd.weight"].shape[0]),
        "rope_parameters": _rotation_of(model),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    return config | {f"{name}_token_id": index for name, index in _special_ids(model.header).items()}


def _rotation_of(model: GgufModel) -> dict[str, Any]:
    rotation: dict[str, Any] = {"rope_type": "default", "rope_theta": _get(model, "rope.freq_base", 10_000.0)}
    kind = _get(model, "rope.scaling.type", "none")
    if kind == "none":
        return rotation
    rotation |= {"rope_type": kind, "factor": _get(model, "rope.scaling.factor")}
    if kind == "yarn":
        rotation["original_max_position_embeddings"] = _get(model, "rope.scaling.original_context_length")
    return rotation


def _write_tokenizer(header: GgufHeader, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations import ggml, gguf

    library: Any = gguf if hasattr(gguf, "convert_gguf_tokenizer") else ggml  # where transformers 5.17 has it; no types
    make_tokenizer: Any = PreTrainedTokenizerFast
    names: dict[str, str] = library.GGUF_TOKENIZER_MAPPING["tokenizer"]
    found = {name: header.values.get(f"tokenizer.{key}") for key, name in names.items()}
    said = {name: value for name, value in found.items() if value is not None}
    backend, _ = library.convert_gguf_tokenizer(header.architecture, said)
    special = {f"{name}_token": said["tokens"][int(index)] for name, index in _special_ids(header).items()}
    save_tokenizer(make_tokenizer(tokenizer_object=backend, **special), header, folder)


def _special_ids(header: GgufHeader) -> dict[str, Any]:
    """The ids of the special tokens that the file names."""
    ids = {name: header.values.get(f"tokenizer.ggml.{key}") for name, key in _SPECIAL_TOKENS.items()}
    return {name: index for name, index in ids.items() if index is not None}


def save_tokenizer(tokenizer: Any, header: GgufHeader, folder: Path) -> None:
    """Write the tokenizer that transformers made of a GGUF file, with the file's chat template, start and end token."""
    template = header.values.get("tokenizer.chat_template")
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.bos_token is not None and (is_wanted := _adds_start(header)) != tokenizer.add_bos_token:
        tokenizer.add_bos_token = is_wanted
    end = header.values.get("tokenizer.ggml.eos_token_id")
    if end is not None and end != tokenizer.eos_token_id:  # transformers 5.17 takes the start token for it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(int(end))
    tokenizer.save_pretrained(folder)


def _adds_start(header: GgufHeader) -> bool:
    """Whether a raw prompt begins with the start token: as the file says, or else as llama.cpp assumes."""
    said = header.values.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    return any(header.values.get(f"tokenizer.ggml.{name}") in kinds for name, kinds in _WITH_START.items())


def read_sampling(file: Path) -> dict[str, Any]:
    """The file's recommendations for sampling, by the names of a generation configuration; none if it cannot be read."""
    try:
        return _sampling_of(read_gguf_header(file))
    except UnsupportedModel as error:
        log.warning("cannot read the sampling defaults of %s: %s", file, error)
        return {}


def _sampling_of(header: GgufHeader) -> dict[str, Any]:
    names = {each.generation: f"general.sampling.{each.gguf}" for each in PARAMETERS.values() if each.gguf}
    found = {name: header.values[key] for name, key in names.items() if header.values.get(key) is not None}
    return {name: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value for name, value in found.items()}


def save_sampling(header: GgufHeader, folder: Path) -> None:
    """Add the file's recommendations for sampling, if any, to the generation configuration of a folder made from it."""
    if said := _sampling_of(header):
        file = folder / GENERATION_FILE
        there = read_json(file) if file.is_file() else {}
        file.write_text(json.dumps(there | said, indent=2) + "\n", encoding="utf-8")


def describe_type(header: GgufHeader) -> str:
    """The type that the file names in `general.file_type`, such as Q4_K_M, or else the type of most weights."""
    from gguf import LlamaFileType

    said = header.values.get("general.file_type")
    if isinstance(said, int):
        with suppress(ValueError):
            return str(LlamaFileType(said & ~LlamaFileType.GUESSED).name.partition("_")[2])  # of MOSTLY_Q4_K_M
    return header.main_type
