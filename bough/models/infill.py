"""Infill: the prompt for the text between a prefix and a suffix, in the form that the model was trained on.

Each family of models has its own tokens for this, in its own order. A model belongs to the first family all of whose tokens
are in its vocabulary. Nothing that a client typed becomes one of these tokens, or a special one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from bough.models.chat.control_tokens import ControlTokens
from bough.models.encoder import UNLIMITED, Encoder, PromptLimit


class InfillSlot(Enum):
    """The place of a text of the client."""

    PREFIX = "prefix"
    SUFFIX = "suffix"


@dataclass(frozen=True)
class Family:
    """The parts of a prompt in their order, and tokens that end an answer if the vocabulary has them."""

    parts: tuple[str | InfillSlot, ...]
    ends: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if isinstance(part, str))


def _prefix_first(prefix: str, suffix: str, middle: str, *ends: str) -> Family:
    return Family((prefix, InfillSlot.PREFIX, suffix, InfillSlot.SUFFIX, middle), ends)


FAMILIES = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 4
    _prefix_first(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        *("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>"),
    ),
    # StarCoder, StarCoder2, Granite Code
    _prefix_first("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>", "<fim_pad>", "<file_sep>", "<filename>"),
    _prefix_first("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<|endoftext|>", "<fim-pad>"),  # SantaCoder
    _prefix_first("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),  # Code Llama
    _prefix_first("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    _prefix_first("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    Family(("[SUFFIX]", InfillSlot.SUFFIX, "[PREFIX]", InfillSlot.PREFIX)),  # Codestral
)


class Infill:
    """Makes the prompts for one model. `end_ids` end the answer besides the usual ones."""

    def __init__(self, backend: Any, encoder: Encoder, family: Family) -> None:
        named = (*family.tokens, *family.ends)
        found = {text: backend.token_to_id(text) for text in named}
        self.end_ids: frozenset[int] = frozenset(token_id for token_id in found.values() if token_id is not None)
        self._ids: dict[str, int] = {text: found[text] for text in family.tokens}
        self._family = family
        self._control = ControlTokens(backend, "\n".join(named), encoder)
        self._start_ids = encoder.start_ids

    def encode(self, prefix: str, suffix: str, limit: PromptLimit = UNLIMITED) -> list[int]:
        """The prompt for the text between the two."""
        given = {
            InfillSlot.PREFIX: self._control.encode_typed(prefix, limit),
            InfillSlot.SUFFIX: self._control.encode_typed(suffix, limit, is_inside=True),
        }
        ids = list(self._start_ids)
        for part in self._family.parts:
            ids += [self._ids[part]] if isinstance(part, str) else given[part]
        limit.check(len(ids))
        return ids


def find_infill(backend: Any, encoder: Encoder) -> Infill | None:
    """The infill of a model with this `tokenizers` object; None if its vocabulary has no tokens for it."""
    for family in FAMILIES:
        if all(backend.token_to_id(text) is not None for text in family.tokens):
            return Infill(backend, encoder, family)
    return None
