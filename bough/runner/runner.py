"""The library: a loaded model that answers many threads and tasks at once, from one tree."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, overload

from bough.errors import RequestError
from bough.generate.generation import Generation
from bough.models.defaults import unset_names
from bough.models.encoders.kinds import ModelKind
from bough.models.prompts import Encoded
from bough.runner.batch import OnDone, gather, run_batch
from bough.runner.chat import AsyncPieces, Chat, Content, Pieces, Turn
from bough.runner.delivery import Callbacks, Loops, Reader, deliver, telling_number
from bough.runner.embedding import Vector, finish, start_texts
from bough.runner.options import (
    BatchOptions,
    ChatOptions,
    EmbedOptions,
    PromptOptions,
    RequestOptions,
    SamplingOptions,
    SendAllOptions,
    check_options,
    make_params,
    number_choices,
    request_of,
    sampling_of,
    template_of,
)
from bough.runner.reranking import check_top_n, start_documents
from bough.runner.texts import run_texts, run_texts_async
from bough.runtime import EncoderRuntime, Runtime
from bough.runtime.cache_handle import CacheHandle
from bough.runtime.encoding import EncoderReranker, Ranked, rank
from bough.scheduling.worker import Worker
from bough.types import Chunk, Completion, Message, Prompt, SamplingParams


class Runner:
    """A loaded model with its tree. Use it in a `with` statement, or call `close`.

    Requests of several threads and tasks run together; those that find no free lane wait for one. Answers are greedy unless
    options say otherwise, whatever the model recommends: the same prompt gives the same text.
    """

    def __init__(self, runtime: Runtime | EncoderRuntime) -> None:
        self._loaded = runtime
        self._loops = Loops()
        self._close_soon = weakref.finalize(self, runtime.close_soon)  # a runner that is dropped ends its thread
        self._close_soon.atexit = False

    @property
    def runtime(self) -> Runtime:
        """The parts of the loaded model, for benchmarks and tests. Not stable.

        Raises RequestError if the model is an encoder, and so do all methods that need a model that generates text.
        """
        if isinstance(self._loaded, EncoderRuntime):
            raise RequestError(f"the model {self.name} {self._loaded.kind.value}, and generates no text")
        return self._loaded

    @property
    def name(self) -> str:
        """The model's name."""
        return self._loaded.name

    @property
    def context_tokens(self) -> int:
        """The most tokens that a prompt and its answer may have together; of an encoder, those of one text."""
        return self._loaded.engine.context_tokens

    @property
    def cache(self) -> CacheHandle:
        """The tree: what is in it, and what can be done with it."""
        self.runtime.require_open()
        return self.runtime.cache

    @property
    def _worker(self) -> Worker:
        """The engine's thread. Raises RequestError after `close`, and in a forked process, before any lock is taken."""
        self.runtime.require_open()
        return self.runtime.worker

    def describe(self) -> dict[str, str]:
        """Engine, device, types and versions, for people."""
        self._loaded.require_open()
        return {"name": self.name, **self._loaded.engine.describe()}

    def __repr__(self) -> str:
        info = self._loaded.engine.info
        if isinstance(self._loaded, EncoderRuntime):
            more = self._loaded.kind.value
        else:
            more = f"{len(self._loaded.prefix_cache.lanes.slots)} lanes"
        return f"<Runner {self.name} ({info.model}) on {info.name}, {info.device}, {info.weights}: {more}>"

    def tokenize(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> list[int]:
        """The token ids of a prompt, as a request would have them."""
        check_options(options, PromptOptions.__annotations__)
        return list(self._encode(prompt, dict(options)).ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Raises RequestError if one is none of the vocabulary."""
        return self.runtime.prompts.decode(self.runtime.prompts.check_ids(ids))

    def model_params(self, **given: Unpack[SamplingOptions]) -> SamplingParams:
        """The sampling that the model recommends, with the given values instead. Raises RequestError for an invalid one.

        If nothing is known of the model, what is not given is as in `SamplingParams`.
        """
        return self.runtime.defaults.fill(make_params(None, given), unset_names(dict(given)))

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
        """The whole answer; with `n` a list of so many answers, each by its own choice number."""
        if n is not None:
            return self._generate_choices(prompt, params, n, options)
        return _last(self._stream(prompt, params, options, wants_chunks=False))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> Pieces:
        """Yield pieces of the answer, then the same `Completion` that `generate` returns.

        Errors in prompt and options are raised by this call, others (DoesNotFit) with the first piece. Stop iterating, or
        close the iterator, to cancel; the work that was done is kept.
        """
        return self._stream(prompt, params, options, wants_chunks=True)

    def stream_text(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Generator[str, None, None]:
        """As `stream`; yields the text of the answer alone."""
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
            return await gather([partial(self.agenerate, prompt, params, **each) for each in choices])
        return _last([piece async for piece in self._astream(prompt, params, options, wants_chunks=False)])

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncPieces:
        """As `stream`, for `async for`. Errors in prompt and options are raised with the first piece, too."""
        return self._astream(prompt, params, options, wants_chunks=True)

    async def astream_text(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[str, None]:
        """As `astream`; yields the text of the answer alone."""
        async with contextlib.aclosing(self.astream(prompt, params, **options)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Chunk) and piece.text:
                    yield piece.text

    def _stream(
        self, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any], *, wants_chunks: bool
    ) -> Pieces:
        worker, reader = self._worker, Reader(self, _callbacks(options), wants_chunks=wants_chunks)
        return deliver(worker, self._prepare(prompt, params, options, reader), reader)

    def _astream(
        self, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any], *, wants_chunks: bool
    ) -> AsyncPieces:
        worker, reader = self._worker, Reader(self, _callbacks(options), wants_chunks=wants_chunks)
        return self._loops.deliver(worker, partial(self._prepare, prompt, params, options), reader)

    def _prepare(
        self, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any], reader: Reader
    ) -> Generation:
        encoded = self._encode(prompt, options)
        reader.tools = options.get("tools") or ()
        reader.starts_thinking = bool(reader.tools) and self.runtime.prompts.starts_thinking(encoded)
        return self.runtime.prepare(
            encoded,
            sampling_of(params, options),
            **request_of(options),
            is_cancelled=reader.cancellation.check,
            on_progress=reader.on_progress,
        )

    def _encode(self, prompt: Prompt, options: Mapping[str, Any]) -> Encoded:
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str):
            raise RequestError(
                "a prompt is a text, messages, or token ids, and this is a list of texts: `batch` takes those"
            )
        return self.runtime.user_prompts.encode(prompt, **template_of(options))

    def _encode_prefix(self, prompt: Prompt, options: Mapping[str, Any]) -> Encoded:
        return self.runtime.user_prompts.encode_prefix(prompt, **template_of(options))

    # Many requests

    def batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        on_done: OnDone | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[Completion]:
        """The answers to many prompts, in their order, computed together: what prompts have in common is computed once.

        `on_done(number, completion)` is called as each is done. If one fails, the others are cancelled, and its error is
        raised.
        """
        requests = [partial(self._prepare, prompt, params, options) for prompt in _listed(prompts)]
        return run_batch(self, self._worker, requests, _callbacks(options), on_done)

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
            with telling_number(number, len(prompts)):
                completion = await self.agenerate(prompt, params, **options)
            if on_done is not None:
                on_done(number, completion)
            return completion

        return await gather([partial(answer, number, prompt) for number, prompt in enumerate(_listed(prompts))])

    def _generate_choices(
        self, prompt: Prompt, params: SamplingParams | None, n: int, options: RequestOptions
    ) -> list[Completion]:
        requests = [partial(self._prepare, prompt, params, each) for each in number_choices(n, options)]
        return run_batch(self, self._worker, requests, _callbacks(options))

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, truncate: bool = True
    ) -> list[Ranked]:
        """The documents by how well they answer a query, the best first; with `top_n` so many. Needs a reranker.

        What is too long for the model is cut, or with `truncate=False` raises PromptTooLong.
        """
        check_top_n(top_n)
        found = run_texts(start_documents(self._reranker, query, documents, truncate=truncate))
        return rank((each.score for each in found), top_n)

    async def arerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, truncate: bool = True
    ) -> list[Ranked]:
        """As `rerank`, in a task."""
        check_top_n(top_n)
        starts = start_documents(self._reranker, query, documents, truncate=truncate)
        return rank((each.score for each in await run_texts_async(starts)), top_n)

    @property
    def _reranker(self) -> EncoderReranker:
        if isinstance(self._loaded, EncoderRuntime):
            return self._loaded.reranker
        raise RequestError(f"the model {self.name} generates text: this needs one that {ModelKind.RERANKER.value}")

    # Conversations

    def chat(self, system: str | None = None, *, messages: Sequence[Message] = (), **options: Unpack[ChatOptions]) -> Chat:
        """A new conversation, with a system prompt if given, or from the messages of another."""
        if system is not None and not isinstance(system, str):
            raise RequestError(f"system is a {type(system).__name__}, and must be a text")
        begin: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        return Chat(self, [*begin, *messages], **options)

    def load_chat(self, file: str | Path) -> Chat:
        """The conversation that `Chat.save` wrote. Raises BoughError if the file holds none."""
        return Chat.load(self, file)

    def send_all(
        self, chats: Sequence[Chat], contents: str | Sequence[Content], **options: Unpack[SendAllOptions]
    ) -> list[Completion]:
        """Send a message in each of several conversations, together: one text for all, or a list with one for each.

        With a seed, each conversation has another answer, by its place in the list. If one fails, the others are cancelled,
        and its error is raised; a conversation whose answer is done keeps it.
        """
        turns: list[Turn] = []
        try:
            for number, (chat, each) in enumerate(_pair(chats, contents)):
                turns.append(chat.begin(each, {"choice": number}, options))
            requests = [partial(self._prepare, turn.messages, None, turn.options) for turn in turns]
            return run_batch(self, self._worker, requests, _callbacks(options), partial(_end_turn, turns))
        finally:
            for turn in turns:
                turn.close()

    async def asend_all(
        self, chats: Sequence[Chat], contents: str | Sequence[Content], **options: Unpack[SendAllOptions]
    ) -> list[Completion]:
        """As `send_all`, in a task. Cancelling the task cancels the requests."""
        pairs = enumerate(_pair(chats, contents))
        return await gather([partial(chat.asend, each, choice=number, **options) for number, (chat, each) in pairs])

    # Embeddings

    @overload
    def embed(self, inputs: str, **options: Unpack[EmbedOptions]) -> Vector: ...  # type: ignore[overload-overlap]
    @overload
    def embed(self, inputs: Sequence[str], **options: Unpack[EmbedOptions]) -> list[Vector]: ...
    def embed(self, inputs: str | Sequence[str], **options: Unpack[EmbedOptions]) -> Vector | list[Vector]:
        """The vector of a text, or the vectors of several, in their order. A language model's is its last hidden state.

        Texts are taken without the chat template. A known prefix is reused, and nothing is kept. If one text fails, the
        others are cancelled, and its error is raised.
        """
        vectors = finish(run_texts(start_texts(self._loaded.embedder, inputs, options)), options)
        return vectors[0] if isinstance(inputs, str) else vectors

    @overload
    async def aembed(self, inputs: str, **options: Unpack[EmbedOptions]) -> Vector: ...  # type: ignore[overload-overlap]
    @overload
    async def aembed(self, inputs: Sequence[str], **options: Unpack[EmbedOptions]) -> list[Vector]: ...
    async def aembed(self, inputs: str | Sequence[str], **options: Unpack[EmbedOptions]) -> Vector | list[Vector]:
        """As `embed`, in a task. Cancelling the task cancels the texts that are not done."""
        vectors = finish(await run_texts_async(start_texts(self._loaded.embedder, inputs, options)), options)
        return vectors[0] if isinstance(inputs, str) else vectors

    # Keeping prefixes

    def warm(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> Completion:
        """Compute a prefix and keep it: it is evicted after everything that was not asked to be kept.

        Messages are kept up to where the next one would begin, a text up to its end. Raises DoesNotFit.
        """
        check_options(options, PromptOptions.__annotations__)
        worker, reader = self._worker, Reader(self)
        salt, encoded = options.get("salt", ""), self._encode_prefix(prompt, options)
        prepared = self.runtime.prepare(
            encoded, SamplingParams(max_tokens=0), salt=salt, keep=True, is_cancelled=reader.cancellation.check
        )
        completion = _last(deliver(worker, prepared, reader))
        worker.call(lambda: self.runtime.require_kept(encoded.ids, salt)).result()
        return completion

    # Ends

    def close(self) -> None:
        """End the running requests, save the tree and release the model's memory. A second call does nothing."""
        self._close_soon.detach()
        self._loaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _callbacks(options: Mapping[str, Any]) -> Callbacks:
    return Callbacks(options.get("is_cancelled"), options.get("on_progress"))


def _listed(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """The same prompts. Raises RequestError for one text, whose characters would be prompts otherwise."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise RequestError(f"prompts is a {type(prompts).__name__}, and must be a list of prompts")
    return prompts


def _end_turn(turns: Sequence[Turn], number: int, answer: Completion) -> None:
    turns[number].end(answer)


def _pair(chats: Sequence[Chat], contents: str | Sequence[Content]) -> list[tuple[Chat, Content]]:
    """Each chat with its message. Raises RequestError if there are not as many of both."""
    if isinstance(chats, Chat):
        raise RequestError("chats is one chat, and must be a list of chats")
    each_content = [contents] * len(chats) if isinstance(contents, str) else contents
    if len(each_content) != len(chats):
        raise RequestError(f"there are {len(each_content)} messages for {len(chats)} chats")
    return list(zip(chats, each_content, strict=True))


def _last(pieces: Iterable[Chunk | Completion]) -> Completion:
    """The completion that ends a stream, which is read to its end."""
    *_, last = pieces
    assert isinstance(last, Completion)
    return last
