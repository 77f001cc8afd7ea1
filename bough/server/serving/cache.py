"""The cache of the loaded models for the APIs: view, explain, warm, pin, clear, export and import, by the name of a model.

A model is loaded if need be; without a name, the model that was used last is meant. Prompts are encoded in the model's
threads for prompts. What touches the tree runs on its engine's thread, between two steps; clearing, exporting and importing
wait for the disk on threads of their own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from bough.cache.admin.archive import Imported
from bough.cache.admin.nodes import EvictedNodes, KeptNode, NodeDetails
from bough.cache.admin.view import Explanation, TreeView
from bough.cache.disk import DiskError
from bough.cache.steps import Steps
from bough.cache.tree.tokens import pack
from bough.config import Settings
from bough.errors import BoughError, RequestError, Unavailable
from bough.models.chat.tools import prepare_messages
from bough.models.encoder import PromptLimit
from bough.models.prompts import Encoded, Prompts
from bough.runtime.cache_handle import CacheHandle
from bough.scheduling.job import Job
from bough.server.serving.ask import Ask, tenant_of
from bough.server.serving.catalog import Catalog
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.loaded_model import LoadedModel
from bough.server.serving.overlay import with_overlay
from bough.server.serving.prompting.prompt import ModelFacts
from bough.server.serving.transfers import make_file, require_room
from bough.system.threads import lower_priority, run_in_thread
from bough.types import Completion, Prompt, SamplingParams

Result = TypeVar("Result")


@dataclass(frozen=True)
class FromModel(Generic[Result]):
    """A result, and the name of the model that it is of."""

    model: str
    result: Result


@dataclass(frozen=True)
class Pinned:
    """How much of a prefix is known, and whether it is kept now."""

    explanation: Explanation
    is_kept: bool


@dataclass(frozen=True)
class FromNode(FromModel[Result]):
    """A result that is of one node: the name of its tree, and what gives packed tokens their text."""

    root: str
    decode: Callable[[bytes], str]


class CacheService:
    """What can be asked of the caches of the loaded models. A prefix is an ask with messages, or with a text."""

    def __init__(self, settings: Settings, models: LoadedModels, catalog: Catalog) -> None:
        self._settings = settings
        self._models = models
        self._catalog = catalog

    async def stats(self, model: str | None, salt: str | None) -> list[FromModel[dict[str, Any]]]:
        """The figures of one loaded model or of all that have a tree; with a salt, of its tree alone.

        Raises RequestError if the model is not loaded, or has no tree.
        """
        chosen = self._generators() if model is None else [await self._require_loaded(model)]
        return [FromModel(each.name, await self._stats(each, salt)) for each in chosen]

    def _generators(self) -> list[LoadedModel]:
        return [each for each in self._models.list() if each.generates]

    async def _require_loaded(self, model: str) -> LoadedModel:
        loaded = self._models.find((await asyncio.to_thread(self._catalog.files, model)).name)
        if loaded is None:
            raise RequestError(f"the model {model!r} is not loaded: there are no figures of it")
        return loaded

    async def _stats(self, loaded: LoadedModel, salt: str | None) -> dict[str, Any]:
        exact = await _look(loaded, lambda: loaded.generator.cache.stats(salt))
        return {**loaded.worker.snapshot(), **exact} if salt is None else exact

    async def tree(self, model: str | None, salt: str | None) -> FromModel[TreeView]:
        """The whole tree of a model, or that of one salt."""
        async with self._using(model) as loaded:
            cache = loaded.generator.cache
            records = await asyncio.wrap_future(loaded.worker.run_in_slices(lambda: cache.take_records(salt)))
            return FromModel(loaded.name, cache.view(records))

    async def read_node(self, model: str | None, root: str, key: int) -> FromNode[NodeDetails]:
        """One node, by the name of its tree and its key. Raises NodeNotFound."""
        return await self._at_node(model, root, lambda cache: cache.read_node(root, key))

    async def keep_node(self, model: str | None, root: str, key: int, kept: bool) -> FromNode[KeptNode]:
        """Keep the path to a node longer than others, or no longer. Raises NodeNotFound, or RequestError if that fails."""
        return await self._at_node(model, root, lambda cache: cache.keep_node(root, key, kept))

    async def evict_node(self, model: str | None, root: str, key: int) -> FromNode[EvictedNodes]:
        """Drop a node and all below it that no running request uses. Raises NodeNotFound."""
        return await self._at_node(model, root, lambda cache: cache.evict_node(root, key))

    async def _at_node(
        self, model: str | None, root: str, work: Callable[[CacheHandle], Steps[Result]]
    ) -> FromNode[Result]:
        async with self._using(model) as loaded:
            cache = loaded.generator.cache
            result = await asyncio.wrap_future(loaded.worker.run_in_slices(lambda: work(cache)))
            return FromNode(loaded.name, result, root, cache.decode)

    async def explain(self, prefix: Ask) -> FromModel[Explanation]:
        """How much of a prompt would be reused, and why not more."""
        prefix = await with_overlay(prefix, self._catalog.overlay)
        async with self._using(prefix.model) as loaded:
            cache = loaded.generator.cache
            packed = await _encode_packed(prefix, loaded, lambda prompts: prompts.encode)
            found = await _call(loaded, lambda: cache.look_up(packed, prefix.salt))
            return FromModel(loaded.name, await asyncio.to_thread(cache.describe, found, packed))

    async def pin(self, prefix: Ask, kept: bool) -> FromModel[Pinned]:
        """Keep a prefix that is known longer than others, or keep it no longer. What is not known whole stays as it is."""
        prefix = await with_overlay(prefix, self._catalog.overlay)
        async with self._using(prefix.model) as loaded:
            cache = loaded.generator.cache
            packed = await _encode_packed(prefix, loaded, lambda prompts: prompts.encode_prefix)
            found = await _call(loaded, lambda: cache.keep(packed, kept, prefix.salt))
            explanation = await asyncio.to_thread(cache.describe, found, packed)
            return FromModel(loaded.name, Pinned(explanation, found.is_kept))

    async def warm(self, prefix: Ask) -> FromModel[Completion]:
        """Compute a prefix and keep it: messages up to where the next one would begin. Raises DoesNotFit."""
        prefix = await with_overlay(prefix, self._catalog.overlay)
        async with self._using(prefix.model) as loaded:
            runtime = loaded.generator
            encoded = await _encode(prefix, loaded, lambda prompts: prompts.encode_prefix)
            future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            generation = runtime.prepare(
                encoded, SamplingParams(max_tokens=0), salt=prefix.salt, keep=True, is_cancelled=future.cancelled
            )
            tenant = tenant_of(prefix.salt) if self._settings.keys_file else ""
            loaded.worker.submit(Job(generation, _EndListener(future), tenant=tenant))
            completion = await future  # cancelling this cancels the future, and so the work
            await _call(loaded, lambda: runtime.require_kept(encoded.ids, prefix.salt))
            return FromModel(loaded.name, completion)

    async def clear(self, model: str | None, salt: str | None) -> list[str]:
        """Forget all that no running request uses, of one model or of every loaded one with a tree, of one salt if given.

        Returns the names of the models.
        """
        names = [each.name for each in self._generators()] if model is None else [model]
        for name in names:
            async with self._using(name) as loaded:
                await run_in_thread(loaded.generator.cache.clear, salt)
        return names

    async def export(self, model: str | None, salt: str) -> FromModel[Path]:
        """What a salt has on disk as a new file, which the caller deletes. Raises Unavailable without room or disk."""
        async with self._using(model) as loaded:
            await asyncio.to_thread(require_room, self._settings, loaded.worker.snapshot().get("disk_bytes", 0))
            try:
                file = await asyncio.to_thread(make_file, self._settings)
            except OSError as error:
                raise Unavailable(f"the archive could not be written: {error.strerror or error}") from error
            is_unwanted = threading.Event()
            try:
                await run_in_thread(_export, loaded, file, salt, is_unwanted)
            except DiskError as error:
                file.unlink(missing_ok=True)
                raise Unavailable(str(error).replace(str(file), "the archive")) from error
            except BaseException:
                is_unwanted.set()
                file.unlink(missing_ok=True)
                raise
            return FromModel(loaded.name, file)

    async def import_archive(self, model: str | None, file: Path, salt: str) -> FromModel[Imported]:
        """Add an archive to the tree of a salt. Raises RequestError for a wrong one."""
        async with self._using(model) as loaded:
            try:
                return FromModel(loaded.name, await run_in_thread(_import, loaded, file, salt))
            except DiskError as error:  # it says where the file lies, which the client need not know
                raise RequestError(str(error).replace(str(file), "the archive")) from error

    @asynccontextmanager
    async def _using(self, model: str | None) -> AsyncIterator[LoadedModel]:
        async with self._models.using(self._models.choose_name(model)) as loaded:
            yield loaded


def _export(loaded: LoadedModel, file: Path, salt: str, is_unwanted: threading.Event) -> None:
    """Export on a thread of its own, which yields to requests; it ends early, without a file, if the client has gone."""
    lower_priority()
    try:
        loaded.generator.cache.export_file(file, salt, is_wanted=lambda: not is_unwanted.is_set())
    finally:
        if is_unwanted.is_set():
            file.unlink(missing_ok=True)


def _import(loaded: LoadedModel, file: Path, salt: str) -> Imported:
    """Import on a thread of its own, which yields to requests."""
    lower_priority()
    return loaded.generator.cache.import_file(file, salt)


async def _encode(prefix: Ask, loaded: LoadedModel, way: Callable[[Prompts], Callable[..., Encoded]]) -> Encoded:
    """The ids of a prefix as a chat with this model would have them. Raises PromptTooLong."""
    prompt: Prompt = prefix.text or ""
    options: dict[str, Any] = {"raw": True}
    context, abilities = loaded.generator.engine.context_tokens, loaded.info.capabilities
    own = ModelFacts(loaded.name, loaded.generator.prompts, context, "tools" in abilities, "thinking" in abilities)
    facts = await asyncio.to_thread(loaded.templates.apply, own, prefix.template)
    if prefix.messages is not None:
        knows_tools = facts.knows_tools
        given = prepare_messages(prefix.messages, prefix.tool_choice.offer(prefix.tools), template_knows_tools=knows_tools)
        prompt, options = given.messages, {"tools": given.tools}
    encode = way(facts.prompts)
    return await loaded.threads.run(
        lambda is_cancelled: encode(prompt, limit=PromptLimit(context, is_cancelled), **options), prefix.num_chars
    )


async def _encode_packed(prefix: Ask, loaded: LoadedModel, way: Callable[[Prompts], Callable[..., Encoded]]) -> bytes:
    encoded = await _encode(prefix, loaded, way)
    return await asyncio.to_thread(pack, encoded.ids)


async def _call(loaded: LoadedModel, work: Callable[[], Result]) -> Result:
    """Run something on the engine's thread, between two steps."""
    return await asyncio.wrap_future(loaded.worker.call(work))


async def _look(loaded: LoadedModel, work: Callable[[], Result]) -> Result:
    """Run something short that only looks on the engine's thread; it may wait so as not to delay requests."""

    def steps() -> Steps[Result]:
        yield
        return work()

    return await asyncio.wrap_future(loaded.worker.run_in_slices(steps))


class _EndListener:
    """A listener for the end of a request alone: it sets a future on the event loop."""

    def __init__(self, future: asyncio.Future[Completion]) -> None:
        self._future = future
        self._loop = future.get_loop()

    def on_start(self, usage: object, waited_s: float) -> None:
        pass

    def on_loaded(self, usage: object) -> None:
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
