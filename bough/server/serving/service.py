"""The service: answers asks with loaded models, whichever API they came by.

An answer that was opened holds its model until it is closed. `complete` closes its own; streams close theirs when the
client has all of it, or has gone. APIs use the service alone and never see a loaded model, so that another machine can
answer.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

from bough.config import Settings
from bough.errors import RequestCancelled
from bough.generate.request import Request
from bough.models.prompts import EncodedPrompt
from bough.prompting.ask import Ask, tenant_of
from bough.prompting.prompt import AnswerFormat, ModelFacts, encode_to_fit, make_request
from bough.server.log_format import Notices
from bough.server.serving.answer import Answer, Answered, ChoiceNews, Finished, make_listener
from bough.server.serving.cache import CacheService
from bough.server.serving.catalog import Catalog, LoadedEntry
from bough.server.serving.embedding import EmbeddingService
from bough.server.serving.events.hub import EventHub
from bough.server.serving.health import ServiceHealth
from bough.server.serving.loaded import LoadedModel, LoadedModels
from bough.server.serving.loaded.progress import (
    LiveRequests,
    RequestProgress,
    RequestRecord,
    current_request_id,
    note_record,
)
from bough.server.serving.metrics import Metrics
from bough.server.serving.tokens import TokenService
from bough.system.inbox import Inbox, Mailbox


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
        self.tokens = TokenService(settings, models, catalog)
        self.health = ServiceHealth(models)
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
            whole = self.catalog.names.complete(ask)
            facts = loaded.facts(whole.template)
            if (ask.context_tokens or 0) > facts.context_tokens:
                wanted, there = f"{ask.context_tokens:,} tokens are asked for", f"{facts.context_tokens:,}"
                self.notices.add(f"num_ctx above the context of {facts.name}", f"{wanted}, and there are {there}")
            prompt = encode_to_fit(whole, facts, sorts_tools=self.settings.sort_tools, is_cancelled=is_cancelled)
            request = self._make_request(whole, facts, prompt)
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
