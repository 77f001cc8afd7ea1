"""A model in a running server, for programs that would otherwise load it a second time. No engine is imported."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from typing import Any, Unpack, overload

from bough.client.answers import read_timings, stream_answer
from bough.client.http import Client
from bough.config import load_settings
from bough.errors import RequestError
from bough.prompting.ask import Ask
from bough.runner.chat import AsyncPieces, Pieces
from bough.runner.delivery import OnDone, noting_number
from bough.runner.model import AnyRequest, Model, Vector, last_of
from bough.runner.options import EmbedOptions, PromptOptions, ask_of, check_options
from bough.runner.remote_cache import RemoteCache, write_messages, write_prefix
from bough.runner.runner import Runner
from bough.system.inbox import Inbox, Mailbox
from bough.types import Chunk, Completion, Prompt, SamplingParams, Usage

MOST_AT_ONCE = 16
"""The most requests of a batch that the server has at a time."""


def connect(url: str, model: str | None = None, key: str | None = None) -> RemoteRunner:
    """The model in the server at an address; without a name, the server's default model. It is loaded if need be.

    Without a key, that of the settings is used. Raises Unavailable if there is no server, ModelNotFound, AccessDenied.
    """
    client = Client(url, load_settings({}).api_key if key is None else key)
    try:
        return RemoteRunner(client, client.post("/api/run/load", model=model))
    except BaseException:
        client.close()
        raise


class RemoteRunner(Model):
    """A model in a server. Closing it ends no answer of others, and leaves the model in the server."""

    def __init__(self, client: Client, facts: Mapping[str, Any]) -> None:
        self._client = client
        self._facts = facts

    def __repr__(self) -> str:
        return f"<RemoteRunner {self.name} on {self._facts['engine']}, {self._facts['device']}, at {self._client.url}>"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Runner, name):
            raise RequestError(f"{name} needs a model in this process, and {self.name} is at {self._client.url}")
        raise AttributeError(f"a RemoteRunner has no {name}")

    @property
    def name(self) -> str:
        return str(self._facts["model"])

    @property
    def context_tokens(self) -> int:
        return int(self._facts["context_tokens"])

    @property
    def cache(self) -> RemoteCache:
        return RemoteCache(self._client, self.name)

    def _stream(
        self, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any], *, wants_chunks: bool
    ) -> Pieces:
        return self._send(prompt, params, options, threading.Event())

    def _send(
        self, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any], is_unwanted: threading.Event
    ) -> Pieces:
        """The pieces of an answer, until it is unwanted. The request begins when the first piece is asked for."""
        ask = ask_of(prompt, params, options)
        is_cancelled = options.get("is_cancelled") or (lambda: False)
        return stream_answer(
            self._client,
            {"model": self.name, **_write_ask(ask)},
            ask.salt,
            is_cancelled=lambda: is_unwanted.is_set() or bool(is_cancelled()),
            on_progress=options.get("on_progress") or (lambda done_tokens, total_tokens: None),
        )

    async def _astream(
        self, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any], *, wants_chunks: bool
    ) -> AsyncPieces:
        """As `_stream`. A thread reads, and calls the user's callbacks."""
        mailbox: Mailbox[Chunk | Completion | BaseException] = Mailbox()
        inbox, is_unwanted = Inbox[Chunk | Completion | BaseException](asyncio.get_running_loop()), threading.Event()

        def read() -> None:
            try:
                for piece in self._send(prompt, params, options, is_unwanted):
                    inbox.put(mailbox, piece)
            except BaseException as error:
                inbox.put(mailbox, error)

        threading.Thread(target=read, name="bough-answer", daemon=True).start()
        try:
            while True:
                for news in await mailbox.take():
                    if isinstance(news, BaseException):
                        raise news
                    yield news
                    if isinstance(news, Completion):
                        return
        finally:
            is_unwanted.set()

    def _answer_all(
        self,
        requests: Sequence[AnyRequest],
        params: SamplingParams | None,
        options: Mapping[str, Any],
        on_done: OnDone | None = None,
    ) -> list[Completion]:
        is_unwanted = threading.Event()

        def answer(number: int) -> Completion:
            prompt, own = requests[number]
            with noting_number(number, len(requests)):
                return last_of(
                    self._send(prompt, params, own if number == 0 else {**own, "on_progress": None}, is_unwanted)
                )

        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            numbers = {pool.submit(answer, number): number for number in range(len(requests))}
            try:
                for done in as_completed(numbers):
                    completion = done.result()
                    if on_done is not None:
                        on_done(numbers[done], completion)
            except BaseException:
                is_unwanted.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [each.result() for each in numbers]

    @overload
    def embed(self, inputs: str, **options: Unpack[EmbedOptions]) -> Vector: ...  # type: ignore[overload-overlap]
    @overload
    def embed(self, inputs: Sequence[str], **options: Unpack[EmbedOptions]) -> list[Vector]: ...
    def embed(self, inputs: str | Sequence[str], **options: Unpack[EmbedOptions]) -> Vector | list[Vector]:
        check_options(options, EmbedOptions.__annotations__)
        if not options.get("normalize", True):
            raise RequestError("a server scales vectors to length 1: normalize=False needs a model in this process")
        given = {"input": inputs if isinstance(inputs, str) else list(inputs), "dimensions": options.get("dimensions")}
        body = {"model": self.name, "truncate": options.get("truncate", True), **given}
        vectors: list[Vector] = self._client.post("/api/embed", options.get("salt", ""), **body)["embeddings"]
        return vectors[0] if isinstance(inputs, str) else vectors

    def warm(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> Completion:
        check_options(options, PromptOptions.__annotations__)
        body = {"model": self.name, **write_prefix(prompt, options)}
        found = self._client.post("/api/cache/warm", options.get("salt", ""), **body)
        counts = (found[name] for name in ("prompt_tokens", "matched_tokens", "cached_tokens", "computed_tokens"))
        return Completion("", (), "length", Usage(*counts), read_timings(found["timings"]))

    def close(self) -> None:
        self._client.close()


def _write_ask(ask: Ask) -> dict[str, Any]:
    """An ask as the body of /api/run. Raises RequestError for what a server does not take."""
    if others := set(ask.template_kwargs) - {"enable_thinking"}:
        raise RequestError(f"a server takes enable_thinking alone of template_kwargs, and not {', '.join(sorted(others))}")
    return {
        "messages": write_messages(ask),
        "prompt": ask.text,
        "ids": _write_ids(ask.ids),
        "raw": not ask.is_message,
        "tools": list(ask.tools),
        "tool_choice": ask.tool_choice.name or ask.tool_choice.mode,
        "think": ask.template_kwargs.get("enable_thinking"),
        "continues_answer": False,
        "prompt_logprobs": ask.scores_prompt,
        "keep_state": ask.keep_state,
        "choice": ask.first_choice,
        "params": asdict(ask.params),
    }


def _write_ids(ids: Sequence[int] | None) -> list[int] | None:
    try:
        return None if ids is None else [operator.index(each) for each in ids]
    except TypeError as error:
        raise RequestError(f"a prompt is a text, messages, or a flat list of token ids: {error}") from error
