"""The cache of the loaded models for the APIs: view, explain, warm, pin, clear, export and import, by the name of a model.

A model is loaded if need be; without a name, the model that was used last is meant. Prompts are encoded in the model's
threads for prompts; what is known of a tree is asked by its named operations, and put into words in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from bough.cache.admin.archive import Imported
from bough.cache.admin.nodes import EvictedNodes, KeptNode, NodeDetails
from bough.cache.admin.view import Explanation, Lookup, TreeView
from bough.cache.disk import DiskError
from bough.cache.tree.tokens import pack, unpack
from bough.config import Settings
from bough.errors import RequestError, Unavailable
from bough.models.chat.tools import prepare_messages
from bough.models.encoder import PromptLimit
from bough.models.prompts import Encoded, Prompts
from bough.server.serving.ask import Ask, tenant_of
from bough.server.serving.catalog import Catalog
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.loaded_model import LoadedModel
from bough.server.serving.model.contract import ServedTree
from bough.server.serving.overlay import with_overlay
from bough.server.serving.prompting.prompt import ModelFacts
from bough.server.serving.transfers import make_file, require_room
from bough.types import Completion, Prompt

Result = TypeVar("Result")


@dataclass(frozen=True)
class FromModel(Generic[Result]):
    """A result, and the name of the model that it is of."""

    model: str
    result: Result


@dataclass(frozen=True)
class Explained(FromModel[Explanation]):
    """How much of a prompt would be reused. Of replicas, what the one with the most says, and what each knows, by name."""

    replica: str = ""
    known: Mapping[str, Lookup] = field(default_factory=dict)


@dataclass(frozen=True)
class Pinned:
    """How much of a prefix is known, and whether it is kept now."""

    explanation: Explanation
    is_kept: bool


@dataclass(frozen=True)
class NodeName:
    """A node by its model, the name of its tree and its key. If there is a `salt`, it is a node of that salt's tree."""

    model: str | None
    root: str
    key: int
    salt: str | None = None


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
        return [FromModel(each.name, await each.generator.tree.stats(salt)) for each in chosen]

    def _generators(self) -> list[LoadedModel]:
        return [each for each in self._models.list() if each.generates]

    async def _require_loaded(self, model: str) -> LoadedModel:
        loaded = self._models.find((await asyncio.to_thread(self._catalog.files, model)).name)
        if loaded is None:
            raise RequestError(f"the model {model!r} is not loaded: there are no figures of it")
        return loaded

    async def tree(self, model: str | None, salt: str | None) -> FromModel[TreeView]:
        """The whole tree of a model, or that of one salt."""
        async with self._using(model) as loaded:
            return FromModel(loaded.name, await loaded.generator.tree.view(salt))

    async def read_node(self, node: NodeName) -> FromNode[NodeDetails]:
        """One node, by the name of its tree and its key. Raises NodeNotFound."""
        return await self._at_node(node, lambda tree, root: tree.read_node(root, node.key))

    async def keep_node(self, node: NodeName, kept: bool) -> FromNode[KeptNode]:
        """Keep the path to a node longer than others, or no longer. Raises NodeNotFound, or RequestError if that fails."""
        return await self._at_node(node, lambda tree, root: tree.keep_node(root, node.key, kept))

    async def evict_node(self, node: NodeName) -> FromNode[EvictedNodes]:
        """Drop a node and all below it that no running request uses. Raises NodeNotFound."""
        return await self._at_node(node, lambda tree, root: tree.evict_node(root, node.key))

    async def _at_node(self, node: NodeName, work: Callable[[ServedTree, str], Awaitable[Result]]) -> FromNode[Result]:
        async with self._using(node.model) as loaded:
            prompts, tree = loaded.generator.prompts, loaded.generator.tree
            root = node.root if node.salt is None else tree.own_root(node.root, node.salt)
            result = await work(tree, root)
            return FromNode(loaded.name, result, root, lambda packed: prompts.decode(unpack(packed)))

    async def explain(self, prefix: Ask) -> Explained:
        """How much of a prompt would be reused, and why not more."""
        prefix = await with_overlay(prefix, self._catalog.overlay)
        async with self._using(prefix.model) as loaded:
            packed = await _encode_packed(prefix, loaded, lambda prompts: prompts.encode)
            known = await loaded.generator.tree.look_up(packed, prefix.salt)
            replica = _best(known)
            words = await asyncio.to_thread(known[replica].explain, packed, loaded.generator.prompts.decode)
            return Explained(loaded.name, words, replica, known)

    async def pin(self, prefix: Ask, kept: bool) -> FromModel[Pinned]:
        """Keep a prefix that is known longer than others, or keep it no longer. What is not known whole stays as it is."""
        prefix = await with_overlay(prefix, self._catalog.overlay)
        async with self._using(prefix.model) as loaded:
            packed = await _encode_packed(prefix, loaded, lambda prompts: prompts.encode_prefix)
            known = await loaded.generator.tree.keep(packed, kept, prefix.salt)
            found = known[_best(known)]
            explanation = await asyncio.to_thread(found.explain, packed, loaded.generator.prompts.decode)
            return FromModel(loaded.name, Pinned(explanation, found.is_kept))

    async def warm(self, prefix: Ask) -> FromModel[Completion]:
        """Compute a prefix and keep it: messages up to where the next one would begin. Raises DoesNotFit."""
        prefix = await with_overlay(prefix, self._catalog.overlay)
        async with self._using(prefix.model) as loaded:
            encoded = await _encode(prefix, loaded, lambda prompts: prompts.encode_prefix)
            tenant = tenant_of(prefix.salt) if self._settings.keys_file else ""
            return FromModel(loaded.name, await loaded.generator.tree.warm(encoded, prefix.salt, tenant))

    async def clear(self, model: str | None, salt: str | None) -> list[str]:
        """Forget all that no running request uses, of one model or of every loaded one with a tree, of one salt if given.

        Returns the names of the models.
        """
        names = [each.name for each in self._generators()] if model is None else [model]
        for name in names:
            async with self._using(name) as loaded:
                await loaded.generator.tree.clear(salt)
        return names

    async def export(self, model: str | None, salt: str) -> FromModel[Path]:
        """What a salt has on disk as a new file, which the caller deletes. Raises Unavailable without room or disk."""
        async with self._using(model) as loaded:
            await asyncio.to_thread(require_room, self._settings, _archive_bytes(loaded.worker.snapshot()))
            try:
                file = await asyncio.to_thread(make_file, self._settings)
            except OSError as error:
                raise Unavailable(f"the archive could not be written: {error.strerror or error}") from error
            try:
                await loaded.generator.tree.export_file(file, salt)
            except DiskError as error:
                file.unlink(missing_ok=True)
                raise Unavailable(str(error).replace(str(file), "the archive")) from error
            except BaseException:
                file.unlink(missing_ok=True)
                raise
            return FromModel(loaded.name, file)

    async def import_archive(self, model: str | None, file: Path, salt: str) -> FromModel[Imported]:
        """Add an archive to the tree of a salt. Raises RequestError for a wrong one."""
        async with self._using(model) as loaded:
            try:
                return FromModel(loaded.name, await loaded.generator.tree.import_file(file, salt))
            except DiskError as error:  # it says where the file lies, which the client need not know
                raise RequestError(str(error).replace(str(file), "the archive")) from error

    @asynccontextmanager
    async def _using(self, model: str | None) -> AsyncIterator[LoadedModel]:
        async with self._models.using(self._models.choose_name(model)) as loaded:
            yield loaded


async def _encode(prefix: Ask, loaded: LoadedModel, way: Callable[[Prompts], Callable[..., Encoded]]) -> Encoded:
    """The ids of a prefix as a chat with this model would have them. Raises PromptTooLong."""
    prompt: Prompt = prefix.text or ""
    options: dict[str, Any] = {"raw": True}
    context, abilities = loaded.generator.context_tokens, loaded.info.capabilities
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


def _archive_bytes(figures: Mapping[str, Any]) -> int:
    """The most that an export needs here. The archives of replicas lie beside the one that they are merged into."""
    num_copies = 2 if figures.get("replicas") else 1
    return num_copies * int(figures.get("disk_bytes", 0))


def _best(known: Mapping[str, Lookup]) -> str:
    """The name of the replica that would reuse the most; of equal ones the first."""
    return max(known, key=lambda name: (known[name].cached, known[name].matched))
