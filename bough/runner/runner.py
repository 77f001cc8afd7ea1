"""The library: a loaded model that answers many threads and tasks at once, from one tree."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, Unpack, overload

from bough.errors import RequestError
from bough.generate.request import Request
from bough.models.encoders.files import ModelKind
from bough.prompting.prompt import encode_ask, encode_prefix, prepare_request
from bough.runner.chat import AsyncPieces, Chat, ChatTurn, Content, Pieces
from bough.runner.delivery import (
    WINDOW,
    AnswerReader,
    Callbacks,
    Loops,
    News,
    OnDone,
    PreparedJob,
    deliver,
    noting_number,
    put_into,
    run_batch,
)
from bough.runner.options import (
    BatchOptions,
    ChatOptions,
    EmbedOptions,
    PromptOptions,
    RequestOptions,
    SendAllOptions,
    ask_of,
    ask_of_prompt,
    check_count,
    check_options,
    make_params,
    number_choices,
)
from bough.runner.texts import Vector, embed_texts, finish_vectors, run_texts, run_texts_async, score_documents
from bough.runtime import EncoderRuntime, Runtime
from bough.runtime.cache_handle import CacheHandle
from bough.runtime.embedding import ComputedText, RankedDocument, rank
from bough.sampling_params import SamplingOptions, unset_names
from bough.scheduling.worker import Worker
from bough.system.tasks import Start, gather
from bough.types import Chunk, Completion, Message, Prompt, SamplingParams


class Runner:
    """A loaded model with its tree. Use it in a `with` statement, or call `close`.

    Requests of several threads and tasks run together; those without a free lane wait. Answers are greedy unless options
    say otherwise, whatever the model recommends: the same prompt gives the same text.
    """

    def __init__(self, runtime: Runtime | EncoderRuntime) -> None:
        self._loaded = runtime
        self._loops = Loops()
        self._close_soon = weakref.finalize(self, runtime.close_soon)  # a runner that is dropped ends its thread
        self._close_soon.atexit = False

    @property
    def runtime(self) -> Runtime:
        """The parts of the loaded model, not stable. RequestError for an encoder, as in all methods that generate."""
        if isinstance(self._loaded, EncoderRuntime):
            raise RequestError(f"the model {self.name} {self._loaded.kind.value}, and generates no text")
        return self._loaded

    @property
    def name(self) -> str:
        return self._loaded.name

    @property
    def context_tokens(self) -> int:
        """The most tokens of a prompt and its answer together; of an encoder, those of one text."""
        return self._loaded.engine.context_tokens

    @property
    def cache(self) -> CacheHandle:
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
        """The token ids of a prompt as a request has them."""
        check_options(options, PromptOptions.__annotations__)
        return encode_ask(ask_of_prompt(prompt, options), self.runtime.facts).tokens.ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Raises RequestError for an id outside the vocabulary."""
        return self.runtime.prompts.decode(self.runtime.prompts.check_ids(ids))

    def model_params(self, **given: Unpack[SamplingOptions]) -> SamplingParams:
        """The sampling that the model recommends, with the given values instead. Raises RequestError for an invalid one."""
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
        """The whole answer; with `n` a list of n answers, each with its own choice number."""
        if n is not None:
            requests = [partial(self._prepare, prompt, params, each) for each in number_choices(n, options)]
            return run_batch(self, self._worker, requests, _callbacks(options))
        return _last(self._stream(prompt, params, options, wants_chunks=False))

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
        return _last([piece async for piece in self._astream(prompt, params, options, wants_chunks=False)])

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

    def _stream(
        self, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any], *, wants_chunks: bool
    ) -> Pieces:
        worker, arrived = self._worker, SimpleQueue[News]()
        reader = AnswerReader(self, put_into(arrived), _callbacks(options), wants_chunks=wants_chunks)
        return deliver(worker, self._prepare(prompt, params, options, reader), reader, arrived)

    def _astream(
        self, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any], *, wants_chunks: bool
    ) -> AsyncPieces:
        prepare, callbacks = partial(self._prepare, prompt, params, options), _callbacks(options)
        return self._loops.deliver(self, self._worker, prepare, callbacks, wants_chunks=wants_chunks)

    def _prepare(
        self, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any], reader: AnswerReader
    ) -> PreparedJob:
        runtime, ask = self.runtime, ask_of(prompt, params, options)
        request = prepare_request(ask, runtime.facts)
        job = runtime.prepare(request, reader.listener, reader.cancellation.check)
        tools = ask.tool_choice.offer(ask.tools)
        return PreparedJob(job, tools, bool(tools) and runtime.prompts.starts_thinking(request.tokens))

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
            with noting_number(number, len(prompts)):
                completion = await self.agenerate(prompt, params, **options)
            if on_done is not None:
                on_done(number, completion)
            return completion

        return await gather([partial(answer, number, prompt) for number, prompt in enumerate(_listed(prompts))], WINDOW)

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, truncate: bool = True
    ) -> list[RankedDocument]:
        """The documents by how well they answer a query, the best `top_n` first. Needs a reranker.

        A text that is too long for the model is cut, or with `truncate=False` raises PromptTooLong.
        """
        starts = self._score_documents(query, documents, top_n, truncate)
        return rank((each.numbers[0] for each in run_texts(starts)), top_n)

    async def arerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, truncate: bool = True
    ) -> list[RankedDocument]:
        """As `rerank`, in a task."""
        starts = self._score_documents(query, documents, top_n, truncate)
        return rank((each.numbers[0] for each in await run_texts_async(starts)), top_n)

    def _score_documents(
        self, query: str, documents: Sequence[str], top_n: int | None, truncate: bool
    ) -> list[Start[ComputedText]]:
        if top_n is not None:
            check_count("top_n", top_n)
        if not isinstance(self._loaded, EncoderRuntime):
            raise RequestError(f"the model {self.name} generates text: this needs one that {ModelKind.RERANKER.value}")
        return score_documents(self._loaded.reranker, query, documents, truncate=truncate)

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
            requests = [partial(self._prepare, turn.messages, None, turn.options) for turn in turns]
            callbacks = _callbacks(options)
            return run_batch(self, self._worker, requests, callbacks, lambda number, answer: turns[number].end(answer))
        finally:
            for turn in turns:
                turn.close()

    async def asend_all(
        self, chats: Sequence[Chat], contents: str | Sequence[Content], **options: Unpack[SendAllOptions]
    ) -> list[Completion]:
        """As `send_all`, in a task. Cancelling the task cancels the requests."""
        pairs = enumerate(_pair(chats, contents))
        return await gather([partial(chat.asend, each, choice=number, **options) for number, (chat, each) in pairs], WINDOW)

    @overload
    def embed(self, inputs: str, **options: Unpack[EmbedOptions]) -> Vector: ...  # type: ignore[overload-overlap]
    @overload
    def embed(self, inputs: Sequence[str], **options: Unpack[EmbedOptions]) -> list[Vector]: ...
    def embed(self, inputs: str | Sequence[str], **options: Unpack[EmbedOptions]) -> Vector | list[Vector]:
        """The vector of a text, or the vectors of several, in their order; of a language model, the last hidden state.

        Texts get no chat template. A known prefix is reused, and nothing is kept. If one text fails, the others are
        cancelled, and its error is raised.
        """
        vectors = finish_vectors(run_texts(embed_texts(self._loaded.embedder, inputs, options)), options)
        return vectors[0] if isinstance(inputs, str) else vectors

    @overload
    async def aembed(self, inputs: str, **options: Unpack[EmbedOptions]) -> Vector: ...  # type: ignore[overload-overlap]
    @overload
    async def aembed(self, inputs: Sequence[str], **options: Unpack[EmbedOptions]) -> list[Vector]: ...
    async def aembed(self, inputs: str | Sequence[str], **options: Unpack[EmbedOptions]) -> Vector | list[Vector]:
        """As `embed`, in a task. Cancelling the task cancels the texts."""
        vectors = finish_vectors(await run_texts_async(embed_texts(self._loaded.embedder, inputs, options)), options)
        return vectors[0] if isinstance(inputs, str) else vectors

    def warm(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> Completion:
        """Compute a prefix and keep it: everything that is not kept is evicted before it.

        Messages are kept up to the start of the next one, a text up to its end. Raises DoesNotFit.
        """
        check_options(options, PromptOptions.__annotations__)
        worker, arrived = self._worker, SimpleQueue[News]()
        reader = AnswerReader(self, put_into(arrived))
        salt, encoded = options.get("salt", ""), encode_prefix(ask_of_prompt(prompt, options), self.runtime.facts)
        request = Request.of(encoded, SamplingParams(max_tokens=0), salt=salt, keep=True)
        job = self.runtime.prepare(request, reader.listener, reader.cancellation.check)
        completion = _last(deliver(worker, PreparedJob(job), reader, arrived))
        worker.call(lambda: self.runtime.require_kept(encoded.tokens, salt)).result()
        return completion

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


def _last(pieces: Iterable[Chunk | Completion]) -> Completion:
    """The completion that ends a stream, which is read to its end."""
    *_, last = pieces
    assert isinstance(last, Completion)
    return last
