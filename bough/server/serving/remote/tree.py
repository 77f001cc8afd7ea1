"""The trees of all replicas as one: every operation is asked of each that it concerns, and results name the replica.

Roots are named `replica:root`, so that a node can be found again. A replica that was lost, or is full or stuck, is left
out, unless it was the only one. Clearing leaves none out: who asks for it must know if something was kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bough.cache.admin.archive import Imported
from bough.cache.admin.merge import merge_archives
from bough.cache.admin.nodes import EvictedNodes, KeptNode, NodeDetails
from bough.cache.admin.view import Lookup, TreeRecords, TreeView, Viewer
from bough.cache.tree.census import NodeRecord
from bough.errors import RequestError, Unavailable
from bough.models.prompts import Encoded, Prompts
from bough.server.serving.model.contract import ROOT_SEPARATOR, root_at
from bough.server.serving.remote.messages import Operation
from bough.server.serving.remote.replicas import ReplicaLost, Replicas
from bough.server.serving.remote.transfer import transferring
from bough.server.serving.remote.watch import RemoteWatch
from bough.system.threads import write_in_thread
from bough.types import Completion


class RemoteTrees:
    """Implements `ServedTree` over replicas. `names` are those of the replicas that were there about a second ago."""

    def __init__(self, replicas: Replicas, prompts: Prompts, names: Callable[[], Collection[str]]) -> None:
        self._replicas = replicas
        self._names = names
        self._viewer = Viewer(prompts.decode)

    async def stats(self, salt: str | None) -> dict[str, Any]:
        return sum_figures(await self._ask_all("stats", salt))

    async def view(self, salt: str | None) -> TreeView:
        found: dict[str, TreeRecords] = await self._ask_all("view", salt)
        now = max(each.taken_s for each in found.values())
        roots = {
            root_at(name, root): tuple(_shift(each, now - records.taken_s) for each in nodes)
            for name, records in found.items()
            for root, nodes in records.roots.items()
        }
        return self._viewer.view(TreeRecords(roots, now))

    async def look_up(self, prompt: bytes, salt: str) -> Mapping[str, Lookup]:
        return await self._ask_trees("look_up", prompt, salt)

    async def keep(self, prefix: bytes, kept: bool, salt: str) -> Mapping[str, Lookup]:
        return await self._ask_trees("keep", prefix, kept, salt)

    async def _ask_trees(self, name: str, *arguments: Any) -> Mapping[str, Lookup]:
        found = await self._ask_all(name, *arguments)
        return {
            replica: replace(lookup, root=root_at(replica, lookup.root))
            for replica, only in found.items()
            for lookup in only.values()
        }

    async def warm(self, prefix: Encoded, salt: str, tenant: str) -> Completion:
        """Compute a prefix and keep it, at the replica with the shortest queue."""
        figures = await self._living()
        name = min(figures, key=lambda each: figures[each].get("queue", 0) + figures[each].get("running", 0))
        completion: Completion = await self._call(name, "warm", prefix, salt, tenant)
        return completion

    def own_root(self, root: str, salt: str) -> str:
        """As the contract says. Raises RequestError if `root` names no replica."""
        return root_at(_split(root)[0], salt)

    def watch(self) -> RemoteWatch:
        return RemoteWatch(self._replicas, self._names)

    async def read_node(self, root: str, key: int) -> NodeDetails:
        details: NodeDetails = await self._ask_root("read_node", root, key)
        return details

    async def keep_node(self, root: str, key: int, kept: bool) -> KeptNode:
        node: KeptNode = await self._ask_root("keep_node", root, key, kept)
        return node

    async def evict_node(self, root: str, key: int) -> EvictedNodes:
        nodes: EvictedNodes = await self._ask_root("evict_node", root, key)
        return nodes

    async def clear(self, salt: str | None) -> None:
        names = set(await self._living())
        kept = names - set(await self._ask_all("clear", salt))
        if kept:
            raise Unavailable(f"{', '.join(sorted(kept))} could not be asked to clear its tree; try again soon")

    async def export_file(self, file: Path, salt: str) -> None:
        """Write what any replica has of a salt into one file. Raises Unavailable if one is lost meanwhile."""
        figures = await self._living()
        parts = {name: file.with_name(f"{file.name}.{name}") for name in sorted(figures)}
        fetching = [
            asyncio.create_task(self._fetch(name, part, salt, figures[name].get("disk_bytes", 0)))
            for name, part in parts.items()
        ]
        try:
            await asyncio.gather(*fetching)
            sources = list(parts.values())
            await write_in_thread(file, lambda is_wanted: merge_archives(sources, file, is_wanted=is_wanted))
        finally:
            for task in fetching:
                task.cancel()
            await asyncio.gather(*fetching, return_exceptions=True)
            for part in parts.values():
                part.unlink(missing_ok=True)

    async def _fetch(self, name: str, part: Path, salt: str, disk_bytes: int) -> None:
        async with transferring(self._replicas, name) as transfer:
            await transfer.fetch(part, salt, disk_bytes)

    async def import_file(self, file: Path, salt: str) -> Imported:
        """Add an archive at the replica whose disk has the most room. The router hears of it as of all that changes."""
        figures = await self._living()
        name = max(sorted(figures), key=lambda each: _disk_room(figures[each]))
        async with transferring(self._replicas, name) as transfer:
            return await transfer.send(file, salt)

    async def _ask_root(self, operation: str, root: str, *arguments: Any) -> Any:
        name, own_root = _split(root)
        if name not in await self._living():
            raise RequestError(f"there is no replica {name!r:.200} now: root is {root!r:.200}, and must name one")
        return await self._call(name, operation, own_root, *arguments)

    async def _ask_all(self, operation: str, *arguments: Any) -> dict[str, Any]:
        """The result of every replica that answers, by its name. Raises Unavailable if there is none."""
        names = sorted(await self._living())
        outcomes = await asyncio.gather(
            *(self._replicas.call(Operation(name, operation, arguments)) for name in names), return_exceptions=True
        )
        found: dict[str, Any] = {}
        refused: Exception | None = None
        for name, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                if not isinstance(outcome, ReplicaLost | Unavailable):
                    raise outcome
                refused = outcome
            else:
                found[name] = outcome
        if not found:
            if isinstance(refused, Unavailable):
                raise refused
            raise Unavailable(f"all {len(names)} replicas were lost; try again soon")
        return found

    async def _call(self, replica: str, operation: str, *arguments: Any) -> Any:
        try:
            return await self._replicas.call(Operation(replica, operation, arguments))
        except ReplicaLost as error:
            raise Unavailable(f"{replica} was lost; try again soon") from error

    async def _living(self) -> Mapping[str, dict[str, Any]]:
        figures = await self._replicas.read_figures()
        if not figures:
            raise Unavailable("no replica is ready; try again soon")
        return figures


def _disk_room(figures: Mapping[str, Any]) -> int:
    return int(figures.get("disk_budget_bytes", 0)) - int(figures.get("disk_bytes", 0))


def _split(root: str) -> tuple[str, str]:
    """The names of the replica and of its own root. Raises RequestError."""
    name, separator, own_root = root.partition(ROOT_SEPARATOR)
    if not separator:
        raise RequestError(f"root is {root!r:.200}, and must name a replica and its tree, as the tree's view does")
    return name, own_root


def _shift(record: NodeRecord, seconds: float) -> NodeRecord:
    """A record by the clock of another machine."""
    return record._replace(last_used=record.last_used + seconds)


def sum_figures(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all replicas as one: counts are added, and those of each are under `replicas`."""
    total: dict[str, Any] = {}
    for figure in figures.values():
        for name, value in figure.items():
            total[name] = _join(name, total[name], value) if name in total else value
    return total | {"replicas": {name: dict(figure) for name, figure in figures.items()}}


def _join(name: str, one: Any, other: Any) -> Any:
    return _JOINED.get(name, _add)(one, other)


def _add(one: Any, other: Any) -> Any:
    if isinstance(one, bool):
        return one or other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one + other
    return one or other


_JOINED: dict[str, Callable[[Any, Any], Any]] = {"is_stuck": lambda one, other: one and other}
