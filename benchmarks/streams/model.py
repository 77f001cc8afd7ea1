"""A model for streams without real weights: its tokens are single bytes and short words.

The vocabulary is for every engine whose tokens have no text: the null engine, and models of random weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.null_engine import NUM_BYTES, spell
from bough.config import Settings
from bough.engines.contract import Engine
from bough.models import ModelFiles
from bough.models.tokenizer import load_tokenizer
from bough.runtime import Runtime
from bough.runtime.tiers import open_tiers
from bough.scheduling.worker import Limits

_TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}assistant:"


def make_word_runtime(engine: Engine, settings: Settings, folder: Path) -> Runtime:
    """A runtime over an engine whose tokens have no text of their own: they get words. The folder takes the tokenizer."""
    files, tiers = write_word_model(folder, engine.vocab_size), open_tiers(engine, None, settings)
    return Runtime(engine, load_tokenizer(files), settings, files, tiers, Limits(settings.queue))


def write_word_model(folder: Path, vocab_size: int) -> ModelFiles:
    """The files of a model without weights: a tokenizer of single bytes and of words, and a plain chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(f"Ġ{spell(number)}" for number in range(vocab_size - NUM_BYTES))]
    backend = Tokenizer(models.BPE({name: token_id for token_id, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    made: Any = PreTrainedTokenizerFast
    made(tokenizer_object=backend, chat_template=_TEMPLATE).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size}), encoding="ascii")
    header = json.dumps({"nothing": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    return ModelFiles("words", folder)
