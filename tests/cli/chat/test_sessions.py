"""Chats that are saved and resumed."""

from __future__ import annotations

import json
import os
import stat

import pytest

from bough.cli.chat.sessions import ChatSession, Conversation, Exchange, Sessions
from bough.cli.prompt_args import PromptArgs
from bough.errors import BoughError, RequestError
from tests.cli.conftest import make_runner


@pytest.fixture
def sessions(tmp_path) -> Sessions:
    return Sessions(tmp_path / "chats")


def make_session(question: str = "Hello") -> ChatSession:
    branches = {"main": Conversation("Be brief.", [Exchange(question, "Hi ☺")]), "b": Conversation()}
    return ChatSession("tiny", {"temperature": 0.5, "stop": ["a"]}, branches, "main")


def test_a_chat_comes_back_as_it_was_saved(sessions):
    sessions.save(make_session(), "trip")

    assert sessions.load("trip") == ChatSession(**{**vars(make_session()), "name": "trip"})


def test_only_the_owner_can_read_a_chat(sessions):
    sessions.save(make_session(), "trip")

    assert stat.S_IMODE((sessions.folder / "trip.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(sessions.folder.stat().st_mode) == 0o700


def test_without_a_name_the_chat_that_was_saved_last_comes_back(sessions):
    for number, name in enumerate(("first", "second", "third")):
        sessions.save(make_session(name), name)
        os.utime(sessions.folder / f"{name}.json", (number, number))
    os.utime(sessions.folder / "second.json", (9, 9))

    assert sessions.load().name == "second"
    assert sessions.names() == ["second", "third", "first"]


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "x" * 65, "ä"])
def test_a_name_that_could_be_another_file_is_refused(sessions, name):
    with pytest.raises(RequestError, match="is not a name"):
        sessions.save(make_session(), name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"format": 2}',
        '{"format": 1, "model": "a", "parameters": {}, "current": "main", "branches": {}}',
        '{"format": 1, "model": "a", "parameters": {"heat": 1}, "current": "m", "branches": {"m": {}}}',
        '{"format": 1, "model": 7, "parameters": {}, "current": "m", "branches": {"m": {"system": "", "exchanges": []}}}',
        '{"format": 1, "model": "", "parameters": {}, "current": "m", "branches": {"m": {"system": "", "exchanges": [1]}}}',
    ],
)
def test_a_damaged_file_is_named_and_left_as_it_is(sessions, text):
    sessions.folder.mkdir()
    (sessions.folder / "trip.json").write_text(text)

    with pytest.raises(BoughError, match=r"trip\.json is damaged: "):
        sessions.load("trip")
    assert (sessions.folder / "trip.json").read_text() == text


def test_a_chat_that_does_not_exist_is_told_with_those_that_do(sessions):
    with pytest.raises(RequestError, match="there is no chat to resume yet"):
        sessions.load()
    sessions.save(make_session(), "trip")

    with pytest.raises(RequestError, match="there is no chat home; the chats are trip"):
        sessions.load("home")


@pytest.fixture
def at_a_terminal(loads, monkeypatch):
    """`bough run` without a prompt begins a chat, as at a terminal."""
    monkeypatch.setattr("bough.cli.run.read_prompt_args", lambda *_: PromptArgs("tiny", None))
    return loads


def test_a_chat_is_kept_when_it_ends_and_resumed(invoke, at_a_terminal, home, monkeypatch):
    opened = []
    monkeypatch.setattr("bough.cli.backends.local.load", lambda name, **settings: opened.append(name) or make_runner(home))
    invoke("run", "--system", "Be brief.", "--max-tokens", "3", piped="Hello\n/bye\n")

    result = invoke("run", "--resume", piped="one\n")

    kept = json.loads((home / "data" / "chats" / "last.json").read_text())
    assert [each["question"] for each in kept["branches"]["main"]["exchanges"]] == ["Hello", "one"]
    assert kept["branches"]["main"]["system"] == "Be brief."
    said = kept["branches"]["main"]["exchanges"][0]
    assert result.stdout.startswith(f">>> Hello\n{said['answer']}\n\n")
    assert "going on with the chat last: 2 messages; the last was 'Hello'" in result.stderr
    assert opened == ["tiny", "tiny"]


def test_without_history_nothing_is_saved(invoke, at_a_terminal, home):
    result = invoke("run", "--no-history", "--max-tokens", "3", piped="Hello\n/save trip\n/bye\n")

    assert "chats are not saved with --no-history" in result.stderr
    assert not (home / "data" / "chats").exists()
    assert not (home / "cache" / "history").exists()


def test_a_chat_without_an_answer_is_not_saved(invoke, at_a_terminal, home):
    invoke("run", piped="/bye\n")

    assert not (home / "data" / "chats").exists()


def test_resume_takes_one_name(invoke, loads):
    assert invoke("run", "--resume", "trip", "Hello").exit_code == 2
    assert "there is no chat to resume yet" in invoke("run", "--resume").stderr
