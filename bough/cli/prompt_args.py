"""The arguments of `bough run`: which of them is the model and which are the prompt.

The first argument is the model if it looks like a model's name or path. A text with spaces or punctuation is a prompt.
With `--model`, all arguments are the prompt. A single argument that looks like a name may turn out to be no model:
`as_prompt` then makes it the prompt.

Standard input is read where the prompt contains a lone `-`, or if there is no prompt. Otherwise it follows the prompt if it
is a pipe or a file. It is read to its end. A terminal, a device such as /dev/null and a socket are left alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")
STANDARD_INPUT = "-"
_PATH_STARTS = ("/", "./", "../", "~")


@dataclass(frozen=True)
class PromptArgs:
    """Model and prompt. None means not given, "" given but empty.

    `is_guess`: the model was found among the arguments; `is_alone`: it was the only one.
    """

    model: str | None
    prompt: str | None
    is_guess: bool = False
    is_alone: bool = False

    def as_prompt(self) -> PromptArgs:
        """The arguments if the model among them is none, but the beginning of the prompt."""
        return PromptArgs(None, _join((self.model or "", self.prompt or "")))


def read_prompt_args(words: Sequence[str], model: str | None, stdin: TextIO | None) -> PromptArgs:
    """Separate the model from the prompt, and read `stdin` if it is part of the prompt."""
    is_guess = model is None and bool(words) and is_like_a_model(words[0])
    texts = _find_texts(words[1:] if is_guess else words, stdin)
    prompt = _join(texts) if texts else None
    return PromptArgs(words[0] if is_guess else model, prompt, is_guess, is_guess and len(words) == 1)


def _join(texts: Iterable[str]) -> str:
    return "\n\n".join(clean(text) for text in texts if text.strip())


def _find_texts(words: Sequence[str], stdin: TextIO | None) -> list[str]:
    """The parts of the prompt. The list is empty if no prompt is given and nothing is piped in."""
    if STANDARD_INPUT in words:
        at = words.index(STANDARD_INPUT)
        return [" ".join(words[:at]), _read_all(stdin), " ".join(words[at + 1 :])]
    if words:
        return [" ".join(words), _read_all(stdin) if is_piped(stdin) else ""]
    return [_read_all(stdin)] if stdin is not None and not stdin.isatty() else []


def is_piped(stdin: TextIO | None) -> bool:
    """Whether standard input is a pipe or a file, which has an end."""
    if stdin is None or stdin.isatty():
        return False
    try:
        mode = os.fstat(stdin.fileno()).st_mode
    except (OSError, ValueError):  # no file of the system: it is in memory
        return True
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def is_like_a_model(word: str) -> bool:
    """Whether a word has the form of a model's name or path. No file is looked up."""
    if any(char.isspace() for char in word):
        return False
    return is_like_a_path(word) or bool(_NAME.fullmatch(word))


def is_like_a_path(word: str) -> bool:
    """Whether a word is the path of a model rather than its name. No file is looked up."""
    return word.startswith(_PATH_STARTS) or word.endswith(".gguf")


def _read_all(stdin: TextIO | None) -> str:
    """All of standard input, or "" if the process has none. Bytes that are not UTF-8 are replaced."""
    return stdin.buffer.read().decode("utf-8", errors="replace").removesuffix("\n") if stdin is not None else ""


def clean(text: str) -> str:
    """The text with every character that cannot be encoded as UTF-8 replaced."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
