"""The words behind `bough run`: which of them is the model and which are the prompt.

What looks like a model's name or path, in first place, is the model; a text with blanks or signs is a prompt. `--model`
leaves no doubt. A first word that looks like a name and is no model is an error, never a prompt to another model.

Standard input is read where a lone `-` stands among the words of the prompt, or in place of a prompt that is not given.
With a prompt and no `-` it is left alone: it may belong to somebody else, or stay open and never end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")
STANDARD_INPUT = "-"
_PATH_STARTS = ("/", "./", "../", "~")


@dataclass(frozen=True)
class PromptArgs:
    """What was asked for; None: not given; "": given and empty. `is_guess` if the model was a word among others."""

    model: str | None
    prompt: str | None
    is_guess: bool = False


def read_prompt_args(words: Sequence[str], model: str | None, stdin: TextIO | None) -> PromptArgs:
    """Tell model and prompt apart, and read `stdin` if it is a part of the prompt."""
    is_guess = model is None and bool(words) and is_like_a_model(words[0])
    texts = _find_texts(words[1:] if is_guess else words, stdin)
    prompt = "\n\n".join(clean(text) for text in texts if text.strip()) if texts else None
    return PromptArgs(words[0] if is_guess else model, prompt, is_guess)


def _find_texts(words: Sequence[str], stdin: TextIO | None) -> list[str]:
    """The parts of the prompt; none if it is not given and nothing is piped in."""
    if STANDARD_INPUT in words:
        place = words.index(STANDARD_INPUT)
        return [" ".join(words[:place]), _read_all(stdin), " ".join(words[place + 1 :])]
    if words:
        return [" ".join(words)]
    return [_read_all(stdin)] if stdin is not None and not stdin.isatty() else []


def is_like_a_model(word: str) -> bool:
    """Whether a word has the form of a model's name or path. Looks at nothing but the word."""
    if any(char.isspace() for char in word):
        return False
    return word.startswith(_PATH_STARTS) or word.endswith(".gguf") or bool(_NAME.fullmatch(word))


def _read_all(stdin: TextIO | None) -> str:
    """Everything up to the end; bytes that are no UTF-8 are replaced. A process without standard input has an empty one."""
    return stdin.buffer.read().decode("utf-8", errors="replace").removesuffix("\n") if stdin is not None else ""


def clean(text: str) -> str:
    """A text that can be encoded: what a terminal or a shell sent besides UTF-8 is replaced."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
