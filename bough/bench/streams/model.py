"""A model for streams without real weights: a vocabulary of short words, and an engine that takes a fixed time for a step.

The vocabulary is for every engine whose tokens have no text: the null engine, and models of random weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bough.bench.core.null_engine import NullEngine
from bough.cache.tree.state import Lane
from bough.models import ModelFiles
from bough.types import Draw, Sampled

NUM_BYTES = 256  # the first tokens are single bytes, so that any prompt can be encoded
VOCAB_SIZE = 8192
_LETTERS = "aeiouhlmnprstdbk"
_TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}assistant:"


class PacedEngine(NullEngine):
    """Computes nothing, and takes `step_s` for each step, as a device does while its host delivers the tokens before.

    A step begins when the one before has ended, even if the host asks for it later: the device is one step ahead. Waiting
    for it does not hold the interpreter lock.
    """

    vocab_size = VOCAB_SIZE
    _ANSWER_IDS = 4093  # a prime number, so that no lane repeats itself soon

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s = step_s
        self._ready_s = 0.0  # when the last step had ended

    def step(self, lanes: Sequence[Lane], ids: Sequence[int]) -> list[int]:
        logits = super().step(lanes, ids)
        now = time.perf_counter()
        self._ready_s = max(self._ready_s + self._step_s, now)
        time.sleep(self._ready_s - now)
        return logits

    def sample(self, logits: Sequence[int], draws: Sequence[Draw]) -> list[Sampled]:
        """Choose words, never single bytes."""
        return [Sampled(NUM_BYTES + each.token_id % self._ANSWER_IDS) for each in super().sample(logits, draws)]


def write_word_model(folder: Path, vocab_size: int) -> ModelFiles:
    """The files of a model without weights: a tokenizer of single bytes and of words, and a plain chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(f"Ġ{_spell(number)}" for number in range(vocab_size - NUM_BYTES))]
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


def _spell(number: int) -> str:
    """A word of five letters for each number below 2^20."""
    return "".join(_LETTERS[number >> at & 15] for at in (16, 12, 8, 4, 0))
