"""What stands first in an archive: which model it is of, and the tokens that every item in it is of.

Tokens are kept as steps. A step is one page of tokens, or part of one, after another step that is a whole page: together
they are the prefix of an item, from which any disk can make an address under its own secret and salt. There is no salt,
secret or keyed hash in a manifest.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from bough.cache.disk.address import Address
from bough.cache.disk.index import Identity
from bough.cache.disk.keys import Keys
from bough.cache.tokens import TOKEN_BYTES, num_tokens

ARCHIVE_FORMAT = 1
NO_STEP = -1

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Step:
    """Tokens that follow those of the step `parent`, which is a whole page and stands earlier in the list, or NO_STEP."""

    parent: int
    tokens: bytes


@dataclass(frozen=True)
class Item:
    """A page or state: rows [start, end) of the tokens that its step ends, and the size of its content."""

    step: int
    group: int
    start: int
    end: int
    nbytes: int
    last_used: float


@dataclass(frozen=True)
class PointItem:
    """A restore point at the end of its step."""

    step: int
    end: int
    reason: int
    is_kept: bool
    is_superseded: bool
    last_used: float


@dataclass(frozen=True)
class Manifest:
    """The whole of it; `decode_manifest` has checked that all of it fits together."""

    fingerprint: str
    model: str
    page_tokens: int
    steps: Sequence[Step]
    items: Sequence[Item]
    points: Sequence[PointItem]


class Chain:
    """Finds the steps of addresses. Whole pages are to be given before what follows them."""

    def __init__(self, keys: Keys, root: bytes, addresses: Iterable[Address]) -> None:
        self.steps: list[Step] = []
        self._of: dict[tuple[bytes, bytes], int] = {}
        after = {keys.first(root): NO_STEP}
        for address in sorted(addresses, key=lambda address: address.end):
            place = (address.before, address.tokens)
            if place in self._of or address.before not in after:
                continue
            self._of[place] = len(self.steps)
            if num_tokens(address.tokens) == keys.page_tokens:
                after[keys.after(*place)] = len(self.steps)
            self.steps.append(Step(after[address.before], address.tokens))

    def find(self, address: Address) -> int | None:
        """The step of an address, or None if some page before it is not known."""
        return self._of.get((address.before, address.tokens))


def make_addresses(keys: Keys, root: bytes, steps: Sequence[Step]) -> list[Address]:
    """For each step the address of its end, under these keys and this root; group and start are still to be filled in."""
    addresses: list[Address] = []
    first = keys.first(root)
    for step in steps:
        parent = addresses[step.parent] if step.parent != NO_STEP else None
        before = keys.after(parent.before, parent.tokens) if parent else first
        end = (parent.end if parent else 0) + num_tokens(step.tokens)
        addresses.append(Address(root, before, step.tokens, 0, end, end))
    return addresses


def encode_manifest(identity: Identity, steps: Sequence[Step], items: Sequence[Item], points: Sequence[PointItem]) -> bytes:
    """The manifest as JSON."""
    content = {
        "format": ARCHIVE_FORMAT,
        "byte_order": sys.byteorder,
        "fingerprint": identity.fingerprint,
        "model": identity.model,
        "page_tokens": identity.page_tokens,
        "steps": [{"parent": step.parent, "tokens": b64encode(step.tokens).decode()} for step in steps],
        "items": [asdict(item) for item in items],
        "points": [asdict(point) for point in points],
    }
    return json.dumps(content).encode()


def decode_manifest(content: bytes) -> Manifest:
    """A manifest from JSON, checked as a whole; raises ValueError."""
    try:
        data: Any = json.loads(content)
        if (data["format"], data["byte_order"]) != (ARCHIVE_FORMAT, sys.byteorder):
            raise ValueError(f"it has format {data['format']!r}, {data['byte_order']!r}-endian")
        manifest = Manifest(
            fingerprint=_typed(data["fingerprint"], str),
            model=_typed(data["model"], str),
            page_tokens=_typed(data["page_tokens"], int),
            steps=[Step(_typed(step["parent"], int), b64decode(step["tokens"], validate=True)) for step in data["steps"]],
            items=[Item(**{**item, "last_used": float(item["last_used"])}) for item in data["items"]],
            points=[PointItem(**{**point, "last_used": float(point["last_used"])}) for point in data["points"]],
        )
        _check(manifest)
    except (LookupError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"its manifest cannot be read: {error!r}") from error
    return manifest


def _check(manifest: Manifest) -> None:
    page_bytes = manifest.page_tokens * TOKEN_BYTES
    ends: list[int] = []
    for index, step in enumerate(manifest.steps):
        is_after_page = step.parent == NO_STEP or len(manifest.steps[step.parent].tokens) == page_bytes
        fits = 0 < len(step.tokens) <= page_bytes and len(step.tokens) % TOKEN_BYTES == 0
        if not (NO_STEP <= step.parent < index and is_after_page and fits):
            raise ValueError(f"step {index} of its manifest makes no sense")
        ends.append((ends[step.parent] if step.parent != NO_STEP else 0) + num_tokens(step.tokens))
    for index, item in enumerate(manifest.items):
        numbers = [_typed(number, int) for number in (item.step, item.group, item.start, item.end, item.nbytes)]
        step_start = ends[item.step] - num_tokens(manifest.steps[item.step].tokens)
        if min(numbers) < 0 or item.end != ends[item.step] or not step_start <= item.start <= item.end:
            raise ValueError(f"item {index} of its manifest makes no sense")
    for index, point in enumerate(manifest.points):
        if _typed(point.step, int) < 0 or _typed(point.reason, int) < 0 or point.end != ends[point.step]:
            raise ValueError(f"point {index} of its manifest makes no sense")


def _typed(value: Any, kind: type[Kind]) -> Kind:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
