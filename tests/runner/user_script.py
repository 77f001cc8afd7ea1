"""A script as a user writes it, which uses every public name, each with its types.

A test checks it with `mypy --strict`, and runs it on tiny models.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

import bough
from bough import (
    BatchOptions,
    BoughError,
    Chat,
    ChatOptions,
    Chunk,
    Completion,
    DoesNotFit,
    DownloadError,
    EmbedOptions,
    EngineError,
    LanesBusy,
    LoadOptions,
    Message,
    Model,
    ModelError,
    ModelNotFound,
    PromptTooLong,
    RankedDocument,
    RemoteRunner,
    RequestError,
    RequestOptions,
    Runner,
    SamplingOptions,
    SamplingParams,
    SettingsError,
    Timings,
    TokenLogprob,
    ToolCall,
    UnsupportedModel,
    Usage,
)

ERRORS: list[type[BoughError]] = [
    DoesNotFit,
    DownloadError,
    EngineError,
    LanesBusy,
    ModelError,
    ModelNotFound,
    PromptTooLong,
    RequestError,
    SettingsError,
    UnsupportedModel,
]
SHORT: SamplingOptions = {"max_tokens": 3, "temperature": 0.5, "seed": 1, "stop": ["\n\n"], "logit_bias": {5: -1.0}}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
QUESTION: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]


def show(answer: Completion) -> str:
    usage: Usage = answer.usage
    timings: Timings = answer.timings
    reason: str = answer.finish_reason
    scores: tuple[TokenLogprob, ...] = answer.logprobs
    calls: tuple[ToolCall, ...] = answer.tool_calls
    assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
    assert timings.total_s >= 0
    assert isinstance(answer.token_ids, tuple)
    numbers = (len(scores), len(answer.prompt_logprobs), len(calls))
    return f"{answer.text} ({reason}, {answer.stop}, {numbers})"


def ask(runner: Runner, prompt: str, **options: Unpack[RequestOptions]) -> str:
    """Pass typed options on."""
    return show(runner.generate(prompt, **options))


def ask_many(runner: Model, prompts: list[str], **options: Unpack[BatchOptions]) -> list[str]:
    def on_done(number: int, answer: Completion) -> None:
        assert show(answer)

    return [answer.text for answer in runner.batch(prompts, on_done=on_done, **options)]


def generate(runner: Runner) -> None:
    assert ask(runner, "Hello", on_progress=lambda done, total: None, **SHORT)
    assert ask(runner, "Hello", tools=TOOLS, max_tokens=2)
    assert ask(runner, "Hello", logprobs=2, prompt_logprobs=True, max_tokens=2)
    assert len(ask_many(runner, ["Hello", "Hello there"], is_cancelled=lambda: False, max_tokens=2)) == 2
    answers: list[Completion] = runner.generate([3, 4, 5], SamplingParams(max_tokens=2), n=2, salt="me", keep_state=False)
    assert len(answers) == 2
    with closing(runner.stream("Hello", raw=True, max_tokens=2)) as pieces:
        for piece in pieces:
            text: str = piece.text if isinstance(piece, Chunk) else show(piece)
            assert isinstance(text, str)
    words: Iterator[str] = runner.stream_text(
        QUESTION, max_tokens=2, tools=None, template_kwargs={"enable_thinking": False}
    )
    assert "".join(words) is not None
    params: SamplingParams = runner.model_params(**SHORT)
    assert runner.detokenize(runner.tokenize("Hello", raw=True)) == "Hello"
    assert params.max_tokens == 3


async def agenerate(runner: Runner) -> None:
    one: Completion = await runner.agenerate("Hello", **SHORT)
    several: list[Completion] = await runner.agenerate("Hello", n=2, choice=1, **SHORT)
    assert show(one) and show(several[0])
    async with aclosing(runner.astream("Hello", ignore_eos=True, max_tokens=2)) as pieces:
        async for piece in pieces:
            assert isinstance(piece.text, str)
    words: AsyncIterator[str] = runner.astream_text("Hello", max_tokens=2, format="json")
    assert isinstance("".join([word async for word in words]), str)
    assert len(await runner.abatch(["Hello", QUESTION], max_tokens=2, on_done=lambda number, answer: None)) == 2
    chat: Chat = runner.chat()
    reply: Completion = await chat.asend("Hello", max_tokens=2)
    assert show(reply)
    async for part in chat.astream("Hello", max_tokens=2):
        assert isinstance(part, Chunk | Completion)
    async for word in chat.astream_text("Hello", max_tokens=2):
        assert word
    assert len(await runner.asend_all(chat.fork(2), "Hello", max_tokens=2)) == 2


def make_chat(runner: Model, **options: Unpack[ChatOptions]) -> Chat:
    return runner.chat("Be brief.", messages=QUESTION, **options)


def converse(runner: Model, folder: Path) -> None:
    chat = make_chat(runner, max_tokens=2, salt="me")
    assert show(chat.send("Hello", is_cancelled=None))
    assert chat.send([{"role": "tool", "content": "42"}]).text is not None
    assert all(isinstance(piece, Chunk | Completion) for piece in chat.stream("Hello"))
    assert isinstance("".join(chat.stream_text("Hello")), str)
    branch: Chat = chat.fork()
    branches: list[Chat] = chat.fork(2)
    answers: list[Completion] = runner.send_all([branch, *branches], ["one", "two", "three"], temperature=0.7)
    removed: list[Message] = branch.rewind(1)
    assert len(answers) == 3 and removed
    chat.keep()
    chat.unkeep()
    chat.pin()  # the earlier names
    chat.unpin()
    chat.save(folder / "chat.json")
    again: Chat = runner.load_chat(folder / "chat.json")
    plain: dict[str, Any] = again.as_dict()
    same: list[Chat] = [Chat.load(runner, folder / "chat.json"), Chat.from_dict(runner, plain)]
    assert [each.messages for each in same] == [chat.messages] * 2
    assert (len(chat), chat.num_turns) == (len(again), again.num_turns)
    assert repr(chat) == repr(again)


def embed(runner: Runner, **options: Unpack[EmbedOptions]) -> None:
    one: list[float] = runner.embed("Hello", **options)
    several: list[list[float]] = runner.embed(["Hello", "Hello there"], **options)
    again: list[float] = asyncio.run(runner.aembed("Hello", **options))
    assert len(one) == len(several[1]) == len(again) == 8


def rank(reranker: Runner) -> None:
    ranked: list[RankedDocument] = reranker.rerank("cat", ["a dog", "a cat"], top_n=2)
    again: list[RankedDocument] = asyncio.run(reranker.arerank("cat", ["a dog", "a cat"], truncate=False))
    assert [each.index for each in ranked] == [each.index for each in again]
    assert ranked[0].score >= ranked[1].score


def look(runner: Runner) -> None:
    warmed: Completion = runner.warm("Hello", raw=True)
    facts: dict[str, str] = runner.describe()
    numbers: dict[str, Any] = runner.cache.stats()
    name: str = runner.name
    assert warmed.finish_reason == "length" and facts["name"] == name and numbers["busy_lanes"] == 0
    assert runner.context_tokens > 0 and str(runner.cache.tree()) and name in repr(runner)
    assert runner.cache.is_kept("Hello", raw=True) and runner.cache.explain("Hello", raw=True)
    runner.cache.clear()


def connect(url: str, folder: Path) -> None:
    """Use a model of a server in the same way. Another test runs this."""
    with bough.connect(url, "tiny", key="a-key") as remote:
        again: RemoteRunner = remote
        converse(again, folder)
        one: list[float] = again.embed("Hello", dimensions=8)
        assert one and again.cache.explain("Hello").prompt_tokens and again.cache.stats("me")["nodes"]


@dataclass
class Reply:
    yes: bool


def toss(side: Literal["head", "tail"]) -> str:
    """Toss a coin."""
    return side


def use_python(runner: Model) -> None:
    """Types and functions of Python as format and tools."""
    called: Completion = runner.generate("Hello", tools=[toss], tool_choice="required", max_tokens=200)
    reply: Reply = runner.generate("Hello", format=Reply, max_tokens=200).parse(Reply)
    assert toss(**called.tool_calls[0].arguments) in ("head", "tail") and isinstance(reply.yes, bool)


def main(model: str | Path, reranker: str | Path, folder: Path) -> None:
    options: LoadOptions = {"engine": "torch", "device": "cpu", "disk": 0, "cache_folder": folder, "lanes": 2}
    with bough.load(model, **options) as runner:
        generate(runner)
        asyncio.run(agenerate(runner))
        converse(runner, folder)
        use_python(runner)
        embed(runner, dimensions=8, truncate=False, normalize=False, salt="me")
        look(runner)
    with bough.load(reranker, device="cpu") as ranker:
        rank(ranker)
    try:
        runner.generate("Hello")
    except RequestError as error:
        assert isinstance(error, BoughError) and all(issubclass(each, BoughError) for each in ERRORS)
