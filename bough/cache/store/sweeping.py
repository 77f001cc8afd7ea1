"""Sweeping: who deletes from the store, and what: what was cleared, what is too old, and the oldest beyond the budget.

One machine at a time sweeps, the one that has the lease: an object with its owner and the time at which it ends. Two that
sweep at once, because their clocks differ or the store has no conditional writes, do no harm: deleting twice is nothing.

What was cleared is listed by small objects, one for each salt and machine, for a while: others do not send it again
meanwhile, and what they have sent before they knew it is swept.

Only what lies below our prefix and has a key of exactly our form counts and is deleted (`paths`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bough.cache.store.objects import Listed, ObjectStore
from bough.cache.store.paths import ALL, DELETED, DELETION_KEY, LEASE, PAGE_KEY, PREFIX

LEASE_S = 900.0
MAX_LEASE_BYTES = 4096

DELETED_S = 600.0
"""What was cleared is not sent again by other machines for so long."""

LOOK_EVERY_S = 30.0
"""How often a machine looks what others have cleared."""

SENT_WITHIN_S = 60.0
"""What a machine began to send before it looked is there after so long at most, whatever the store's timeouts."""

DELETE_AT_ONCE = 500


class Lease:
    """The right to sweep, for `LEASE_S` at a time."""

    def __init__(self, objects: ObjectStore, owner: str, wall: Callable[[], float]) -> None:
        self._objects = objects
        self._owner = owner
        self._wall = wall

    def take(self) -> bool:
        """Take or prolong the lease; False if another machine has it."""
        now = self._wall()
        content = json.dumps({"owner": self._owner, "expires": now + LEASE_S}).encode()
        held = self._objects.get(LEASE, MAX_LEASE_BYTES)
        if held is None:
            return self._objects.put_new(LEASE, content)
        try:
            known = json.loads(bytes(held.content))
            is_taken = known["owner"] != self._owner and now < float(known["expires"]) <= now + 2 * LEASE_S
        except (ValueError, KeyError, TypeError, OverflowError):
            is_taken = False  # it is no lease: it was damaged
        return not is_taken and self._objects.replace(LEASE, content, held.tag)


@dataclass(frozen=True)
class Deletion:
    """That what a root had, or all of a model (`ALL`), was cleared at a time."""

    fingerprint: str
    root: str
    owner: str
    at: float


class Deletions:
    """What was cleared of one model a short while ago."""

    def __init__(self, objects: ObjectStore, fingerprint: str, owner: str, wall: Callable[[], float]) -> None:
        self._objects = objects
        self._prefix = f"{DELETED}{fingerprint}/"
        assert DELETION_KEY.fullmatch(f"{self._prefix}{ALL}/{owner}"), f"{fingerprint!r} or {owner!r} would never be swept"
        self._owner = owner
        self._wall = wall
        self._known: dict[str, float] = {}  # when others have cleared a root last

    def note(self, root: bytes | None) -> None:
        """List that a root was cleared, or all of them."""
        self._objects.put(f"{self._prefix}{ALL if root is None else root.hex()}/{self._owner}", b"cleared")

    def look(self) -> None:
        """Find out what others have cleared."""
        known = dict[str, float]()
        for each in _parse_deletions(each for page in self._objects.list(self._prefix) for each in page):
            if each.owner != self._owner:
                known[each.root] = max(each.at, known.get(each.root, 0.0))
        self._known = known

    def forbids(self, root: bytes) -> bool:
        """Whether another machine has cleared a root, so that what this one has of it is older."""
        since = self._wall() - DELETED_S
        return any(self._known.get(each, since) > since for each in (root.hex(), ALL))


def _parse_deletions(listed: Iterable[Listed]) -> Iterator[Deletion]:
    """The lists of what was cleared among some objects."""
    for each in listed:
        if found := DELETION_KEY.fullmatch(each.key):
            yield Deletion(found[1], found[2] or ALL, found[3], each.modified)


@dataclass(frozen=True)
class Swept:
    """What one sweep has found and deleted."""

    held_bytes: int
    num_deleted: int
    deleted_bytes: int


def sweep(objects: ObjectStore, now: float, budget_bytes: int | None, ttl_s: float | None) -> Swept:
    """Delete what was cleared, what was not written for the time to live, and then the oldest beyond the budget.

    `now` is the time by the store's clock. Lists all that lies below our prefix, and keeps that list in memory meanwhile:
    about 200 bytes an object.
    """
    control: list[Listed] = []
    pages: list[Listed] = []
    for listing in objects.list(PREFIX):
        control += [each for each in listing if DELETION_KEY.fullmatch(each.key)]
        pages += [each for each in listing if PAGE_KEY.fullmatch(each.key)]
    cleared: dict[tuple[str, str], float] = {}
    for deletion in _parse_deletions(control):
        where = (deletion.fingerprint, deletion.root)
        cleared[where] = max(cleared.get(where, 0.0), deletion.at)
    gone = [each for each in pages if _is_cleared(each, cleared) or (ttl_s is not None and each.modified < now - ttl_s)]
    gone_keys = {each.key for each in gone}
    kept = sorted((each for each in pages if each.key not in gone_keys), key=lambda each: each.modified)
    gone += _beyond(kept, budget_bytes)
    old = [each.key for each in control if each.modified < now - DELETED_S]
    for keys in _batches([each.key for each in gone] + old):
        objects.delete(keys)
    deleted_bytes = sum(each.nbytes for each in gone)
    return Swept(sum(each.nbytes for each in pages) - deleted_bytes, len(gone), deleted_bytes)


def _is_cleared(listed: Listed, cleared: dict[tuple[str, str], float]) -> bool:
    """Whether an object was written before its root was cleared, or before others could know that."""
    if not cleared:
        return False
    _, fingerprint, root, _ = listed.key.split("/")
    at = max(cleared.get((fingerprint, root), 0.0), cleared.get((fingerprint, ALL), 0.0))
    return listed.modified < at + LOOK_EVERY_S + SENT_WITHIN_S and at > 0


def _beyond(oldest_first: Sequence[Listed], budget_bytes: int | None) -> list[Listed]:
    """The oldest objects without which the others are within the budget."""
    held_bytes, gone = sum(each.nbytes for each in oldest_first), list[Listed]()
    for each in oldest_first:
        if budget_bytes is None or held_bytes <= budget_bytes:
            break
        held_bytes -= each.nbytes
        gone.append(each)
    return gone


def clear_model(objects: ObjectStore, fingerprint: str, owner: str, wall: Callable[[], float]) -> None:
    """Delete everything that the store has of one model, and list that it was cleared."""
    Deletions(objects, fingerprint, owner, wall).note(None)
    delete_pages(objects, fingerprint)


def delete_pages(objects: ObjectStore, fingerprint: str, root: bytes | None = None) -> None:
    """Delete what the store has of one model, or of one of its roots."""
    prefix = f"{PREFIX}{fingerprint}/" + ("" if root is None else f"{root.hex()}/")
    listed = [each.key for listing in objects.list(prefix) for each in listing]  # all first: a listing may be of live data
    for keys in _batches([key for key in listed if PAGE_KEY.fullmatch(key)]):
        objects.delete(keys)


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(keys), DELETE_AT_ONCE):
        yield keys[start : start + DELETE_AT_ONCE]
