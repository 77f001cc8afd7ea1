"""The trees of all replicas as one: an operation goes to each replica that it concerns, and results name the replica.

Roots are named `replica:root`, so that a node can be found again. A replica that was lost, or is full or stuck, is left
out, unless it was the only one. Clearing leaves none out: the caller must know if something was not cleared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bough.cache.admin.archive import ImportResult, merge_archives
from bough.cache.admin.view import Lookup, TreeRecords, TreeView, Viewer
from bough.errors import RequestError, Unavailable
from bough.models.prompts import EncodedPrompt, Prompts
from bough.server.serving.model.contract import ROOT_SEPARATOR, NodeWork, Result, root_at
from bough.server.serving.remote.archives import Transfer
from bough.server.serving.remote.replicas import Operation, ReplicaLost, Replicas, call_replica
from bough.server.serving.remote.watch import RemoteWatch
from bough.system.tasks import gather
from bough.system.threads import write_in_thread
from bough.types import Completion


class RemoteTrees:
    """Implements `ServedTree` over replicas. `names` returns those of about a second ago."""

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
            root_at(name, root): tuple(
                each._replace(last_used=each.last_used + now - records.taken_s)  # clocks of machines differ
                for each in nodes
            )
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

    async def warm(self, prefix: EncodedPrompt, salt: str, tenant: str) -> Completion:
        """Compute a prefix and keep it, at the replica with the shortest queue."""
        figures = await self._living()
        name = min(figures, key=lambda each: figures[each].get("queue", 0) + figures[each].get("running", 0))
        completion: Completion = await call_replica(self._replicas, name, "warm", prefix, salt, tenant)
        return completion

    def own_root(self, root: str, salt: str) -> str:
        """As in the contract. Raise RequestError if `root` names no replica."""
        return root_at(_split(root)[0], salt)

    def watch(self) -> RemoteWatch:
        return RemoteWatch(self._replicas, self._names)

    async def at_node(self, root: str, key: int, work: NodeWork[Result]) -> Result:
        """As in the contract, at the replica that `root` names. Raise RequestError if there is none."""
        name, own_root = _split(root)
        if name not in await self._living():
            raise RequestError(f"there is no replica {name!r:.200} now: root is {root!r:.200}, and must name one")
        result: Result = await call_replica(self._replicas, name, "at_node", own_root, key, work)
        return result

    async def clear(self, salt: str | None) -> None:
        names = set(await self._living())
        kept = names - set(await self._ask_all("clear", salt))
        if kept:
            raise Unavailable(f"{', '.join(sorted(kept))} could not be asked to clear its tree; try again soon")

    async def export_file(self, file: Path, salt: str) -> None:
        """Merge the trees of a salt at all replicas into one file. Raise Unavailable if one is lost meanwhile."""
        figures = await self._living()
        parts = {name: file.with_name(f"{file.name}.{name}") for name in sorted(figures)}
        fetches = [
            partial(self._fetch, name, part, salt, figures[name].get("disk_bytes", 0)) for name, part in parts.items()
        ]
        try:
            await gather(fetches, len(fetches))
            sources = list(parts.values())
            await write_in_thread(file, lambda is_wanted: merge_archives(sources, file, is_wanted=is_wanted))
        finally:
            for part in parts.values():
                part.unlink(missing_ok=True)

    async def _fetch(self, name: str, part: Path, salt: str, disk_bytes: int) -> None:
        async with Transfer(self._replicas, name) as transfer:
            await transfer.fetch(part, salt, disk_bytes)

    async def import_file(self, file: Path, salt: str) -> ImportResult:
        """Add an archive at the replica whose disk has the most room."""
        figures = await self._living()
        room = {name: each.get("disk_budget_bytes", 0) - each.get("disk_bytes", 0) for name, each in figures.items()}
        name = max(sorted(room), key=room.__getitem__)
        async with Transfer(self._replicas, name) as transfer:
            return await transfer.send(file, salt)

    async def _ask_all(self, operation: str, *arguments: Any) -> dict[str, Any]:
        """The result of every replica that answers, by its name. Raises Unavailable if there is none."""
        names = sorted(await self._living())
        outcomes = await asyncio.gather(
            *(self._replicas.call(Operation(name, operation, arguments)) for name in names), return_exceptions=True
        )
        failures = [each for each in outcomes if isinstance(each, BaseException)]
        for failure in failures:
            if not isinstance(failure, ReplicaLost | Unavailable):
                raise failure
        found = {
            name: outcome for name, outcome in zip(names, outcomes, strict=True) if not isinstance(outcome, BaseException)
        }
        if found:
            return found
        if isinstance(failures[-1], Unavailable):
            raise failures[-1]
        raise Unavailable(f"all {len(names)} replicas were lost; try again soon")

    async def _living(self) -> Mapping[str, dict[str, Any]]:
        figures = await self._replicas.read_figures()
        if not figures:
            raise Unavailable("no replica is ready; try again soon")
        return figures


def _split(root: str) -> tuple[str, str]:
    """The names of the replica and of its own root. Raise RequestError if there is no replica's."""
    name, separator, own_root = root.partition(ROOT_SEPARATOR)
    if not separator:
        raise RequestError(f"root is {root!r:.200}, and must name a replica and its tree, as the tree's view does")
    return name, own_root


def sum_figures(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all replicas as one: counts are added, and those of each are under `replicas`."""
    total: dict[str, Any] = {}
    for figure in figures.values():
        for name, value in figure.items():
            total[name] = _add(name, total[name], value) if name in total else value
    return total | {"replicas": {name: dict(figure) for name, figure in figures.items()}}


def _add(name: str, one: Any, other: Any) -> Any:
    if name == "is_stuck":
        return one and other
    if not isinstance(one, bool) and isinstance(one, int | float) and isinstance(other, int | float):
        return one + other
    return one or other
