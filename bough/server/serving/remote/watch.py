"""Watches over the trees of all replicas as one: `RemoteWatch` is the server's side, `Watches` a replica's.

Every look asks each replica for its changes. A slow one delays the others by `PATIENCE_S` at most: its changes come with a
later look. The nodes of a lost replica are reported as gone, and a new one reports its whole tree. Roots are named
`replica:root`, as in a view. A replica without watches notes no changes for them.

Always true between looks: `_keys` of a replica are its nodes that were reported and are not gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from bough.cache.admin.watch import RootChanges, TreeChanges
from bough.cache.residency.census import NodeRecord
from bough.errors import BoughError
from bough.scheduling.job import Job
from bough.server.serving.model.contract import (
    TEXT_TOKENS,
    Look,
    RequestPosition,
    ServedTree,
    ServedWatch,
    WatchedRequest,
    root_at,
)
from bough.server.serving.remote.leases import Leases
from bough.server.serving.remote.replicas import Operation, ReplicaLost, Replicas
from bough.tokens import cut

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
_CLOSE_S = 1.0  # replicas that do not answer end the watch themselves, when its lease ends

Roots = dict[str, RootChanges]


class RemoteWatch:
    """Implements `ServedWatch` over replicas. `names` returns those that are known to live."""

    def __init__(self, replicas: Replicas, names: Callable[[], Collection[str]]) -> None:
        self._id = secrets.token_hex(8)
        self._replicas = replicas
        self._names = names
        self._watched: dict[str, _WatchedReplica] = {}
        self._is_first = True

    async def look(self, sought: Sequence[WatchedRequest], salts: Collection[str]) -> Look:
        roots = self._update_replicas()
        for name, watched in self._watched.items():
            if watched.asked is None:
                own = tuple(each for each in sought if each.replica == name)
                watched.asked = asyncio.create_task(self._ask(watched, own, salts), name=f"bough-watch-{name}")
                watched.asked.add_done_callback(_mark_read)
        asked = {watched.asked: watched for watched in self._watched.values() if watched.asked is not None}
        if asked:
            await asyncio.wait(asked, timeout=PATIENCE_S)
        for task, watched in asked.items():
            if task.done():
                watched.asked = None
                roots |= _take(watched, task)
        is_reset, self._is_first = self._is_first, False
        return self._merge(TreeChanges(roots, is_reset, 0.0), salts)

    def _update_replicas(self) -> Roots:
        """Watch the living replicas; returns the changes by those that are gone."""
        names, gone = set(self._names()), Roots()
        for name in self._watched.keys() - names:
            watched = self._watched.pop(name)
            watched.stop()
            gone |= watched.forget()
        for name in sorted(names - self._watched.keys()):
            self._watched[name] = _WatchedReplica(name)
        return gone

    async def _ask(self, watched: _WatchedReplica, sought: Sequence[WatchedRequest], salts: Collection[str]) -> Look:
        # a replica that has the request has its tokens
        slim = tuple(replace(each, packed=b"") if each.request_id else each for each in sought)
        arguments = (self._id, watched.is_new, slim, tuple(salts))
        found: Look = await self._replicas.call(Operation(watched.name, "watch", arguments))
        return found

    def _merge(self, changes: TreeChanges, salts: Collection[str]) -> Look:
        looks = [each.last for each in self._watched.values() if each.last is not None]
        seen: dict[int, RequestPosition] = {}
        for look in looks:
            seen |= look.seen
        rates = [look.prefill_tokens_per_s for look in looks if look.prefill_tokens_per_s is not None]
        stats = {salt: _add(look.stats[salt] for look in looks if salt in look.stats) for salt in salts}
        known = {salt: each for salt, each in stats.items() if each}
        return Look(changes, seen, known, fmean(rates) if rates else None)

    async def close(self) -> None:
        watched, self._watched = self._watched, {}
        for each in watched.values():
            each.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(
                    *(self._replicas.call(Operation(name, "unwatch", (self._id,))) for name in watched),
                    return_exceptions=True,
                )


class _WatchedReplica:
    """One replica: its reported nodes, its last look, and the one under way. If `is_new`, it must report its whole tree."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_new = True
        self.asked: asyncio.Task[Look] | None = None
        self.last: Look | None = None
        self._keys: dict[str, set[int]] = {}  # by the names of roots there

    def apply(self, look: Look) -> Roots:
        """Apply a look; returns the changes. After a reset, nodes that are not reported again are gone."""
        changes = look.changes
        roots = self._drop_keys() if changes.is_reset else {}
        self.is_new, self.last = False, look
        for root, changed in changes.roots.items():
            keys = self._keys.setdefault(root, set())
            keys.update(key for key, record in changed.nodes.items() if record is not None)
            keys.difference_update(key for key, record in changed.nodes.items() if record is None)
            if not keys:
                del self._keys[root]
            nodes = {key: _at_wall_time(record, changes.wall_offset) for key, record in changed.nodes.items()}
            roots.setdefault(root_at(self.name, root), RootChanges()).changed.update(nodes)
        return roots

    def forget(self) -> Roots:
        """Apply the loss of the replica: all of its nodes are gone. If it answers again, it reports everything."""
        self.is_new, self.last = True, None
        return self._drop_keys()

    def _drop_keys(self) -> Roots:
        keys, self._keys = self._keys, {}
        return {root_at(self.name, root): RootChanges(changed=dict.fromkeys(each)) for root, each in keys.items()}

    def stop(self) -> None:
        if self.asked is not None:
            self.asked.cancel()


def _take(watched: _WatchedReplica, asked: asyncio.Task[Look]) -> Roots:
    """The changes that a replica has reported; none if it could not look now."""
    try:
        return watched.apply(asked.result())
    except ReplicaLost as error:
        log.debug("%s is watched no more: %s", watched.name, error)
        return watched.forget()
    except BoughError as error:
        log.debug("%s cannot be looked at now: %s", watched.name, error)
        watched.is_new = True
        return {}


def _mark_read(asked: asyncio.Task[Look]) -> None:
    """Mark a task's exception as read: a look that ends after the watch was closed logs none."""
    if not asked.cancelled():
        asked.exception()


def _at_wall_time(record: NodeRecord | None, offset: float) -> NodeRecord | None:
    """A record with its time in wall time, because the clocks of replicas differ. 0 stays 0: never used."""
    if record is None or not record.last_used:
        return record
    return record._replace(last_used=record.last_used + offset)


def _add(stats: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in stats:
        total.update(each)
    return dict(total)


@dataclass
class _Watch:
    """A watch, and the tokens of the requests of its last look, by their numbers."""

    watch: ServedWatch
    packed: dict[int, bytes] = field(default_factory=dict)


class Watches:
    """The watches of servers over this replica's tree, by id. `find` finds a running request. Runs on one event loop."""

    def __init__(self, tree: ServedTree, find: Callable[[str], Job | None]) -> None:
        self._find = find
        self._leases: Leases[_Watch] = Leases(lambda: _Watch(tree.watch()), lambda held: held.watch.close())

    def __len__(self) -> int:
        return len(self._leases)

    async def look(self, watch_id: str, is_new: bool, sought: Sequence[WatchedRequest], salts: Collection[str]) -> Look:
        """A look by the watch with this id, opened if there is none. If `is_new`, it is opened again and reports all.

        The edges of nodes are cut to their shown part: a long one would be sent whole with each change.
        """
        if is_new:
            await self.close(watch_id)
        held = self._leases.use(watch_id)
        held.packed = {each.number: self._pack(each, held) for each in sought}
        here = [replace(each, packed=held.packed[each.number]) for each in sought]
        found = await held.watch.look(here, salts)
        changes = await asyncio.to_thread(_cut_edges, found.changes) if found.changes.roots else found.changes
        running = {each.number: self._find(each.request_id) for each in sought}
        loading = {number for number, each in running.items() if each is not None and each.is_loading}
        seen = {number: replace(each, is_loading=number in loading) for number, each in found.seen.items()}
        return replace(found, changes=changes, seen=seen)

    async def close(self, watch_id: str) -> None:
        """Close a watch, if it is open."""
        await self._leases.close(watch_id)

    def _pack(self, sought: WatchedRequest, held: _Watch) -> bytes:
        """The tokens of a request: those given, those of the last look, or those of the prompt that runs here."""
        if tokens := sought.packed or held.packed.get(sought.number):
            return tokens
        running = self._find(sought.request_id)
        return running.request.tokens.key if running is not None else b""


def _cut_edges(changes: TreeChanges) -> TreeChanges:
    roots = {
        root: RootChanges(changed={key: _cut_edge(record) for key, record in changed.nodes.items()})
        for root, changed in changes.roots.items()
    }
    return replace(changes, roots=roots)


def _cut_edge(record: NodeRecord | None) -> NodeRecord | None:
    if record is None or record.end - record.start <= TEXT_TOKENS:
        return record
    return record._replace(edge=cut(record.edge, 0, TEXT_TOKENS))
