"""The words behind `bough run`: which of them is the model and which are the prompt.

What looks like a model's name or path, in first place, is the model; a text with blanks or signs is a prompt. `--model`
leaves no doubt. A first word that looks like a name and is no model is an error, never a prompt to another model.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")
_PATH_STARTS = ("/", "./", "../", "~")


@dataclass(frozen=True)
class Words:
    """What was asked for; None: not given. `is_guess` if the model was a word among others."""

    model: str | None
    prompt: str | None
    is_guess: bool = False


def read_words(words: Sequence[str], model: str | None, piped: str | None) -> Words:
    """Tell model and prompt apart. A piped text comes before the words of the prompt."""
    is_guess = model is None and bool(words) and is_like_a_model(words[0])
    spoken = " ".join(words[1:] if is_guess else words)
    texts = [clean(text) for text in (piped, spoken) if text and text.strip()]
    return Words(words[0] if is_guess else model, "\n\n".join(texts) or None, is_guess)


def is_like_a_model(word: str) -> bool:
    """Whether a word has the form of a model's name or path. Looks at nothing but the word."""
    if any(char.isspace() for char in word):
        return False
    return word.startswith(_PATH_STARTS) or word.endswith(".gguf") or bool(_NAME.fullmatch(word))


def read_pipe() -> str | None:
    """All of standard input if it is not a terminal; bytes that are no UTF-8 are replaced."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    return sys.stdin.buffer.read().decode("utf-8", errors="replace").removesuffix("\n")


def clean(text: str) -> str:
    """A text that can be encoded: what a terminal or a shell sent besides UTF-8 is replaced."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
