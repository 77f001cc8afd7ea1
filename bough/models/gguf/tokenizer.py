"""What a GGUF file says of its tokenizer beyond the vocabulary, which transformers leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_LLAMA_3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_WITH_START = {"model": ("llama", "bert"), "pre": (*_LLAMA_3, "tekken", "chameleon")}
"""Kinds of vocabulary, and ways to split words, whose prompts begin with a start token unless the file says otherwise."""


def save_tokenizer(tokenizer: Any, reader: Any, folder: Path) -> None:
    """Write the tokenizer that transformers made of a GGUF file, with the file's chat template and start token."""
    template = value_of(reader, "tokenizer.chat_template")
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.bos_token is not None and (is_wanted := adds_start(reader)) != tokenizer.add_bos_token:
        tokenizer.add_bos_token = is_wanted
    tokenizer.save_pretrained(folder)


def adds_start(reader: Any) -> bool:
    """Whether a raw prompt begins with the start token: as the file says, or else as llama.cpp takes it."""
    said = value_of(reader, "tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    return any(value_of(reader, f"tokenizer.ggml.{name}") in kinds for name, kinds in _WITH_START.items())


def value_of(reader: Any, name: str, default: Any = None) -> Any:
    """What the file says under a name."""
    field = reader.get_field(name)
    return default if field is None else field.contents()
