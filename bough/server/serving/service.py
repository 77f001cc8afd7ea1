"""The service: answers asks with loaded models, whichever API they came by.

An answer that was opened holds its model until it is closed. `complete` closes its own; streams close theirs when the
client has all of it, or has gone. APIs use the service alone and never see a loaded model, so that another machine can
answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

from bough.config import Settings
from bough.errors import PromptTooLong, RequestCancelled
from bough.generate.request import Request
from bough.models.prompts import EncodedPrompt
from bough.server.serving.answer import Answer, ChoiceNews, make_listener
from bough.server.serving.ask import Answered, Ask, Finished, tenant_of
from bough.server.serving.cache import CacheService
from bough.server.serving.catalog import Catalog, LoadedEntry
from bough.server.serving.embedding import EmbeddingService
from bough.server.serving.events.hub import EventHub
from bough.server.serving.loaded import LoadedModel, LoadedModels
from bough.server.serving.loaded.progress import (
    LiveRequests,
    RequestProgress,
    RequestRecord,
    current_request_id,
    note_record,
)
from bough.server.serving.metrics import Metrics
from bough.server.serving.prompting.prompt import AnswerFormat, ModelFacts, encode_ask, make_request
from bough.server.serving.tokens import TokenService
from bough.system.inbox import Inbox, Mailbox
from bough.types import SamplingParams

log = logging.getLogger(__name__)

MOST_NOTICES = 1_000  # that are remembered: clients choose the names in them
COUNTED_CONTEXTS = 4  # a prompt of more contexts than these is not counted to its end

DiskState = Literal["ok", "failing", "full", "read-only", "unavailable", "off"]


@dataclass(frozen=True)
class Checks:
    """How many answers were computed again without reuse, and how many of them came out different: none should."""

    num_verified: int
    num_different: int


class Notices:
    """Lines for the log about parts of requests that have no effect. Each part is named once in a run of the server."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def add(self, part: str, reason: str) -> None:
        if part not in self._named and len(self._named) < MOST_NOTICES:
            self._named.add(part)
            log.info("%s has no effect: %s", part, reason)


class Service:
    """Runs asks on loaded models. Everything here runs on one event loop; long work goes to threads."""

    def __init__(self, settings: Settings, models: LoadedModels, catalog: Catalog) -> None:
        self.settings = settings
        self.models = models
        self.catalog = catalog
        self.metrics = Metrics(models)
        self.notices = Notices()
        self.requests = LiveRequests()
        self.events = EventHub(models, self.requests, settings.model)
        self.cache = CacheService(settings, models, catalog)
        self.tokens = TokenService(models)
        self.embeddings = EmbeddingService(settings, models, self.metrics)

    @cached_property
    def _inbox(self) -> Inbox[ChoiceNews]:
        """The inbox of the one event loop, which runs when the first answer is opened."""
        return Inbox(asyncio.get_running_loop())

    async def open(self, ask: Ask) -> Answer:
        """An answer that has begun. Raises BoughError if it cannot begin; until then nothing was sent to the client."""
        started_s = time.perf_counter()
        loaded = await self.models.acquire(ask.model, ask.keep_alive_s)
        load_s = time.perf_counter() - started_s
        try:
            _ = loaded.generator  # RequestError, before anything is recorded, if it generates no text
            progress = self.requests.begin(current_request_id(), loaded.name, ask.salt, time.perf_counter())
        except BaseException:
            self.models.release(loaded)
            raise
        end, mailbox = partial(self._end, loaded, progress), Mailbox[ChoiceNews]()
        listeners = [make_listener(choice, mailbox, self._inbox) for choice in range(ask.num_choices)]

        def make_answer(is_cancelled: Callable[[], bool]) -> Answer:
            whole = self.catalog.complete(ask)
            facts = loaded.facts(whole.template)
            if (ask.context_tokens or 0) > facts.context_tokens:
                wanted, there = f"{ask.context_tokens:,} tokens are asked for", f"{facts.context_tokens:,}"
                self.notices.add(f"num_ctx above the context of {facts.name}", f"{wanted}, and there are {there}")
            prompt = encode_ask(whole, facts, sorts_tools=self.settings.sort_tools, is_cancelled=is_cancelled)
            request = self._make_request(whole, facts, prompt.encoded)
            prepared = [loaded.generator.prepare(request, listeners[0])]
            for number, listener in enumerate(listeners[1:], 1):
                if is_cancelled():
                    raise RequestCancelled("the client disconnected")
                other = replace(request, choice=request.choice + number, scores_prompt=False)
                prepared.append(loaded.generator.prepare(other, listener))
            answer_format = AnswerFormat.of(whole, facts, request)
            parts = (ask, loaded, request, answer_format, prepared, mailbox, progress, end)
            return Answer(*parts, load_s=load_s, left_out=prompt.left_out)

        try:
            answer = await loaded.threads.run(make_answer, ask.num_chars)
        except BaseException:
            end(RequestRecord(loaded.name, total_s=time.perf_counter() - progress.opened_s), False)
            raise
        try:
            await answer.start()
        except BaseException:
            answer.close()
            raise
        return answer

    def _end(self, loaded: LoadedModel, progress: RequestProgress, record: RequestRecord, is_complete: bool) -> None:
        self.models.release(loaded)
        self.metrics.request_done(record)
        self.requests.end(progress, record, is_complete=is_complete)
        note_record(record)

    def _make_request(self, ask: Ask, facts: ModelFacts, prompt: EncodedPrompt) -> Request:
        """The request of an ask by these settings."""
        timeout_s = self.settings.request_timeout
        tenant = tenant_of(ask.salt) if self.settings.keys_file else ""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        return make_request(ask, facts, prompt, tenant=tenant, deadline_s=deadline_s)

    async def complete(self, ask: Ask) -> Answered:
        """The whole answer. Cancelling the caller cancels the answer."""
        answer = await self.open(ask)
        try:
            finished = [event async for event in answer if isinstance(event, Finished)]
        finally:
            answer.close()
        return Answered(answer.started, tuple(sorted(finished, key=lambda each: each.choice)))

    async def count_tokens(self, ask: Ask) -> int:
        """The number of tokens of an ask's prompt. Raises PromptTooLong if it is many times the context."""
        async with self.models.using(ask.model, ask.keep_alive_s) as loaded:
            return await self._count_tokens(ask, loaded)

    async def require_fit(self, ask: Ask) -> None:
        """Raise PromptTooLong unless the prompt of an ask leaves room in the model's context."""
        async with self.models.using(ask.model, ask.keep_alive_s) as loaded:
            num_tokens, context = await self._count_tokens(ask, loaded), loaded.generator.context_tokens
        if num_tokens + (ask.params.max_tokens != 0) > context:
            raise PromptTooLong(num_tokens, context)

    async def _count_tokens(self, ask: Ask, loaded: LoadedModel) -> int:
        def count(is_cancelled: Callable[[], bool]) -> int:
            unbounded = replace(self.catalog.complete(ask), params=SamplingParams(max_tokens=0))
            facts, sorts_tools = loaded.facts(unbounded.template), self.settings.sort_tools
            most = COUNTED_CONTEXTS * facts.context_tokens
            prompt = encode_ask(unbounded, facts, sorts_tools=sorts_tools, max_tokens=most, is_cancelled=is_cancelled)
            return len(prompt.encoded.tokens)

        return await loaded.threads.run(count, ask.num_chars)

    async def load(self, model: str, keep_alive_s: float | None = None) -> LoadedEntry:
        async with self.models.using(model, keep_alive_s) as loaded:
            return next(each for each in self.models.describe() if each.entry.name == loaded.info.name)

    async def unload(self, model: str) -> bool:
        """Unload a model. False if it is in use: then it is unloaded when its last answer ends. Raises ModelNotFound."""
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
        return any(loaded.worker.is_stuck for loaded in self.models.list())

    @property
    def _snapshots(self) -> list[dict[str, Any]]:
        return [loaded.worker.snapshot() for loaded in self.models.list()]

    @property
    def has_replicas(self) -> bool:
        """Whether every loaded model that runs at replicas has one that answers."""
        return all(figures.get("replicas", True) for figures in self._snapshots)

    @property
    def disk_state(self) -> DiskState:
        """Whether computed state is saved to disk. If not, requests are still answered, but a restart loses more."""
        found = self._snapshots
        if any(figures.get("disk_is_failing") for figures in found):
            return "failing"
        if any(figures.get("disk_is_read_only") for figures in found):
            return "read-only"
        if troubled := [figures for figures in found if figures.get("disk_problem")]:
            return "full" if all("disk_bytes" in figures for figures in troubled) else "unavailable"
        return "ok" if any("disk_bytes" in figures for figures in found) else "off"

    @property
    def disk_problem(self) -> str:
        """Why computed state of a loaded model is not saved to disk; "" if it is, or need not be."""
        return next(filter(None, (figures.get("disk_problem", "") for figures in self._snapshots)), "")

    def count_checks(self) -> Checks:
        found = self._snapshots
        return Checks(*(sum(figures.get(name, 0) for figures in found) for name in ("verified", "different")))
