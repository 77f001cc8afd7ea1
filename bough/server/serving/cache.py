"""The cache of the loaded models for the APIs: view, explain, warm, keep, clear, export and import, by the name of a model.

A model is loaded if need be; without a name, it is the model that was used last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from bough.cache.admin.archive import ImportResult
from bough.cache.admin.view import Explanation, Lookup, TreeView
from bough.cache.disk import DiskError
from bough.config import Settings
from bough.errors import RequestError, Unavailable
from bough.models.encoder import PromptLimit
from bough.models.prompts import EncodedPrompt
from bough.prompting.ask import Ask, tenant_of
from bough.prompting.prompt import encode_ask, encode_prefix
from bough.server.serving.catalog import Catalog
from bough.server.serving.loaded import LoadedModel, LoadedModels
from bough.server.serving.model.contract import NodeWork, ServedTree
from bough.server.serving.transfers import make_file, require_room
from bough.tokens import unpack
from bough.types import Completion

Result = TypeVar("Result")

Encode = Callable[..., EncodedPrompt]  # `encode_ask` or `encode_prefix`


@dataclass(frozen=True)
class FromModel(Generic[Result]):
    model: str
    result: Result


@dataclass(frozen=True)
class PrefixExplanation(FromModel[Explanation]):
    """How much of a prefix is known, and whether its end is kept; over replicas, at the best one.

    `known` has the known part at each replica, by name.
    """

    is_kept: bool
    replica: str
    known: Mapping[str, Lookup]


@dataclass(frozen=True)
class NodeName:
    """A node by its model, the name of its tree and its key. If there is a `salt`, it is a node of that salt's tree."""

    model: str | None
    root: str
    key: int
    salt: str | None = None


@dataclass(frozen=True)
class FromNode(FromModel[Result]):
    """A result of one node: the name of its tree, and a function for the text of packed tokens."""

    root: str
    decode: Callable[[bytes], str]


class CacheService:
    """Operations on the caches of the loaded models. A prefix is an ask with messages, or with a text."""

    def __init__(self, settings: Settings, models: LoadedModels, catalog: Catalog) -> None:
        self._settings = settings
        self._models = models
        self._catalog = catalog

    async def stats(self, model: str | None, salt: str | None) -> list[FromModel[dict[str, Any]]]:
        """The figures of one loaded model or of all with a tree; of one salt if given. Raises RequestError."""
        chosen = self._generators()
        if model is not None:
            loaded = self._models.find((await asyncio.to_thread(self._catalog.files, model)).name)
            if loaded is None:
                raise RequestError(f"the model {model!r} is not loaded: there are no figures of it")
            chosen = [loaded]
        return [FromModel(each.name, await each.tree.stats(salt)) for each in chosen]

    def _generators(self) -> list[LoadedModel]:
        return [each for each in self._models.list() if each.generates]

    async def tree(self, model: str | None, salt: str | None) -> FromModel[TreeView]:
        async with self._using(model) as loaded:
            return FromModel(loaded.name, await loaded.tree.view(salt))

    async def at_node(self, node: NodeName, work: NodeWork[Result]) -> FromNode[Result]:
        """Do something of `cache/admin/nodes.py` at a node. Raises NodeNotFound, and what the work raises."""
        async with self._using(node.model) as loaded:
            decode, tree = loaded.generator.facts.prompts.decode, loaded.tree
            root = node.root if node.salt is None else tree.own_root(node.root, node.salt)
            result = await tree.at_node(root, node.key, work)
            return FromNode(loaded.name, result, root, lambda packed: decode(unpack(packed)))

    async def explain(self, prefix: Ask) -> PrefixExplanation:
        """How much of a prompt would be reused, and why not more."""
        async with self._encoded(prefix, encode_ask) as (loaded, encoded):
            return await _explain(loaded, encoded, lambda tree, packed: tree.look_up(packed, prefix.salt))

    async def keep(self, prefix: Ask, kept: bool) -> PrefixExplanation:
        """Keep a known prefix longer than others, or keep it no longer. One that is not known whole stays as it is."""
        async with self._encoded(prefix, encode_prefix) as (loaded, encoded):
            return await _explain(loaded, encoded, lambda tree, packed: tree.keep(packed, kept, prefix.salt))

    async def warm(self, prefix: Ask) -> FromModel[Completion]:
        """Compute a prefix and keep it; messages up to the start of the next one. Raises DoesNotFit."""
        async with self._encoded(prefix, encode_prefix) as (loaded, encoded):
            tenant = tenant_of(prefix.salt) if self._settings.keys_file else ""
            return FromModel(loaded.name, await loaded.tree.warm(encoded, prefix.salt, tenant))

    async def clear(self, model: str | None, salt: str | None) -> list[str]:
        """Forget all that no running request uses, of one model or all, of one salt if given; return the models' names."""
        names = [each.name for each in self._generators()] if model is None else [model]
        for name in names:
            async with self._using(name) as loaded:
                await loaded.tree.clear(salt)
        return names

    async def export(self, model: str | None, salt: str) -> FromModel[Path]:
        """The tree of a salt as a new file, which the caller deletes. Raises Unavailable without room or disk."""
        async with self._using(model) as loaded:
            figures = loaded.worker.snapshot()
            num_copies = 2 if figures.get("replicas") else 1  # their archives are beside the one they are merged into
            num_bytes = num_copies * int(figures.get("disk_bytes", 0))
            await asyncio.to_thread(require_room, self._settings, num_bytes)
            try:
                file = await asyncio.to_thread(make_file, self._settings)
            except OSError as error:
                raise Unavailable(f"the archive could not be written: {error.strerror or error}") from error
            try:
                await loaded.tree.export_file(file, salt)
            except BaseException as error:
                file.unlink(missing_ok=True)
                if isinstance(error, DiskError):
                    raise Unavailable(str(error).replace(str(file), "the archive")) from error
                raise
            return FromModel(loaded.name, file)

    async def import_archive(self, model: str | None, file: Path, salt: str) -> FromModel[ImportResult]:
        """Add an archive to the tree of a salt. Raises RequestError for a wrong one."""
        async with self._using(model) as loaded:
            try:
                return FromModel(loaded.name, await loaded.tree.import_file(file, salt))
            except DiskError as error:  # with the file's path, which the client need not know
                raise RequestError(str(error).replace(str(file), "the archive")) from error

    @asynccontextmanager
    async def _encoded(self, prefix: Ask, encode: Encode) -> AsyncIterator[tuple[LoadedModel, EncodedPrompt]]:
        """The model of a prefix, in use inside the context, and the tokens of the prefix, as a chat would have them.

        Raises PromptTooLong.
        """
        async with self._using(prefix.model) as loaded:

            def work(is_cancelled: Callable[[], bool]) -> EncodedPrompt:
                ask = self._catalog.names.complete(prefix)
                facts = loaded.facts(ask.template)
                limit = PromptLimit(facts.context_tokens, is_cancelled)
                return encode(ask, facts, limit, sorts_tools=self._settings.sort_tools)

            yield loaded, await loaded.threads.run(work, prefix.num_chars)

    def _using(self, model: str | None) -> AbstractAsyncContextManager[LoadedModel]:
        return self._models.using(self._models.choose_name(model))


async def _explain(
    loaded: LoadedModel, encoded: EncodedPrompt, ask: Callable[[ServedTree, bytes], Awaitable[Mapping[str, Lookup]]]
) -> PrefixExplanation:
    """What the tree answers about a prefix, with texts."""
    packed = encoded.tokens.key
    known = await ask(loaded.tree, packed)
    replica = max(known, key=lambda name: (known[name].cached, known[name].matched))
    decode = loaded.generator.facts.prompts.decode
    words = await asyncio.to_thread(known[replica].explain, packed, decode, encoded.boundaries)
    return PrefixExplanation(loaded.name, words, known[replica].is_kept, replica, known)
