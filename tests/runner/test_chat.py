"""Conversations as objects: turns, branches, what is taken back, what is kept, and files."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bough
from bough import BoughError, Chat, Completion, EngineError, RequestError, Runner
from tests.runner.long_answers import ENDLESS, hold_until_queued, watch_steps
from tests.waiting import BOUND_S

SHORT: Any = {"max_tokens": 4, "ignore_eos": True}


def roles(chat: Chat) -> list[str]:
    return [message["role"] for message in chat.messages]


# Turns


def test_a_message_and_its_answer_become_part_of_the_chat(runner: Runner) -> None:
    chat = runner.chat(system="Be brief.", **SHORT)
    answer = chat.send("Hello")
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": answer.text},
    ]
    assert (len(chat), chat.num_turns) == (3, 1)


def test_the_second_turn_computes_only_what_is_new(runner: Runner) -> None:
    chat = runner.chat(system="You are a helpful assistant. " * 5, max_tokens=1)
    first = chat.send("Hello").usage
    second = chat.send("Hello").usage
    assert second.cached_tokens >= first.prompt_tokens - 1


def test_every_way_of_asking_gives_the_same_answer(runner: Runner) -> None:
    async def ask(way: str, chat: Chat) -> str:
        if way == "asend":
            return (await chat.asend("Hello", **SHORT)).text
        if way == "astream":
            pieces: list[Any] = [piece async for piece in chat.astream("Hello", **SHORT)]
            return str(pieces[-1].text)
        return "".join([text async for text in chat.astream_text("Hello", **SHORT)])

    chats = runner.chat(system="Be brief.").fork(6)
    *pieces, last = chats[1].stream("Hello", **SHORT)
    texts = [chats[0].send("Hello", **SHORT).text, last.text, "".join(chats[2].stream_text("Hello", **SHORT))]
    texts += [asyncio.run(ask(way, chat)) for way, chat in zip(["asend", "astream", "text"], chats[3:], strict=True)]
    assert "".join(piece.text for piece in pieces) == last.text
    assert len(set(texts)) == 1
    assert [chat.messages for chat in chats[1:]] == [chats[0].messages] * 5


def test_calls_of_the_tools_that_were_offered_are_found_in_every_kind_of_answer(runner: Runner) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    forced: Any = {"format": {"const": {"name": "weather", "arguments": {"city": "Oslo"}}}, "max_tokens": 200}
    question = "What is the weather in Oslo?"
    *_, streamed = runner.stream(question, tools=tools, **forced)
    answers = [
        runner.generate(question, tools=tools, **forced),
        streamed,
        *runner.batch([question], tools=tools, **forced),
        asyncio.run(runner.agenerate(question, tools=tools, **forced)),
        runner.chat(tools=tools).send(question, **forced),
    ]
    for answer in answers:
        assert isinstance(answer, Completion)
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("weather", {"city": "Oslo"})]
    assert runner.generate(question, **forced).tool_calls == ()


def test_results_of_tools_are_sent_as_messages(runner: Runner) -> None:
    chat = runner.chat(**SHORT)
    chat.send("What is the capital of France?")
    call: Any = {"role": "tool", "content": "Paris", "tool_call_id": "1"}
    chat.send([call, {"role": "tool", "content": "Köln 你好"}])
    call["content"] = "changed afterwards"
    assert roles(chat) == ["user", "assistant", "tool", "tool", "assistant"]
    assert chat.messages[2]["content"] == "Paris"
    assert chat.num_turns == 1


def test_options_of_a_message_replace_those_of_the_chat(runner: Runner) -> None:
    chat = runner.chat(max_tokens=2, ignore_eos=True)
    assert len(chat.send("Hello").token_ids) == 2
    assert len(chat.send("Hello", max_tokens=5).token_ids) == 5


def test_two_messages_at_once_are_refused(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, has_stepped = runner.chat(), watch_steps(runner, monkeypatch)
    is_enough = threading.Event()
    first = threading.Thread(target=lambda: chat.send("Hello", **ENDLESS, is_cancelled=is_enough.is_set))
    first.start()
    assert has_stepped.wait(BOUND_S)
    for call in (lambda: chat.send("Hello"), lambda: next(chat.stream("Hello")), chat.rewind):
        with pytest.raises(RequestError, match="the chat is answering"):
            call()
    assert chat.fork().send("Hello", **SHORT).finish_reason == "length"
    is_enough.set()
    first.join(BOUND_S)


def test_of_many_threads_that_send_at_once_one_is_answered(runner: Runner) -> None:
    for _ in range(10):
        chat, start, results = runner.chat(), threading.Barrier(4), []

        def send(chat: Chat = chat, start: threading.Barrier = start, results: list[str] = results) -> None:
            start.wait(BOUND_S)
            try:
                results.append(chat.send("Hello", max_tokens=30, ignore_eos=True).finish_reason)
            except RequestError:
                results.append("refused")

        threads = [threading.Thread(target=send) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(BOUND_S)
        assert len(chat) == 2 * results.count("length")


def test_a_turn_that_fails_leaves_the_chat_as_it_was(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = runner.chat(system="Be brief.", **SHORT)
    chat.send("Hello")
    before = chat.messages

    def fail(lane: Any, ids: Any) -> Any:
        raise EngineError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(runner.runtime.engine, "evaluate", fail)
        with pytest.raises(EngineError):
            chat.send("one")
        with pytest.raises(EngineError):
            list(chat.stream("two"))
        with pytest.raises(EngineError):
            asyncio.run(chat.asend("three"))
    for content in (7, {"content": "no role"}, [{"role": 3}], [["user", "Hello"]]):
        with pytest.raises(RequestError, match="a message is a mapping with a role"):
            chat.send(content)  # type: ignore[arg-type]
    assert chat.messages == before
    assert chat.send("four").finish_reason == "length"


def test_a_cancelled_answer_is_no_turn(runner: Runner) -> None:
    chat, asked = runner.chat(), iter([False, False])
    assert chat.send("Hello", **ENDLESS, is_cancelled=lambda: next(asked, True)).finish_reason == "cancelled"

    async def cancel() -> None:
        async with asyncio.timeout(0.1):
            await chat.asend("Hello", **ENDLESS)

    with pytest.raises(TimeoutError):
        asyncio.run(cancel())
    assert len(chat) == 0
    assert chat.send("Hello", **SHORT).finish_reason == "length"


def test_a_stream_that_is_left_leaves_the_chat_as_it_was_and_usable(runner: Runner) -> None:
    chat = runner.chat()
    closed, held = chat.stream("Hello", **ENDLESS), chat.stream("Hello", **ENDLESS)
    next(closed)
    with pytest.raises(RequestError, match="close that stream"):
        next(held)
    closed.close()
    next(chat.stream("Hello", **ENDLESS))  # dropped at once
    cycle: list[Any] = [chat.stream_text("Hello", **ENDLESS)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()
    chat.stream("Hello", **ENDLESS)  # never begun

    async def leave() -> None:
        async for _ in chat.astream_text("Hello", **ENDLESS):
            break

    asyncio.run(leave())
    assert len(chat) == 0
    assert chat.send("Hello", **SHORT).finish_reason == "length"


# Branches


def test_forks_go_their_own_ways(runner: Runner) -> None:
    chat = runner.chat(system="Be brief.", **SHORT)
    chat.send("Hello")
    one, others = chat.fork(), chat.fork(2)
    one.send("one")
    others[0].send("two")
    assert [len(each) for each in (chat, one, *others)] == [3, 5, 5, 3]
    assert chat.fork(0) == []
    with pytest.raises(RequestError, match="forked -1 times"):
        chat.fork(-1)


def test_64_forks_of_2000_tokens_compute_their_prefix_once(runner: Runner) -> None:
    chat = runner.chat(system="You are a helpful assistant. " * 300, max_tokens=1)
    prefix = len(runner.tokenize(chat.messages, template_kwargs={"add_generation_prompt": False}))
    assert prefix > 2_000
    held = hold_until_queued(runner, 64)
    answers = runner.send_all(chat.fork(64), [f"one {number}" for number in range(64)])
    held.result()
    usages = [answer.usage for answer in answers]
    tails = sum(usage.prompt_tokens - prefix for usage in usages)
    computed = sum(usage.computed_tokens for usage in usages)
    assert computed <= prefix + tails
    assert runner.cache.stats()["tokens"] <= prefix + tails + 64


def test_turns_are_taken_back(runner: Runner) -> None:
    chat = runner.chat(system="Be brief.", **SHORT)
    first = chat.send("one")
    chat.send("two")
    chat.send([{"role": "tool", "content": "3"}])
    assert [message["role"] for message in chat.rewind()] == ["user", "assistant", "tool", "assistant"]
    assert chat.rewind(0) == []
    with pytest.raises(RequestError, match="the chat has 1 turns, and 2 cannot be taken back"):
        chat.rewind(2)
    with pytest.raises(RequestError, match="-1 cannot be taken back"):
        chat.rewind(-1)
    chat.rewind(1)
    assert roles(chat) == ["system"]
    assert chat.send("one").text == first.text


def test_send_all_answers_each_chat_and_seeds_differ(runner: Runner) -> None:
    chats = runner.chat(temperature=1.0, seed=3, **SHORT).fork(4)
    answers = runner.send_all(chats, "Hello")
    assert len({answer.token_ids for answer in answers}) > 1
    assert [chat.messages[-1]["content"] for chat in chats] == [answer.text for answer in answers]
    others = runner.chat(temperature=1.0, seed=3, **SHORT).fork(4)
    assert asyncio.run(runner.asend_all(others, ["Hello"] * 4)) != []
    assert [chat.messages for chat in others] == [chat.messages for chat in chats]


def test_send_all_refuses_what_does_not_match_and_changes_nothing(runner: Runner) -> None:
    chats = runner.chat(**SHORT).fork(2)
    with pytest.raises(RequestError, match="there are 1 messages for 2 chats"):
        runner.send_all(chats, ["Hello"])
    with pytest.raises(RequestError, match="the chat is answering already"):
        runner.send_all([*chats, chats[0]], "Hello")
    with pytest.raises(RequestError, match="unknown option raw"):
        runner.send_all(chats, "Hello", raw=True)  # type: ignore[call-arg]
    assert [len(chat) for chat in chats] == [0, 0]
    assert runner.send_all([], "Hello") == []
    assert len(runner.send_all(chats, "Hello")) == 2


def test_a_chat_whose_answer_is_done_keeps_it_when_another_fails(runner: Runner) -> None:
    good, long = runner.chat(**SHORT), runner.chat(system="Hello there, " * runner.context_tokens)
    with pytest.raises(bough.PromptTooLong):
        runner.send_all([good, long], "Hello")
    assert len(long) == 1
    assert len(good) in (0, 2)  # whole or not at all


# Keeping


def test_a_chat_is_kept_until_it_is_kept_further_or_no_longer(runner: Runner) -> None:
    chat = runner.chat(system="Be brief.", **SHORT)
    chat.keep()
    system = chat.messages
    assert runner.cache.is_kept(system)
    assert repr(chat) == "<Chat with chatty: 0 turns, 1 messages, kept>"
    chat.send("Hello")
    chat.keep()
    chat.keep()
    assert runner.cache.is_kept(chat.messages)
    assert not runner.cache.is_kept(system)
    chat.unkeep()
    chat.unkeep()
    assert not runner.cache.is_kept(chat.messages)
    runner.chat().keep()  # nothing to keep
    assert runner.cache.stats()["kept"] == 0


def test_what_does_not_fit_leaves_what_was_kept_before(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = runner.chat(system="Be brief.", **SHORT)
    chat.keep()
    system = chat.messages
    chat.send("Hello")

    def refuse(ids: Any, salt: str) -> None:
        raise bough.DoesNotFit(2, 1, 0)

    monkeypatch.setattr(runner.runtime, "require_kept", refuse)
    with pytest.raises(bough.DoesNotFit):
        chat.keep()
    assert runner.cache.is_kept(system)
    chat.unkeep()
    assert not runner.cache.is_kept(system)


def test_pin_and_unpin_are_earlier_names_of_keep_and_unkeep(runner: Runner) -> None:
    chat = runner.chat(system="Be brief.", **SHORT)
    chat.pin()
    assert runner.cache.is_kept(chat.messages)
    chat.unpin()
    assert not runner.cache.is_kept(chat.messages)


def test_store_is_the_earlier_name_of_keep_state(runner: Runner) -> None:
    chat = runner.chat(store=False, **SHORT)
    chat.send("Hello there")
    assert runner.cache.stats()["tokens"] == 0
    chat.send("Hello again", keep_state=True)
    assert runner.cache.stats()["tokens"] > 0
    with pytest.raises(bough.RequestError, match="store is its earlier name"):
        chat.send("Hello", keep_state=True, store=True)


def test_a_chat_is_saved_and_loaded_with_its_options(runner: Runner, tmp_path: Path) -> None:
    options: Any = {"stop": ("Köln",), "logit_bias": {5: -100.0}, "seed": 3, "temperature": 1.0, "salt": "müller", **SHORT}
    chat = runner.chat(system="Grüße 🙂", **options)
    chat.send("你好")
    chat.send([{"role": "tool", "content": "ß", "extra": [1, {"a": None}]}])
    chat.save(tmp_path / "chat.json")
    again = runner.load_chat(tmp_path / "chat.json")
    assert "Grüße 🙂" in (tmp_path / "chat.json").read_text(encoding="utf-8")
    assert (tmp_path / "chat.json").stat().st_mode & 0o077 == 0
    assert again.messages == chat.messages
    assert again.send("Hello").token_ids == chat.send("Hello").token_ids


GOOD: dict[str, Any] = {"format": "bough chat 1", "messages": [{"role": "user", "content": "Hello"}], "options": {}}
BAD = {
    "no json": "{",
    "no text": b"\xff\xfe",
    "too deep": "[" * 100_000,
    "no object": "[]",
    "another format": json.dumps({**GOOD, "format": "bough chat 2"}),
    "no messages": json.dumps({**GOOD, "messages": None}),
    "a bad message": json.dumps({**GOOD, "messages": ["Hello"]}),
    "bad options": json.dumps({**GOOD, "options": []}),
    "an unknown option": json.dumps({**GOOD, "options": {"temprature": 1}}),
    "a callback": json.dumps({**GOOD, "options": {"is_cancelled": 1}}),
    "a bad value": json.dumps({**GOOD, "options": {"temperature": "hot"}}),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_what_is_no_chat_is_refused(content: str | bytes, runner: Runner, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BoughError):
        runner.load_chat(file)
    with pytest.raises(BoughError, match="cannot be read"):
        runner.load_chat(tmp_path / "missing")


def test_a_chat_that_cannot_be_saved_leaves_the_file_as_it_was(runner: Runner, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text("before")
    for content in ({1, 2}, "\ud800"):
        with pytest.raises(BoughError, match="the chat was not saved"):
            Chat(runner, [{"role": "user", "content": content}]).save(file)
    with pytest.raises(BoughError, match="the chat was not saved"):
        runner.chat().save(tmp_path / "no folder" / "chat.json")
    assert file.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["chat.json"]


def test_misspelt_or_wrong_options_are_refused_when_the_chat_is_made(runner: Runner) -> None:
    with pytest.raises(RequestError, match="unknown option temprature"):
        runner.chat(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="temperature is -1"):
        runner.chat(temperature=-1)
    with pytest.raises(RequestError, match="unknown option on_progress"):
        runner.chat(on_progress=print)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="unknown option raw"):
        runner.chat().send("Hello", raw=True)  # type: ignore[call-arg]


def test_what_is_no_number_no_text_and_no_list_of_chats_is_refused(runner: Runner) -> None:
    chat = runner.chat()
    calls: dict[str, Callable[[], object]] = {
        "forked '2' times": lambda: chat.fork("2"),  # type: ignore[call-overload]
        "'1' cannot be taken back": lambda: chat.rewind("1"),  # type: ignore[arg-type]
        "system is a int": lambda: runner.chat(system=3),  # type: ignore[arg-type]
        "chats is one chat": lambda: runner.send_all(chat, "Hello"),  # type: ignore[arg-type]
    }
    for told, call in calls.items():
        with pytest.raises(RequestError, match=told):
            call()


def test_messages_of_a_chat_are_copies(runner: Runner) -> None:
    given: list[Any] = [{"role": "user", "content": "Hello", "extra": [1]}]
    chat = runner.chat(messages=given)
    given[0]["extra"].append(2)
    chat.messages[0]["extra"].append(3)
    chat.fork().messages.clear()
    assert chat.messages == [{"role": "user", "content": "Hello", "extra": [1]}]
    assert isinstance(chat.send([], **SHORT), Completion)  # the last message is answered as it is


@pytest.mark.parametrize("name", ["model", "messages", "self"])
def test_a_saved_chat_with_an_option_that_no_chat_has_is_refused(runner: Runner, name: str) -> None:
    plain = {**runner.chat().as_dict(), "options": {name: 1}}
    with pytest.raises(RequestError, match=f"unknown option {name}"):
        Chat.from_dict(runner, plain)


@pytest.mark.parametrize("given", [5, {5: 1}, {"limit": 5}, {"tools": 5}, {"raw": True}, {"prompt": "Hello"}])
def test_values_for_a_template_that_cannot_be_ones_are_refused(runner: Runner, given: Any) -> None:
    with pytest.raises(RequestError, match="template_kwargs"):
        runner.chat(template_kwargs=given).send("Hello", **SHORT)
