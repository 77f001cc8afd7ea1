"""The service: answers asks with loaded models, whichever API they came by.

An answer that was opened holds its model until it is closed. `complete` closes its own; streams close theirs when the
client has it all, or has gone. APIs use the service alone: they never see a loaded model, so that another machine can
answer.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from bough.config import Settings
from bough.errors import PromptTooLong, RequestCancelled
from bough.server.serving.answer import Answer, ChoiceMessage
from bough.server.serving.ask import Answered, Ask, Finished, tenant_of
from bough.server.serving.cache import CacheService
from bough.server.serving.catalog import Catalog, LoadedEntry
from bough.server.serving.embedding.service import EmbeddingService
from bough.server.serving.events.hub import EventHub
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.loaded_model import LoadedModel
from bough.server.serving.metrics import Metrics
from bough.server.serving.model.contract import GenerateRequest, PreparedRequest
from bough.server.serving.overlay import with_overlay
from bough.server.serving.progress import LiveRequests
from bough.server.serving.prompting.prompt import ModelFacts, prepare_prompt
from bough.server.serving.tokens import TokenService
from bough.system.inbox import Inbox
from bough.types import SamplingParams

COUNTED_CONTEXTS = 4  # a prompt of more contexts than these is not counted to its end

DiskState = Literal["ok", "failing", "full", "read-only", "unavailable", "off"]


@dataclass(frozen=True)
class Checks:
    """How many answers were computed again without reuse, and how many of them came out different: none should."""

    num_verified: int
    num_different: int


class Service:
    """Runs asks on loaded models. Everything here runs on one event loop; long work goes to threads."""

    def __init__(self, settings: Settings, models: LoadedModels, catalog: Catalog) -> None:
        self.settings = settings
        self.models = models
        self.catalog = catalog
        self.metrics = Metrics(models)
        self.requests = LiveRequests()
        self.events = EventHub(models, self.requests, settings.model)
        self.cache = CacheService(settings, models, catalog)
        self.tokens = TokenService(models)
        self.embeddings = EmbeddingService(settings, models, self.metrics)

    @cached_property
    def _inbox(self) -> Inbox[ChoiceMessage]:
        """The inbox of the one event loop, which runs when the first answer is opened."""
        return Inbox(asyncio.get_running_loop())

    async def open(self, ask: Ask) -> Answer:
        """An answer that has begun. Raises BoughError if it cannot begin; until then nothing was sent to the client."""
        started_s = time.perf_counter()
        ask = await with_overlay(ask, self.catalog.overlay)
        loaded = await self.models.acquire(ask.model, ask.keep_alive_s)
        try:
            load_s = time.perf_counter() - started_s
            answer = Answer(ask, loaded, load_s, self.models, self.metrics, self._inbox, self.requests)
        except BaseException:
            self.models.release(loaded)
            raise
        try:
            answer.set_requests(
                await loaded.threads.run(lambda is_cancelled: self._prepare(answer, loaded, is_cancelled), ask.num_chars)
            )
            await answer.start()
        except BaseException:
            answer.close()
            raise
        return answer

    def _prepare(self, answer: Answer, loaded: LoadedModel, is_cancelled: Callable[[], bool]) -> list[PreparedRequest]:
        """Prepare the prompt of an answer, and a request for each choice; a seed gives each number its own text.

        This runs in one of the model's threads for prompts.
        """
        ask = _with_model_defaults(answer.ask, loaded)
        facts = loaded.templates.apply(_facts_of(loaded), ask.template)
        prepared = prepare_prompt(ask, facts, sorts_tools=self.settings.sort_tools, is_cancelled=is_cancelled)
        answer.set_prompt(prepared)
        timeout_s = self.settings.request_timeout
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        requests = []
        for choice, listener in enumerate(answer.listeners):
            if is_cancelled():
                raise RequestCancelled("the client disconnected")
            request = GenerateRequest(
                prepared.encoded,
                prepared.params,
                ask.salt,
                ask.first_choice + choice,
                tenant_of(ask.salt) if self.settings.keys_file else "",
                deadline_s,
                scores_prompt=ask.scores_prompt and choice == 0,
            )
            requests.append(loaded.generator.prepare(request, listener))
        return requests

    async def complete(self, ask: Ask) -> Answered:
        """The whole answer. Cancelling the caller cancels the answer."""
        answer = await self.open(ask)
        try:
            finished = [event async for event in answer if isinstance(event, Finished)]
        finally:
            answer.close()
        return Answered(answer.started, tuple(sorted(finished, key=lambda each: each.choice)))

    async def count_tokens(self, ask: Ask) -> int:
        """How many tokens the prompt of an ask has. Raises PromptTooLong if it is many times the context."""
        async with self.models.using(ask.model, ask.keep_alive_s) as loaded:
            return await self._count_tokens(ask, loaded)

    async def require_fit(self, ask: Ask) -> None:
        """Raise PromptTooLong unless the prompt of an ask leaves room in the model's context."""
        async with self.models.using(ask.model, ask.keep_alive_s) as loaded:
            num_tokens, context = await self._count_tokens(ask, loaded), loaded.generator.context_tokens
        if num_tokens + (ask.params.max_tokens != 0) > context:
            raise PromptTooLong(num_tokens, context)

    async def _count_tokens(self, ask: Ask, loaded: LoadedModel) -> int:
        ask = await with_overlay(ask, self.catalog.overlay)
        facts = await asyncio.to_thread(loaded.templates.apply, _facts_of(loaded), ask.template)
        unbounded = replace(ask, params=SamplingParams(max_tokens=0))
        prepared = await loaded.threads.run(
            lambda is_cancelled: prepare_prompt(
                unbounded,
                facts,
                sorts_tools=self.settings.sort_tools,
                max_tokens=COUNTED_CONTEXTS * facts.context_tokens,
                is_cancelled=is_cancelled,
            ),
            ask.num_chars,
        )
        return len(prepared.encoded.ids)

    async def load(self, model: str, keep_alive_s: float | None = None) -> LoadedEntry:
        """Have a model in memory, and describe it."""
        async with self.models.using(model, keep_alive_s) as loaded:
            return next(each for each in self.models.describe() if each.entry.name == loaded.info.name)

    async def unload(self, model: str) -> bool:
        """Take a model out of memory. False if it is in use: then it goes when its last answer ends.

        Raises ModelNotFound.
        """
        name = await self.find_name(model)
        await self.models.unload(name)
        return self.models.find(name) is None

    async def find_name(self, model: str) -> str:
        """The own name of a model, which an alias may stand for. Raises ModelNotFound."""
        return (await asyncio.to_thread(self.catalog.files, model)).name

    def drain(self) -> None:
        """End the streams that would go on for ever; answers go on. A second call does nothing."""
        self.events.close()

    async def close(self) -> None:
        """Unload everything; trees are saved."""
        self.drain()
        await self.models.close()

    @property
    def is_still_loading(self) -> bool:
        """Whether a model is still being loaded after `close`, which nothing can stop."""
        return self.models.is_still_loading

    @property
    def loaded_names(self) -> list[str]:
        """The loaded models, the one that was used last first."""
        return [loaded.name for loaded in self.models.list()]

    @property
    def is_stuck(self) -> bool:
        """Whether the engine of a loaded model is stuck in a step."""
        return any(loaded.worker.is_stuck for loaded in self.models.list())

    @property
    def has_replicas(self) -> bool:
        """Whether every loaded model that runs at replicas has one that answers."""
        return all(loaded.worker.snapshot().get("replicas", True) for loaded in self.models.list())

    @property
    def disk_state(self) -> DiskState:
        """Whether computed state is saved to disk. If not, requests are still answered, but a restart loses more."""
        figures = [loaded.worker.snapshot() for loaded in self.models.list()]
        if any(figure.get("disk_is_failing") for figure in figures):
            return "failing"
        if any(figure.get("disk_is_read_only") for figure in figures):
            return "read-only"
        if troubled := [figure for figure in figures if figure.get("disk_problem")]:
            return "full" if all("disk_bytes" in figure for figure in troubled) else "unavailable"
        return "ok" if any("disk_bytes" in figure for figure in figures) else "off"

    @property
    def disk_problem(self) -> str:
        """Why computed state of a loaded model is not saved to disk; "" if it is, or need not be."""
        problems = [loaded.worker.snapshot().get("disk_problem", "") for loaded in self.models.list()]
        return next(filter(None, problems), "")

    def count_checks(self) -> Checks:
        """What checking the cache (the setting `verify_cache`) has found in all loaded models."""
        figures = [loaded.worker.snapshot() for loaded in self.models.list()]
        return Checks(*(sum(figure.get(name, 0) for figure in figures) for name in ("verified", "different")))


def _with_model_defaults(ask: Ask, loaded: LoadedModel) -> Ask:
    """The ask with the model's own sampling in place of the defaults of the API."""
    return replace(ask, params=loaded.generator.defaults.fill(ask.params, ask.unset))


def _facts_of(loaded: LoadedModel) -> ModelFacts:
    abilities = loaded.info.capabilities
    return ModelFacts(
        loaded.name,
        loaded.generator.prompts,
        loaded.generator.context_tokens,
        knows_tools="tools" in abilities,
        knows_thinking="thinking" in abilities,
        has_template=bool(loaded.info.template),
        max_tokens=loaded.generator.max_tokens,
    )
