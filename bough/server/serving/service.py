"""The service: answers what clients ask, by the models that are loaded, whichever API they came by.

An answer that was opened holds its model until it is closed; one that was not closed by anybody does not exist: `complete`
closes its own, and streams close theirs when the client has it all, or has gone.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from bough.config import Settings
from bough.errors import BoughError
from bough.generate.job import Job
from bough.models.encoder import PromptLimit
from bough.models.prompts import Encoded
from bough.server.serving.answer import Answer, Ear
from bough.server.serving.ask import Ask, Finished, Started, tenant_of
from bough.server.serving.catalog import Catalog
from bough.server.serving.loaded import LoadedModel, LoadedModels
from bough.server.serving.metrics import Seeing
from bough.server.serving.prompting.prompt import ModelFacts, Prepared, prepare_ask
from bough.server.serving.record import RequestRecord, note_record
from bough.types import Completion, Prompt, SamplingParams

Result = TypeVar("Result")

COUNTED_CONTEXTS = 4  # a prompt of more contexts than these is not counted to its end


@dataclass(frozen=True)
class Answered:
    """A whole answer, its choices in order, and the ids that the model was given."""

    started: Started
    choices: tuple[Finished, ...]
    loaded: LoadedModel
    prompt_ids: Sequence[int] = ()


class Service:
    """Runs asks on loaded models. Everything here runs on one event loop; long work goes to threads."""

    def __init__(self, settings: Settings, models: LoadedModels, catalog: Catalog, seeing: Seeing | None = None) -> None:
        self.settings = settings
        self.models = models
        self.catalog = catalog
        self.seeing = seeing or Seeing()

    async def open(self, ask: Ask) -> Answer:
        """An answer that has begun. Raises BoughError if it cannot be; until then nothing was sent to anybody."""
        started_s = time.perf_counter()
        loaded = await self.models.take(ask.model, ask.keep_alive_s)
        load_s = time.perf_counter() - started_s
        answer = Answer(ask, loaded, load_s, lambda record: self._end(loaded, record), time.perf_counter)
        try:
            prepared = await self._prepare(ask, loaded)
            answer.expect(prepared)
            await self._submit(answer, prepared)
            await answer.start()
        except BaseException:
            answer.close()
            raise
        return answer

    async def complete(self, ask: Ask) -> Answered:
        """The whole answer. If whoever waits for it is cancelled, so is the answer."""
        answer = await self.open(ask)
        try:
            finished = [event async for event in answer if isinstance(event, Finished)]
        finally:
            answer.close()
        choices = tuple(sorted(finished, key=lambda each: each.choice))
        return Answered(answer.started, choices, answer.loaded, answer.prompt_ids)

    async def count_tokens(self, ask: Ask) -> int:
        """How many tokens the prompt of an ask has. Raises PromptTooLong if it is many times the context."""
        unbounded = replace(ask, params=SamplingParams(max_tokens=0))
        async with self.models.using(ask.model, ask.keep_alive_s) as loaded:
            return len((await self._prepare(unbounded, loaded, COUNTED_CONTEXTS)).encoded.ids)

    async def warm(self, ask: Ask) -> Completion:
        """Compute the prefix of an ask and keep it: messages up to where the next one would begin. Raises DoesNotFit."""
        async with self.models.using(ask.model, ask.keep_alive_s) as loaded:
            prompt = ask.messages if ask.messages is not None else ask.text if ask.text is not None else ask.ids or ()
            runner = loaded.runner
            options = {"raw": ask.messages is None, "tools": list(ask.tools) or None}
            encoded = await self.encode(loaded, runner.prompts.encode_prefix, prompt, ask.num_chars, options)
            future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            generation = runner.prepare(
                encoded, SamplingParams(max_tokens=0), salt=ask.salt, keep=True, is_cancelled=future.cancelled
            )
            loaded.worker.submit(Job(generation, _Waiter(future), tenant=self._tenant_of(ask)))
            completion = await future  # if whoever waits for it goes, the future is cancelled, and so the work ends
            await self.on_engine(loaded, lambda: runner.require_kept(encoded.ids, ask.salt))
            return completion

    async def encode(
        self,
        loaded: LoadedModel,
        encode: Callable[..., Encoded],
        prompt: Prompt,
        num_chars: int,
        options: Mapping[str, Any],
    ) -> Encoded:
        """A prompt as ids that fit the context, found off the event loop. Raises PromptTooLong."""
        context = loaded.runner.engine.context_tokens
        return await loaded.threads.run(
            lambda is_cancelled: encode(prompt, limit=PromptLimit(context, is_cancelled), **options), num_chars
        )

    async def on_engine(self, loaded: LoadedModel, work: Callable[[], Result]) -> Result:
        """Run something on the engine's thread, between two steps."""
        return await asyncio.wrap_future(loaded.worker.call(work))

    async def look(self, loaded: LoadedModel, work: Callable[[], Result]) -> Result:
        """Run something that looks at the whole tree on the engine's thread; it may wait so as not to hold up requests."""
        return await asyncio.wrap_future(loaded.worker.look(work))

    async def load(self, model: str, keep_alive_s: float | None = None) -> float:
        """Have a model in memory; returns the seconds that this took."""
        started_s = time.perf_counter()
        async with self.models.using(model, keep_alive_s):
            return time.perf_counter() - started_s

    async def unload(self, model: str) -> None:
        """Take a model out of memory, now or when its last answer ends. Raises ModelNotFound."""
        await asyncio.to_thread(self.catalog.files, model)
        await self.models.unload(model)

    @property
    def is_stuck(self) -> bool:
        """Whether the engine of a loaded model is stuck in a step."""
        return any(loaded.worker.is_stuck for loaded in self.models.list())

    async def close(self) -> None:
        """Unload everything; trees are saved."""
        await self.models.close()

    @property
    def has_left_load(self) -> bool:
        """Whether a model is still being loaded after `close`, which nothing can stop."""
        return self.models.has_left_load

    async def _prepare(self, ask: Ask, loaded: LoadedModel, num_contexts: int | None = None) -> Prepared:
        """The prompt of an ask, which fits its context, or has so many contexts' length. Who hangs up has it ended soon."""
        facts, sorts = _facts_of(loaded), self.settings.sort_tools
        max_tokens = num_contexts * facts.context_tokens if num_contexts else None
        return await loaded.threads.run(
            lambda is_cancelled: prepare_ask(
                ask, facts, sorts_tools=sorts, max_tokens=max_tokens, is_cancelled=is_cancelled
            ),
            ask.num_chars,
        )

    async def _submit(self, answer: Answer, prepared: Prepared) -> None:
        """Hand all choices to the engine's thread."""
        ask, loaded = answer.ask, answer.loaded
        timeout_s = self.settings.request_timeout_s
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        ears = [Ear(answer.mailbox, choice) for choice in range(ask.num_choices)]
        jobs = await loaded.threads.run(
            lambda is_cancelled: _make_jobs(ask, loaded, prepared, ears, answer.cancelled.is_set)
        )
        for job in jobs:
            job.deadline_s, job.tenant = deadline_s, self._tenant_of(ask)
            loaded.worker.submit(job)

    def _tenant_of(self, ask: Ask) -> str:
        """Whose ask it is, for sharing out lanes and the queue; without keys anybody could be anybody."""
        return tenant_of(ask.salt) if self.settings.keys_file else ""

    def _end(self, loaded: LoadedModel, record: RequestRecord) -> None:
        self.models.give_back(loaded)
        self.seeing.request_done(record)
        note_record(record)


class _Waiter:
    """Listens to a request for somebody who waits for its end only."""

    def __init__(self, future: asyncio.Future[Completion]) -> None:
        self._future = future
        self._loop = future.get_loop()

    def on_start(self, usage: object, waited_s: float) -> None:
        pass

    def on_chunk(self, chunk: object) -> None:
        pass

    def on_end(self, completion: Completion) -> None:
        self._loop.call_soon_threadsafe(self._settle, completion)

    def on_error(self, error: BoughError) -> None:
        self._loop.call_soon_threadsafe(self._settle, error)

    def _settle(self, outcome: Completion | BoughError) -> None:
        if self._future.done():
            return
        if isinstance(outcome, BoughError):
            self._future.set_exception(outcome)
        else:
            self._future.set_result(outcome)


def _facts_of(loaded: LoadedModel) -> ModelFacts:
    abilities = loaded.info.capabilities
    return ModelFacts(
        loaded.name,
        loaded.runner.prompts,
        loaded.runner.engine.context_tokens,
        knows_tools="tools" in abilities,
        knows_thinking="thinking" in abilities,
    )


def _make_jobs(
    ask: Ask, loaded: LoadedModel, prepared: Prepared, ears: Sequence[Ear], is_cancelled: Callable[[], bool]
) -> list[Job]:
    """A request for each choice; a seed that was asked for gives each its own text, by its number."""
    jobs = []
    for choice, ear in enumerate(ears):
        generation = loaded.runner.prepare(
            prepared.encoded,
            prepared.params,
            salt=ask.salt,
            store=ask.store,
            choice=choice,
            is_cancelled=is_cancelled,
            on_progress=ear.on_progress if choice == 0 else None,
        )
        jobs.append(Job(generation, ear))
    return jobs
