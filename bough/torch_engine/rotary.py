"""Rotary scalings that depend on the total length: beyond their threshold, early rows mean something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_BY_LENGTH = {"dynamic", "longrope"}


def reuse_limit(config: Any) -> int | None:
    """The length up to which rows stay valid, or None if they always do."""
    text = config.get_text_config(decoder=True)
    limits = [_threshold(each, text) for each in _rotaries(text) if _kind(each) in _BY_LENGTH]
    return min(limits) if limits else None


def _rotaries(text: Any) -> Iterator[dict[str, Any]]:
    """The rotary parameters of a configuration: one set, or one for each type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(text, name, None)
        if isinstance(found, dict):
            nested = [each for each in found.values() if isinstance(each, dict)]
            yield from nested or [found]


def _kind(rotary: dict[str, Any]) -> str:
    return str(rotary.get("rope_type", rotary.get("type", "default")))


def _threshold(rotary: dict[str, Any], text: Any) -> int:
    original = rotary.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return int(original or text.max_position_embeddings)
