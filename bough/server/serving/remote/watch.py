"""A watch over the trees of all replicas as one. Roots are named `replica:root`, as in a view.

Every look asks each replica for what has changed there. One that takes long delays the others by `PATIENCE_S` at most: what
it tells comes with a later look. The nodes of a replica that was lost are told as gone, and one that comes later tells its
whole tree.

Always true between looks: `_keys` of a replica are the nodes that were told of it and are not gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from bough.cache.admin.watch import RootChanges, TreeChanges
from bough.cache.tree.census import NodeRecord
from bough.errors import BoughError
from bough.server.serving.model.contract import root_at
from bough.server.serving.model.look import Look, Seen, Sought
from bough.server.serving.remote.messages import Operation
from bough.server.serving.remote.replicas import ReplicaLost, Replicas

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
_CLOSE_S = 1.0  # replicas that do not answer end the watch themselves, when nobody asks any more

Roots = dict[str, RootChanges]


class RemoteWatch:
    """Implements `ServedWatch` over replicas. `names` are those that are known to live."""

    def __init__(self, replicas: Replicas, names: Callable[[], Collection[str]]) -> None:
        self._id = secrets.token_hex(8)
        self._replicas = replicas
        self._names = names
        self._watched: dict[str, _WatchedReplica] = {}
        self._is_first = True

    async def look(self, sought: Sequence[Sought], salts: Collection[str]) -> Look:
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
        """Watch the replicas that there are; returns the changes by those that are no more."""
        names, gone = set(self._names()), Roots()
        for name in self._watched.keys() - names:
            watched = self._watched.pop(name)
            watched.stop()
            gone |= watched.forget()
        for name in sorted(names - self._watched.keys()):
            self._watched[name] = _WatchedReplica(name)
        return gone

    async def _ask(self, watched: _WatchedReplica, sought: Sequence[Sought], salts: Collection[str]) -> Look:
        slim = tuple(_slim(each) for each in sought)
        arguments = (self._id, watched.is_new, slim, tuple(salts))
        found: Look = await self._replicas.call(Operation(watched.name, "watch", arguments))
        return found

    def _merge(self, changes: TreeChanges, salts: Collection[str]) -> Look:
        looks = [each.last for each in self._watched.values() if each.last is not None]
        seen: dict[int, Seen] = {}
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
    """What is known of one replica: the nodes that were told, its last look, and the look that is under way.

    `is_new` says that it must tell its whole tree.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_new = True
        self.asked: asyncio.Task[Look] | None = None
        self.last: Look | None = None
        self._keys: dict[str, set[int]] = {}  # by the names of roots there

    def apply(self, look: Look) -> Roots:
        """Take up what a look has found; returns the changes. After a reset, nodes that are not told any more are gone."""
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
        """It was lost: all of its nodes are gone. If it answers again, it tells everything."""
        self.is_new, self.last = True, None
        return self._drop_keys()

    def _drop_keys(self) -> Roots:
        keys, self._keys = self._keys, {}
        return {root_at(self.name, root): RootChanges(changed=dict.fromkeys(each)) for root, each in keys.items()}

    def stop(self) -> None:
        if self.asked is not None:
            self.asked.cancel()


def _take(watched: _WatchedReplica, asked: asyncio.Task[Look]) -> Roots:
    """The changes that a replica has told. Of one that could not be asked everything stays as it was told last."""
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
    """What a look has raised is of no use when nobody watches any more."""
    if not asked.cancelled():
        asked.exception()


def _slim(sought: Sought) -> Sought:
    """A request without its tokens, if its replica has them."""
    return replace(sought, packed=b"") if sought.request_id else sought


def _at_wall_time(record: NodeRecord | None, offset: float) -> NodeRecord | None:
    """A record whose time is that of day: the clocks of replicas differ. One that was never used stays so."""
    if record is None or not record.last_used:
        return record
    return record._replace(last_used=record.last_used + offset)


def _add(stats: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in stats:
        total.update(each)
    return dict(total)
