"""A model in a server is used as one in this process: the same calls, answers and figures, and one error for the rest."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

import bough
from bough import Chunk, Completion, Message, Model, RemoteRunner, RequestError, Runner
from bough.config import Settings
from bough.errors import AccessDenied, ModelNotFound, Unavailable
from bough.models import ModelFiles
from bough.types import Timings
from tests.runner import user_script
from tests.server.in_process import make_words_folder, serving, start_words
from tests.server.servers import Address

KEYS = ("first-key-of-this-test", "second-key-of-this-test")
SYSTEM = "You answer in a few words, whatever you are asked."
HELLO: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello there"}]
PROMPTS: dict[str, Any] = {"messages": HELLO, "a text": "Hello there", "ids": (5, 6, 7)}
GREEDY: dict[str, Any] = {"max_tokens": 6}


def toss(side: Literal["head", "tail"]) -> str:
    """Toss a coin."""
    return side


@dataclass
class Reply:
    yes: bool


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = make_words_folder(tmp_path_factory.mktemp("model") / "tiny", do_sample=True, temperature=0.9)
    return ModelFiles("tiny", folder)


@pytest.fixture(scope="module")
def served(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    home = tmp_path_factory.mktemp("serve")
    (home / "keys").write_text("\n".join(KEYS))
    with serving(files, home, keys_file=home / "keys") as server:
        yield server


@pytest.fixture(scope="module")
def connected(served: Address) -> Iterator[RemoteRunner]:
    with bough.connect(served.url, key=KEYS[0]) as remote:
        yield remote


@pytest.fixture
def remote(connected: RemoteRunner) -> RemoteRunner:
    connected.cache.clear()
    return connected


@pytest.fixture(scope="module")
def loaded(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("local")
    with Runner(start_words(files, Settings(disk=0, data_folder=folder, cache_folder=folder))) as runner:
        yield runner


@pytest.fixture
def local(loaded: Runner) -> Runner:
    loaded.cache.clear()
    return loaded


def without_times(completion: Completion) -> Completion:
    assert completion.timings.total_s > 0
    calls = tuple(replace(call, id="") for call in completion.tool_calls)
    return replace(completion, timings=Timings(), tool_calls=calls)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 7, "choice": 2},
        {"logprobs": 2, "prompt_logprobs": True},
        {"stop": ["e"], "logit_bias": {9: 5.0}, "loop_guard": False},
        {"format": Reply, "max_tokens": 60},
        {"tools": [toss], "tool_choice": "toss", "max_tokens": 90},
        {"tools": [toss], "tool_choice": "none"},
        {"keep_state": False, "salt": "apart"},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_answer_and_its_figures_are_those_of_a_model_in_this_process(
    local: Runner, remote: RemoteRunner, prompt: str, options: dict[str, Any]
) -> None:
    given: Any = PROMPTS[prompt]
    if prompt == "ids" and "tools" in options:
        pytest.skip("tools go with a chat")
    found = [[without_times(each.generate(given, **GREEDY | options)) for _ in range(2)] for each in (local, remote)]
    assert found[0] == found[1]
    assert (found[1][1].usage.cached_tokens > 0) is not ("prompt_logprobs" in options or "keep_state" in options)


def test_messages_with_calls_and_results_make_the_same_prompt(local: Runner, remote: RemoteRunner) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "toss", "arguments": '{"side": "head"}'}}
    messages: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "Toss it."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "head"},
        {"role": "assistant", "content": "Head."},
    ]
    found = [without_times(each.generate(messages, tools=[toss], **GREEDY)) for each in (local, remote)]
    assert found[0] == found[1]


def both(local: Runner, remote: RemoteRunner) -> tuple[Model, Model]:
    return local, remote


def test_a_stream_ends_with_the_completion_and_reports_the_prompts_progress(local: Runner, remote: RemoteRunner) -> None:
    for model in both(local, remote):
        seen: list[tuple[int, int]] = []
        *pieces, last = model.stream(HELLO, on_progress=lambda done, total, seen=seen: seen.append((done, total)), **GREEDY)
        assert isinstance(last, Completion)
        assert "".join(piece.text for piece in pieces if isinstance(piece, Chunk)) == last.text
        assert "".join(model.stream_text(HELLO, **GREEDY)) == last.text
        assert seen[-1] == (last.usage.prompt_tokens, last.usage.prompt_tokens)


def test_a_cancelled_answer_returns_what_has_come_and_a_stream_can_be_left(remote: RemoteRunner) -> None:
    come: list[str] = []
    for piece in remote.stream(HELLO, max_tokens=1000, is_cancelled=lambda: len(come) > 2):
        if isinstance(piece, Chunk):
            come.append(piece.text)
    assert isinstance(piece, Completion) and piece.finish_reason == "cancelled" and piece.text == "".join(come)
    with pytest.raises(ZeroDivisionError):
        remote.generate(HELLO, max_tokens=1000, is_cancelled=lambda: bool(1 / 0))
    for _ in remote.stream(HELLO, max_tokens=1000):
        break
    assert remote.generate(HELLO, max_tokens=1).usage.cached_tokens > 0


def test_tasks_get_the_same_answers_and_end_their_requests_when_they_are_cancelled(
    local: Runner, remote: RemoteRunner
) -> None:
    async def ask(model: Model) -> tuple[list[str], str]:
        answers = await asyncio.gather(*(model.agenerate(text, **GREEDY) for text in ("One", "Two", "Three")))
        with pytest.raises(RequestError):
            await model.agenerate("One", salt=5)  # type: ignore[arg-type]
        task = asyncio.create_task(model.agenerate("Four", max_tokens=1500))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [each.text for each in answers], "".join([text async for text in model.astream_text("One", **GREEDY)])

    assert asyncio.run(ask(local)) == asyncio.run(ask(remote))


def test_a_batch_and_several_choices_come_in_their_order_and_fail_together(local: Runner, remote: RemoteRunner) -> None:
    found = []
    for model in both(local, remote):
        done: dict[int, str] = {}
        batch = model.batch(
            ["One", HELLO, "Three"], on_done=lambda i, each, done=done: done.update({i: each.text}), **GREEDY
        )
        drawn = model.generate("One", n=3, temperature=1.0, seed=3, **GREEDY)
        assert done == {number: each.text for number, each in enumerate(batch)}
        with pytest.raises(RequestError) as caught:
            model.batch(["One", "tree " * 3_000], **GREEDY)
        assert caught.value.__notes__ == ["That is number 1 of 2, counted from 0."]
        found.append([each.text for each in (*batch, *drawn)])
    assert found[0] == found[1]


def test_a_chat_is_forked_rewound_kept_and_saved(local: Runner, remote: RemoteRunner, tmp_path: Path) -> None:
    found = []
    for model in both(local, remote):
        chat = model.chat(system=SYSTEM, **GREEDY)
        chat.send("Hello there")
        chat.keep()
        assert any(node.kept for node in model.cache.tree().nodes)
        left, right = chat.fork(2)
        answers = model.send_all([left, right], "And then?", temperature=1.0, seed=3)
        assert all(each.usage.cached_tokens > 0 for each in answers)
        left.rewind()
        assert left.messages == chat.messages
        chat.unkeep()
        assert not any(node.kept for node in model.cache.tree().nodes)
        chat.save(tmp_path / "chat.json")
        assert model.load_chat(tmp_path / "chat.json").messages == chat.messages
        found.append([chat.messages, right.messages])
    assert found[0] == found[1]


def test_the_tree_is_seen_explained_and_cleared(local: Runner, remote: RemoteRunner) -> None:
    found = []
    for model in both(local, remote):
        warmed = model.warm(HELLO)
        assert (warmed.text, warmed.usage.computed_tokens, warmed.usage.cached_tokens) == (
            "",
            warmed.usage.prompt_tokens,
            0,
        )
        model.generate(HELLO, **GREEDY)
        why = model.cache.explain([*HELLO, {"role": "assistant", "content": "Yes"}, HELLO[-1]])
        tree, stats = model.cache.tree(), model.cache.stats()
        assert "<|im_start|>system" in str(tree) and SYSTEM in tree.nodes[0].text
        assert len(tree.nodes) == stats["nodes"]
        plain = [(node.start, node.end, node.text, node.token_ids, node.kept) for node in tree.nodes]
        found.append((warmed.usage, replace(why, node=0, root=""), plain))
        model.cache.clear()
        assert model.cache.tree().nodes == [] and model.cache.stats()["nodes"] == 0
    assert found[0] == found[1]


def test_salts_are_apart_and_each_is_seen_alone(remote: RemoteRunner) -> None:
    remote.generate(HELLO, salt="one", **GREEDY)
    assert remote.cache.explain(HELLO, salt="two").matched_tokens == 0
    assert remote.cache.explain(HELLO, salt="one").matched_tokens > 0
    assert remote.cache.stats("one")["nodes"] > 0 == remote.cache.stats("two")["nodes"]
    remote.cache.clear("one")
    assert remote.cache.explain(HELLO, salt="one").matched_tokens == 0


def test_texts_become_vectors(local: Runner, remote: RemoteRunner) -> None:
    found = [[model.embed("A tree", dimensions=4), *model.embed(["A river", "Rain"])] for model in both(local, remote)]
    assert all(there == pytest.approx(here) for here, there in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda remote: remote.tokenize("Hello"), "tokenize needs a model in this process"),
        (lambda remote: remote.rerank("Hello", ["a"]), "rerank needs a model in this process"),
        (lambda remote: remote.runtime, "runtime needs a model in this process"),
        (lambda remote: remote.embed("Hello", normalize=False), "normalize=False needs"),
        (lambda remote: remote.cache.explain([1, 2]), "no token ids"),
        (lambda remote: remote.generate(HELLO, template_kwargs={"x": 1}), "enable_thinking alone"),
        (lambda remote: remote.generate(HELLO, heat=1), "unknown option heat"),
        (lambda remote: remote.generate(["Hello"]), "`batch` takes those"),
        (lambda remote: remote.generate([1, "a"]), "flat list of token ids"),
        (lambda remote: remote.generate("tree " * 3_000), "tokens, and the context holds"),
        (lambda remote: remote.cache.keep([{"role": "user", "content": "Never"}]), "tokens are known"),
    ],
)
def test_what_a_server_does_not_do_is_one_clear_error(remote: RemoteRunner, call: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        call(remote)


def test_there_is_no_connection_without_a_server_its_key_and_its_model(served: Address) -> None:
    with pytest.raises(AccessDenied, match="key"):
        bough.connect(served.url, key="another")
    with pytest.raises(ModelNotFound, match="nowhere"):
        bough.connect(served.url, "nowhere", KEYS[0])
    with pytest.raises(Unavailable, match="no server at"):
        bough.connect("http://127.0.0.1:9", key="")


def test_a_closed_runner_is_an_error_and_leaves_the_model_to_others(served: Address, remote: RemoteRunner) -> None:
    with bough.connect(served.url, "tiny", KEYS[0]) as other:
        assert (other.name, other.context_tokens) == (remote.name, 2048)
        assert served.url in repr(other)
    with pytest.raises(RequestError, match="is closed"):
        other.cache.stats()
    with pytest.raises(RequestError, match="is closed"):
        other.generate(HELLO)
    assert remote.generate(HELLO, **GREEDY).text


def test_a_program_for_any_model_runs_with_a_server(files: ModelFiles, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a-key")
    with serving(files, tmp_path, keys_file=tmp_path / "keys") as server:
        user_script.connect(server.url, tmp_path)


def test_connecting_imports_no_engine() -> None:
    code = "import sys, bough; bough.connect; print([name for name in ('torch', 'mlx', 'fastapi') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
