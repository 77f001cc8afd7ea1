"""The library: a loaded model that answers many threads and tasks at once, from one tree."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Unpack, overload

from bough.errors import RequestError
from bough.generate.request import Request
from bough.models.encoders.files import ModelKind
from bough.prompting.prompt import encode_ask, encode_prefix, prepare_request
from bough.runner.chat import AsyncPieces, Pieces
from bough.runner.delivery import (
    AnswerReader,
    Callbacks,
    Loops,
    News,
    OnDone,
    PreparedJob,
    deliver,
    put_into,
    run_batch,
)
from bough.runner.model import AnyRequest, Model, last_of
from bough.runner.options import (
    EmbedOptions,
    PromptOptions,
    ask_of,
    ask_of_prompt,
    check_count,
    check_options,
    make_params,
)
from bough.runner.texts import Vector, embed_texts, finish_vectors, run_texts, run_texts_async, score_documents
from bough.runtime import EncoderRuntime, Runtime
from bough.runtime.cache_handle import CacheHandle
from bough.runtime.embedding import ComputedText, RankedDocument, rank
from bough.sampling_params import SamplingOptions, unset_names
from bough.scheduling.worker import Worker
from bough.system.tasks import Start
from bough.types import Completion, Prompt, SamplingParams


class Runner(Model):
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

    # Requests

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

    def _answer_all(
        self,
        requests: Sequence[AnyRequest],
        params: SamplingParams | None,
        options: Mapping[str, Any],
        on_done: OnDone | None = None,
    ) -> list[Completion]:
        prepare = [partial(self._prepare, prompt, params, each) for prompt, each in requests]
        return run_batch(self, self._worker, prepare, _callbacks(options), on_done)

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
        completion = last_of(deliver(worker, PreparedJob(job), reader, arrived))
        worker.call(lambda: self.runtime.require_kept(encoded.tokens, salt)).result()
        return completion

    def close(self) -> None:
        """End the running requests, save the tree and release the model's memory. A second call does nothing."""
        self._close_soon.detach()
        self._loaded.close()


def _callbacks(options: Mapping[str, Any]) -> Callbacks:
    return Callbacks(options.get("is_cancelled"), options.get("on_progress"))
