"""The arguments of `bough run`: model, prompt, and what is piped in."""

from __future__ import annotations

import io
import os
import socket
from pathlib import Path

import pytest

from bough.cli.prompt_args import PromptArgs, read_prompt_args


@pytest.mark.parametrize(
    ("words", "model", "piped", "expected"),
    [
        ([], None, None, PromptArgs(None, None)),
        (["smollm2"], None, None, PromptArgs("smollm2", None, is_guess=True, is_alone=True)),
        (["smollm2", "Hello", "you"], None, None, PromptArgs("smollm2", "Hello you", is_guess=True)),
        (["org/name:latest", "Hello"], None, None, PromptArgs("org/name:latest", "Hello", is_guess=True)),
        (["./my model"], None, None, PromptArgs(None, "./my model")),
        (["./folder"], None, None, PromptArgs("./folder", None, is_guess=True, is_alone=True)),
        (["Hello there"], None, None, PromptArgs(None, "Hello there")),
        (["What's", "up"], None, None, PromptArgs(None, "What's up")),
        (["Hello", "you"], "smollm2", None, PromptArgs("smollm2", "Hello you")),
        ([], None, "a text\n", PromptArgs(None, "a text")),
        (["smollm2"], None, "a text", PromptArgs("smollm2", "a text", is_guess=True, is_alone=True)),
        (["smollm2", "Sum up:", "-"], None, "a text", PromptArgs("smollm2", "Sum up:\n\na text", is_guess=True)),
        (["-", "Sum", "it up."], None, "a text", PromptArgs(None, "a text\n\nSum it up.")),
        (["-"], "smollm2", "a text", PromptArgs("smollm2", "a text")),
        (["Sum up:"], None, "a text", PromptArgs(None, "Sum up:\n\na text")),
        (["smollm2", "Sum", "up:"], None, "a text", PromptArgs("smollm2", "Sum up:\n\na text", is_guess=True)),
        (["Sum up:"], None, "", PromptArgs(None, "Sum up:")),
        ([], None, " \n", PromptArgs(None, "")),
        (["a \udcff b"], None, None, PromptArgs(None, "a ? b")),
    ],
)
def test_model_and_prompt_are_told_apart(words, model, piped, expected):
    stdin = None if piped is None else io.TextIOWrapper(io.BytesIO(piped.encode()))

    assert read_prompt_args(words, model, stdin) == expected


def test_a_terminal_is_read_only_where_it_is_asked_for():
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    assert read_prompt_args([], None, Terminal(io.BytesIO(b"typed"))).prompt is None
    assert read_prompt_args(["Hello there"], None, Terminal(io.BytesIO(b"typed"))).prompt == "Hello there"
    assert read_prompt_args(["-"], None, Terminal(io.BytesIO(b"typed"))).prompt == "typed"


def test_a_pipe_and_a_file_follow_the_prompt(tmp_path):
    (tmp_path / "notes").write_text("a text")
    reading, writing = os.pipe()
    os.write(writing, b"a text")
    os.close(writing)

    for stdin in (os.fdopen(reading), (tmp_path / "notes").open()):
        with stdin:
            assert read_prompt_args(["Sum up:"], None, stdin).prompt == "Sum up:\n\na text"


def test_a_device_and_a_socket_that_stays_open_are_not_read():
    ours, theirs = socket.socketpair()
    with ours, theirs, Path(os.devnull).open() as nothing, os.fdopen(os.dup(ours.fileno())) as connected:
        theirs.send(b"for somebody else")

        for stdin in (nothing, connected):
            assert read_prompt_args(["Hello there"], None, stdin).prompt == "Hello there"
        assert ours.recv(100) == b"for somebody else"


def test_a_word_that_is_no_model_begins_the_prompt():
    args = read_prompt_args(["Hello"], None, io.TextIOWrapper(io.BytesIO(b"a text")))

    assert args.as_prompt() == PromptArgs(None, "Hello\n\na text")
