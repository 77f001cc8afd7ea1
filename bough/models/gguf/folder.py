"""Makes a model folder around a GGUF file: the file itself, and the configuration and tokenizer that it contains.

This is for engines that read GGUF themselves: quantized weights stay small, and torch is not needed. The llama.cpp
fields of the file are translated to a transformers configuration; the engine handles the order of the weights.
transformers builds the tokenizer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.errors import ModelError, UnsupportedModel
from bough.models.files import CONFIG_FILE, GGUF_FILE, link_or_copy, one_line, quiet_transformers
from bough.models.gguf.contents import Converted, main_type, save_sampling, save_tokenizer, value_of
from bough.system.distribution import install_command
from bough.types import Progress

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_READABLE_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K")
_SPECIAL_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


def make_folder(file: Path, folder: Path, progress: Progress) -> Converted:
    """Write a folder for the model in `file`, with a hard link to the file, or else a copy.

    Raises UnsupportedModel if the file cannot be read, or has weights that no engine reads from a GGUF file.
    """
    progress.start(f"Reading {file.name}, once", None)
    try:
        with quiet_transformers():
            return _make_folder(file, folder)
    except ModelError:
        raise
    except Exception as error:  # the reader raises anything for a malformed file
        raise UnsupportedModel(f"cannot read {file.name}: {type(error).__name__}: {one_line(error)}") from error
    finally:
        progress.finish()


def _make_folder(file: Path, folder: Path) -> Converted:
    header = _Header.of(file)
    _require_readable(header)
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(_config_of(header), indent=2)
    (folder / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")
    _write_tokenizer(header, folder)
    save_sampling(header.reader, folder)
    link_or_copy(file, folder / GGUF_FILE)
    return Converted(sum(int(each.n_elements) for each in header.reader.tensors), main_type(header.reader))


@dataclass(frozen=True)
class _Header:
    """The fields of a GGUF file."""

    file: Path
    reader: Any

    @classmethod
    def of(cls, file: Path) -> _Header:
        import gguf

        return cls(file, gguf.GGUFReader(file))

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        return value_of(self.reader, name, default)

    def shape(self, name: str, default: Any = None) -> Any:
        """A value of this architecture. Raises UnsupportedModel if there is neither a value nor a default."""
        value = self.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise UnsupportedModel(f"{self.file.name} does not say its {name}")
        return value


def _require_readable(header: _Header) -> None:
    name, kind = header.file.name, header.architecture
    if kind not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{name} holds a model of the architecture {kind!r}; without torch GGUF files of {', '.join(ARCHITECTURES)} "
            f"can be read: {install_command('torch')} to convert others"
        )
    others = sorted({each.tensor_type.name for each in header.reader.tensors} - set(_READABLE_TYPES))
    if others:
        raise UnsupportedModel(
            f"{name} holds weights as {', '.join(others)}; without torch {', '.join(_READABLE_TYPES)} can be read: "
            f"{install_command('torch')} to convert others"
        )
    unusual = [each for each in ("expert_count", "attention.sliding_window") if header.shape(each, 0)]
    if header.shape("rope.scaling.type", "none") not in ("none", "linear", "yarn"):
        unusual.append("rope.scaling.type")
    if unusual:
        raise UnsupportedModel(f"{name} has {', '.join(unusual)}: {install_command('torch')} to convert it")


def _config_of(header: _Header) -> dict[str, Any]:
    tensors = {each.name: each for each in header.reader.tensors}
    if "token_embd.weight" not in tensors:
        raise UnsupportedModel(f"{header.file.name} lacks token_embd.weight among its {len(tensors)} weights")
    heads, width = header.shape("attention.head_count"), header.shape("embedding_length")
    config = {
        "architectures": [ARCHITECTURES[header.architecture]],
        "model_type": header.architecture,
        "dtype": "float16",
        "hidden_size": width,
        "intermediate_size": header.shape("feed_forward_length"),
        "num_hidden_layers": header.shape("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.shape("attention.head_count_kv", heads),
        "head_dim": header.shape("attention.key_length", width // heads),
        "rms_norm_eps": header.shape("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": header.shape("context_length"),
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "rope_parameters": _rotation_of(header),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    ids = {f"{name}_token_id": header.get(f"tokenizer.ggml.{key}") for name, key in _SPECIAL_TOKENS.items()}
    return config | {name: index for name, index in ids.items() if index is not None}


def _rotation_of(header: _Header) -> dict[str, Any]:
    rotation: dict[str, Any] = {"rope_type": "default", "rope_theta": header.shape("rope.freq_base", 10_000.0)}
    kind = header.shape("rope.scaling.type", "none")
    if kind == "none":
        return rotation
    rotation |= {"rope_type": kind, "factor": header.shape("rope.scaling.factor")}
    if kind == "yarn":
        rotation["original_max_position_embeddings"] = header.shape("rope.scaling.original_context_length")
    return rotation


def _write_tokenizer(header: _Header, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations import ggml, gguf

    library: Any = gguf if hasattr(gguf, "convert_gguf_tokenizer") else ggml  # where transformers 5.17 has it; no types
    make_tokenizer: Any = PreTrainedTokenizerFast
    names: dict[str, str] = library.GGUF_TOKENIZER_MAPPING["tokenizer"]
    found = {name: header.get(f"tokenizer.{key}") for key, name in names.items()}
    said = {name: value for name, value in found.items() if value is not None}
    backend, _ = library.convert_gguf_tokenizer(header.architecture, said)
    special = {
        f"{name}_token": said["tokens"][index] for name in _SPECIAL_TOKENS if (index := _id_of(header, name)) is not None
    }
    save_tokenizer(make_tokenizer(tokenizer_object=backend, **special), header.reader, folder)


def _id_of(header: _Header, name: str) -> int | None:
    index = header.get(f"tokenizer.ggml.{_SPECIAL_TOKENS[name]}")
    return None if index is None else int(index)
