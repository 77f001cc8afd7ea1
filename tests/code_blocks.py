"""The code blocks of the documents: where they are, which commands they have, and which of them are not run.

A block that cannot run here (it needs a GPU, a download, another program) has `<!-- not run: why -->` on the line before.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHELL = ("bash", "console")
BLOCK = re.compile(
    r"^(<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
MARK = re.compile(r"^ *<!-- *not run", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Block:
    """A block of code in a page; `reason` says why it is not run, if it is not."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page.name}, line {self.line}"


@dataclass(frozen=True)
class Command:
    """One program with its words; `piped_from` are the words of the program whose output it reads."""

    block: Block
    words: tuple[str, ...]
    piped_from: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.block}: {shlex.join(self.words)}"


def find_blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("text")), found["language"], found["text"], found["reason"])
        for found in BLOCK.finditer(text)
    ]


def find_commands(block: Block) -> Iterator[Command]:
    """The commands of a block. In a console's block they are the lines that begin with `$`, and the rest is output."""
    for line in _join_lines(block):
        stages = _split_stages(line)
        for before, words in zip([(), *stages], stages, strict=False):
            if words:
                yield Command(block, words, before)


def _join_lines(block: Block) -> Iterator[str]:
    """Whole commands: a line that ends with a backslash, or inside quotes, goes on in the next one."""
    waiting = ""
    for line in block.text.splitlines():
        if block.language == "console" and not waiting:
            if not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
        waiting += line
        if waiting.endswith("\\"):
            waiting = waiting.removesuffix("\\")
        elif _is_whole(waiting):
            yield waiting
            waiting = ""
        else:
            waiting += "\n"
    assert not waiting, f"{block}: a quote or a backslash has no end in {waiting!r}"


def _is_whole(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return False
    return True


def _split_stages(line: str) -> list[tuple[str, ...]]:
    """The programs of a pipeline or of a list (`&&`), without variables before them and redirections after them."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    stages: list[list[str]] = [[]]
    is_redirected = False
    for word in lexer:
        if word in ("|", "&&", ";", "&"):
            stages.append([])
        elif word in ("<", ">", ">>"):
            is_redirected = True
        elif is_redirected or (not stages[-1] and re.match(r"\w+=", word)):
            is_redirected = False
        else:
            stages[-1].append(word)
    return [tuple(words) for words in stages]
