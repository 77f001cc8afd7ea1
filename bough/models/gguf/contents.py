"""The contents of a GGUF file: its fields, the type of its weights, and what transformers skips of its tokenizer."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.models.files import GENERATION_FILE, read_json

log = logging.getLogger(__name__)

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repeat_last_n",
}  # keys below general.sampling, and what a generation_config.json calls them, but for the last
_DIGITS = 6  # that a float of 32 bits has for sure

_LLAMA_3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_WITH_START = {"model": ("llama", "bert"), "pre": (*_LLAMA_3, "tekken", "chameleon")}
"""Vocabularies and pre-tokenizers whose prompts begin with a start token unless the file says otherwise."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: the number of weights, and the type of most of them in the file (`Q4_1`, `BF16`, …)."""

    num_parameters: int
    quantization: str


def save_tokenizer(tokenizer: Any, reader: Any, folder: Path) -> None:
    """Write the tokenizer that transformers made of a GGUF file, with the file's chat template, start and end token."""
    template = value_of(reader, "tokenizer.chat_template")
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.bos_token is not None and (is_wanted := adds_start(reader)) != tokenizer.add_bos_token:
        tokenizer.add_bos_token = is_wanted
    end = value_of(reader, "tokenizer.ggml.eos_token_id")
    if end is not None and end != tokenizer.eos_token_id:  # transformers 5.17 takes the start token for it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(int(end))
    tokenizer.save_pretrained(folder)


def adds_start(reader: Any) -> bool:
    """Whether a raw prompt begins with the start token: as the file says, or else as llama.cpp assumes."""
    said = value_of(reader, "tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    return any(value_of(reader, f"tokenizer.ggml.{name}") in kinds for name, kinds in _WITH_START.items())


def value_of(reader: Any, name: str, default: Any = None) -> Any:
    """The value of a field of the file."""
    field = reader.get_field(name)
    return default if field is None else field.contents()


def read_sampling(file: Path) -> dict[str, Any]:
    """As `sampling_of`, for a file that is not open yet; nothing if it cannot be read."""
    import gguf

    try:
        return sampling_of(gguf.GGUFReader(file))
    except Exception as error:  # the reader raises anything for a malformed file
        log.warning("cannot read the sampling defaults of %s: %s: %s", file, type(error).__name__, error)
        return {}


def sampling_of(reader: Any) -> dict[str, Any]:
    """What the file recommends for sampling, by the names of a generation configuration."""
    found = {ours: value_of(reader, f"general.sampling.{name}") for name, ours in _SAMPLING.items()}
    said = {name: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value for name, value in found.items()}
    return {name: value for name, value in said.items() if value is not None}


def save_sampling(reader: Any, folder: Path) -> None:
    """Add what the file says about sampling, if anything, to the generation configuration of a folder made from it."""
    if said := sampling_of(reader):
        file = folder / GENERATION_FILE
        there = read_json(file) if file.is_file() else {}
        file.write_text(json.dumps(there | said, indent=2) + "\n", encoding="utf-8")


def main_type(reader: Any) -> str:
    """The type that holds most of the weights."""
    counts: Counter[str] = Counter()
    for tensor in reader.tensors:
        counts[tensor.tensor_type.name] += int(tensor.n_elements)
    return counts.most_common(1)[0][0]
