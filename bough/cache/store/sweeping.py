"""Sweeping: deleting from the store what was cleared, what is too old, and the oldest beyond the budget.

One machine at a time sweeps, the one with the lease: an object with its owner and the time at which it ends. If two sweep
at once, because their clocks differ or the store has no conditional writes, they do no harm.

A clear leaves small marks in the store for a while, one for each salt and machine: other machines do not send that content
again meanwhile, and what they sent before they saw the mark is swept.

Only objects below our prefix with a key of exactly our form are counted and deleted (`format`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bough.cache.store.format import ALL, DELETED, DELETION_KEY, LEASE, PAGE_KEY, PREFIX
from bough.cache.store.objects import ListedObject, ObjectStore

LEASE_S = 900.0
MAX_LEASE_BYTES = 4096
DELETED_S = 600.0  # other machines do not send again for this long what was cleared
LOOK_EVERY_S = 30.0  # how often a machine looks for what others have cleared
SENT_WITHIN_S = 60.0  # an upload that began before a look has ended after this time, whatever the store's timeouts
DELETE_AT_ONCE = 500


def take_lease(objects: ObjectStore, owner: str, now: float) -> bool:
    """Take or prolong the right to sweep, for `LEASE_S`; False if another machine has it."""
    content = json.dumps({"owner": owner, "expires": now + LEASE_S}).encode()
    held = objects.get(LEASE, MAX_LEASE_BYTES)
    if held is None:
        return objects.put_new(LEASE, content)
    try:
        known = json.loads(bytes(held.content))
        is_taken = known["owner"] != owner and now < float(known["expires"]) <= now + 2 * LEASE_S
    except (ValueError, KeyError, TypeError, OverflowError):
        is_taken = False  # damaged
    return not is_taken and objects.replace(LEASE, content, held.tag)


@dataclass(frozen=True)
class Deletion:
    """A root, or all of a model (`ALL`), was cleared at a time."""

    fingerprint: str
    root: str
    owner: str
    at: float


class Deletions:
    """The recent clears of one model, by this machine and others."""

    def __init__(self, objects: ObjectStore, fingerprint: str, owner: str, wall: Callable[[], float]) -> None:
        self._objects = objects
        self._prefix = f"{DELETED}{fingerprint}/"
        assert DELETION_KEY.fullmatch(f"{self._prefix}{ALL}/{owner}"), f"{fingerprint!r} or {owner!r} would never be swept"
        self._owner = owner
        self._wall = wall
        self._known: dict[str, float] = {}  # when others have last cleared a root

    def note(self, root: bytes | None) -> None:
        """Mark a root, or all of them, as cleared."""
        self._objects.put(f"{self._prefix}{ALL if root is None else root.hex()}/{self._owner}", b"cleared")

    def look(self) -> None:
        """Read the marks of other machines."""
        known = dict[str, float]()
        for each in _parse_deletions(each for page in self._objects.list(self._prefix) for each in page):
            if each.owner != self._owner:
                known[each.root] = max(each.at, known.get(each.root, 0.0))
        self._known = known

    def forbids(self, root: bytes) -> bool:
        """Whether another machine has recently cleared a root."""
        since = self._wall() - DELETED_S
        return any(self._known.get(each, since) > since for each in (root.hex(), ALL))


def _parse_deletions(listed: Iterable[ListedObject]) -> Iterator[Deletion]:
    for each in listed:
        if found := DELETION_KEY.fullmatch(each.key):
            yield Deletion(found[1], found[2] or ALL, found[3], each.modified)


@dataclass(frozen=True)
class SweepResult:
    """The bytes that a sweep has left, and what it deleted."""

    held_bytes: int
    num_deleted: int
    deleted_bytes: int


def sweep(objects: ObjectStore, now: float, budget_bytes: int | None, ttl_s: float | None) -> SweepResult:
    """Delete what was cleared, what was not written for the time to live, and then the oldest beyond the budget.

    `now` is the time by the store's clock. The list of all objects is in memory meanwhile, about 200 bytes for each.
    """
    control: list[ListedObject] = []
    pages: list[ListedObject] = []
    for listing in objects.list(PREFIX):
        control += [each for each in listing if DELETION_KEY.fullmatch(each.key)]
        pages += [each for each in listing if PAGE_KEY.fullmatch(each.key)]
    cleared: dict[tuple[str, str], float] = defaultdict(float)
    for mark in _parse_deletions(control):
        cleared[mark.fingerprint, mark.root] = max(cleared[mark.fingerprint, mark.root], mark.at)
    gone = [each for each in pages if _is_cleared(each, cleared) or (ttl_s is not None and each.modified < now - ttl_s)]
    gone_keys = {each.key for each in gone}
    kept = sorted((each for each in pages if each.key not in gone_keys), key=lambda each: each.modified)
    excess_bytes = 0 if budget_bytes is None else sum(each.nbytes for each in kept) - budget_bytes
    for each in kept:
        if excess_bytes <= 0:
            break
        gone.append(each)
        excess_bytes -= each.nbytes
    old = [each.key for each in control if each.modified < now - DELETED_S]
    for keys in _batches([each.key for each in gone] + old):
        objects.delete(keys)
    deleted_bytes = sum(each.nbytes for each in gone)
    return SweepResult(sum(each.nbytes for each in pages) - deleted_bytes, len(gone), deleted_bytes)


def _is_cleared(listed: ListedObject, cleared: dict[tuple[str, str], float]) -> bool:
    """Whether an object was written before its root was cleared, or before others could have seen that."""
    _, fingerprint, root, _ = listed.key.split("/")
    at = max(cleared.get((fingerprint, root), 0.0), cleared.get((fingerprint, ALL), 0.0))
    return listed.modified < at + LOOK_EVERY_S + SENT_WITHIN_S and at > 0


def clear_model(objects: ObjectStore, fingerprint: str, owner: str, wall: Callable[[], float]) -> None:
    """Delete everything that the store has of one model, and mark it as cleared."""
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
