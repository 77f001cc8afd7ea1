"""A model with random weights and a made-up tokenizer, so that answers have text as those of a real model do.

The text of every token is `MARK` and its number: a client can count tokens without parsing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.config import load_settings
from bough.models.files import ModelFiles
from bough.models.tokenizer import Tokenizer
from bough.runtime import Runtime, make_shape
from bough.runtime.tiers import open_tiers
from bough.scheduling.worker import Limits

MARK = "@"


def make_tokenizer(vocab_size: int) -> Any:
    """A tokenizer with one word for each id, which writes bytes as those of Llama and Qwen do."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {f"{MARK}{number}Ġ": number for number in range(vocab_size)}  # Ġ is a space
    backend = Backend(models.WordLevel(words, unk_token=f"{MARK}0Ġ"))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]


def load_made_model(shape: Mapping[str, Any], settings: Mapping[str, Any], files: ModelFiles | None = None) -> Runtime:
    """A runtime over random weights of this shape."""
    chosen = load_settings(dict(settings))
    engine = make_shape(dict(shape), chosen)
    tokenizer, tiers = Tokenizer(make_tokenizer(engine.vocab_size)), open_tiers(engine, None, chosen)
    return Runtime(engine, tokenizer, chosen, files, tiers, Limits(chosen.queue, chosen.watchdog))
