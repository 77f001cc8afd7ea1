"""The most tokens a sequence may have, and the most it may have to be reused.

Some rotary scalings depend on the total length: beyond their threshold the same token has other keys.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from bough.config import Settings
from bough.errors import SettingsError

DEFAULT_CONTEXT = 131_072  # of models whose configuration has no bound


def choose_context(bound: int, settings: Settings) -> int:
    """The most tokens a sequence may have. `bound` is the model's own limit; 0 if its configuration has none."""
    if bound and settings.context > bound:
        raise SettingsError(f"context is {settings.context}, and the model holds {bound} tokens")
    return settings.context or bound or DEFAULT_CONTEXT


def reuse_limit(text: dict[str, Any], by_length: Container[str], bound: int) -> int | None:
    """The length up to which rows stay valid, or None if they always do, by the configuration of a language model.

    `by_length` are the scalings that depend on the total length where this model runs; `bound` is what the model holds.
    """
    limits = [_threshold(each, text, bound) for each in _rotaries(text) if _kind(each) in by_length]
    return min(limits) if limits else None


def _rotaries(text: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rotary parameters of a configuration: one set, or one for each type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = text.get(name)
        if isinstance(found, dict):
            nested = [each for each in found.values() if isinstance(each, dict)]
            yield from nested or [found]


def _kind(rotary: dict[str, Any]) -> str:
    return str(rotary.get("rope_type", rotary.get("type", "default")))


def _threshold(rotary: dict[str, Any], text: dict[str, Any], bound: int) -> int:
    original = rotary.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    return int(original or bound)
