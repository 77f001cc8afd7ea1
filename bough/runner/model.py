"""What a model can do for a program, wherever it runs: `Runner` answers in this process, `RemoteRunner` asks a server.

A model says how one request, and how several, are answered; everything else here is made of that.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, Unpack, overload

from bough.cache.admin.node_view import NodeView
from bough.cache.admin.view import Explanation
from bough.errors import RequestError
from bough.runner.chat import AsyncPieces, Chat, ChatTurn, Content, Pieces
from bough.runner.delivery import WINDOW, OnDone, noting_number
from bough.runner.options import (
    BatchOptions,
    ChatOptions,
    EmbedOptions,
    PromptOptions,
    RequestOptions,
    SendAllOptions,
    number_choices,
)
from bough.system.tasks import gather
from bough.types import Chunk, Completion, Message, Prompt, SamplingParams

AnyRequest = tuple[Prompt, Mapping[str, Any]]
"""A prompt and its options."""

Vector = list[float]


class DrawnTree(Protocol):
    """The tree at one moment. `str` draws it."""

    @property
    def nodes(self) -> list[NodeView]: ...
    def as_dict(self, *, has_ids: bool = True) -> dict[str, Any]: ...
    def draw(self, width: int | None = None) -> str: ...


class ModelCache(Protocol):
    """The tree of a model, as far as a program that has it in a server can see and change it."""

    def tree(self, salt: str | None = None) -> DrawnTree: ...
    def stats(self, salt: str | None = None) -> dict[str, Any]: ...
    def explain(self, prompt: Prompt, *, salt: str = "", **template: Any) -> Explanation: ...
    def keep(self, prompt: Prompt, kept: bool = True, *, salt: str = "", **template: Any) -> Explanation: ...
    def clear(self, salt: str | None = None) -> None: ...


class Model(ABC):
    """A model that answers. Use it in a `with` statement, or call `close`.

    Requests of several threads and tasks run together; those without a free lane wait. Answers are greedy unless options
    say otherwise, whatever the model recommends: the same prompt gives the same text.
    """

    @property
    @abstractmethod
    def name(self) -> str: ...
    @property
    @abstractmethod
    def context_tokens(self) -> int:
        """The most tokens of a prompt and its answer together; of an encoder, those of one text."""

    @property
    @abstractmethod
    def cache(self) -> ModelCache: ...

    @abstractmethod
    def _stream(
        self, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any], *, wants_chunks: bool
    ) -> Pieces:
        """The pieces of an answer, then its completion; without `wants_chunks` perhaps the completion alone."""

    @abstractmethod
    def _astream(
        self, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any], *, wants_chunks: bool
    ) -> AsyncPieces:
        """As `_stream`, in a task."""

    @abstractmethod
    def _answer_all(
        self,
        requests: Sequence[AnyRequest],
        params: SamplingParams | None,
        options: Mapping[str, Any],
        on_done: OnDone | None = None,
    ) -> list[Completion]:
        """The answers to all requests, in their order. `options` has the callbacks. If one fails, all end."""

    @abstractmethod
    def warm(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> Completion:
        """Compute a prefix and keep it: everything that is not kept is evicted before it.

        Messages are kept up to the start of the next one, a text up to its end. Raises DoesNotFit.
        """

    @overload
    def embed(self, inputs: str, **options: Unpack[EmbedOptions]) -> Vector: ...  # type: ignore[overload-overlap]
    @overload
    def embed(self, inputs: Sequence[str], **options: Unpack[EmbedOptions]) -> list[Vector]: ...
    @abstractmethod
    def embed(self, inputs: str | Sequence[str], **options: Unpack[EmbedOptions]) -> Vector | list[Vector]:
        """The vector of a text, or the vectors of several, in their order; of a language model, the last hidden state.

        Texts get no chat template. A known prefix is reused, and nothing is kept. If one text fails, the others are
        cancelled, and its error is raised.
        """

    @abstractmethod
    def close(self) -> None:
        """End the use of the model. A second call does nothing."""

    # One request

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, n: None = None, **options: Unpack[RequestOptions]
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, n: int, **options: Unpack[RequestOptions]
    ) -> list[Completion]: ...
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """The whole answer; with `n` a list of n answers, each with its own choice number."""
        if n is not None:
            return self._answer_all([(prompt, each) for each in number_choices(n, options)], params, options)
        return last_of(self._stream(prompt, params, options, wants_chunks=False))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> Pieces:
        """Yield pieces of the answer, then the `Completion` that `generate` would return.

        Errors in prompt and options are raised by this call, others (DoesNotFit) with the first piece. Stop iterating, or
        close the iterator, to cancel; the computed state is kept.
        """
        return self._stream(prompt, params, options, wants_chunks=True)

    def stream_text(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Generator[str, None, None]:
        """As `stream`, but only the text."""
        pieces = self.stream(prompt, params, **options)
        return (piece.text for piece in pieces if isinstance(piece, Chunk) and piece.text)

    @overload
    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, n: None = None, **options: Unpack[RequestOptions]
    ) -> Completion: ...
    @overload
    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, n: int, **options: Unpack[RequestOptions]
    ) -> list[Completion]: ...
    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """As `generate`, in a task. Cancelling the task cancels the request."""
        if n is not None:
            choices = number_choices(n, options)
            return await gather([partial(self.agenerate, prompt, params, **each) for each in choices], WINDOW)
        return last_of([piece async for piece in self._astream(prompt, params, options, wants_chunks=False)])

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncPieces:
        """As `stream`, for `async for`. Errors in prompt and options are raised with the first piece, too."""
        return self._astream(prompt, params, options, wants_chunks=True)

    async def astream_text(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[str, None]:
        """As `astream`, but only the text."""
        async with contextlib.aclosing(self.astream(prompt, params, **options)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Chunk) and piece.text:
                    yield piece.text

    def batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        on_done: OnDone | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[Completion]:
        """The answers to many prompts, in their order; prefixes that they share are computed once.

        `on_done(number, completion)` is called for each. If one fails, the others are cancelled, and its error is raised.
        """
        return self._answer_all([(prompt, options) for prompt in _listed(prompts)], params, options, on_done)

    async def abatch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        on_done: OnDone | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[Completion]:
        """As `batch`, in a task. Cancelling the task cancels the requests."""

        async def answer(number: int, prompt: Prompt) -> Completion:
            with noting_number(number, len(prompts)):
                completion = await self.agenerate(prompt, params, **options)
            if on_done is not None:
                on_done(number, completion)
            return completion

        return await gather([partial(answer, number, prompt) for number, prompt in enumerate(_listed(prompts))], WINDOW)

    # Conversations

    def chat(self, system: str | None = None, *, messages: Sequence[Message] = (), **options: Unpack[ChatOptions]) -> Chat:
        """A new conversation, with a system prompt if given, or from the messages of another."""
        if system is not None and not isinstance(system, str):
            raise RequestError(f"system is a {type(system).__name__}, and must be a text")
        begin: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        return Chat(self, [*begin, *messages], **options)

    def load_chat(self, file: str | Path) -> Chat:
        """The conversation that `Chat.save` wrote. Raises BoughError if the file has none."""
        return Chat.load(self, file)

    def send_all(
        self, chats: Sequence[Chat], contents: str | Sequence[Content], **options: Unpack[SendAllOptions]
    ) -> list[Completion]:
        """Send a message in each of several conversations at once: one text for all, or a list with one for each.

        With a seed, each conversation has another answer, by its place in the list. If one fails, the others are cancelled,
        and its error is raised; answers that are done stay.
        """
        turns: list[ChatTurn] = []
        try:
            for number, (chat, each) in enumerate(_pair(chats, contents)):
                turns.append(chat.begin(each, {"choice": number, **options}))
            requests: list[AnyRequest] = [(turn.messages, turn.options) for turn in turns]
            return self._answer_all(requests, None, options, lambda number, answer: turns[number].end(answer))
        finally:
            for turn in turns:
                turn.close()

    async def asend_all(
        self, chats: Sequence[Chat], contents: str | Sequence[Content], **options: Unpack[SendAllOptions]
    ) -> list[Completion]:
        """As `send_all`, in a task. Cancelling the task cancels the requests."""
        pairs = enumerate(_pair(chats, contents))
        return await gather([partial(chat.asend, each, choice=number, **options) for number, (chat, each) in pairs], WINDOW)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _listed(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """The same prompts. Raises RequestError for a single text, whose characters would be prompts."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise RequestError(f"prompts is a {type(prompts).__name__}, and must be a list of prompts")
    return prompts


def _pair(chats: Sequence[Chat], contents: str | Sequence[Content]) -> list[tuple[Chat, Content]]:
    """Each chat with its message. Raises RequestError if there are not as many of both."""
    if isinstance(chats, Chat):
        raise RequestError("chats is one chat, and must be a list of chats")
    each_content = [contents] * len(chats) if isinstance(contents, str) else contents
    if len(each_content) != len(chats):
        raise RequestError(f"there are {len(each_content)} messages for {len(chats)} chats")
    return list(zip(chats, each_content, strict=True))


def last_of(pieces: Iterable[Chunk | Completion]) -> Completion:
    """The completion that ends a stream, which is read to its end."""
    *_, last = pieces
    assert isinstance(last, Completion)
    return last
