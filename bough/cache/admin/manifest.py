"""What stands first in an archive: which model it is of, and the tokens that every item in it is of.

Tokens are kept as steps. A step is one page of tokens, or part of one, after another step that is a whole page: together
they are the prefix of an item, from which any disk can make an address under its own secret and salt. There is no salt,
secret or keyed hash in a manifest.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bough.cache.disk.keys import Keys
from bough.cache.disk.rows import MAX_CONTENT_BYTES, MAX_GROUP, MAX_PAGE_TOKENS, POINT_REASONS, are_tokens, is_time
from bough.cache.tree.address import Address
from bough.cache.tree.tokens import num_tokens

ARCHIVE_FORMAT = 1
NO_STEP = -1

_ITEM_FIELDS = ("step", "group", "start", "end", "nbytes", "last_used")
_POINT_FIELDS = ("step", "end", "reason", "is_kept", "is_superseded", "last_used")
_LONGEST_TEXT = 1_000
_LEAST_VALUES, _VALUE_BYTES = 16, 20  # no object of a manifest is written in fewer bytes than these


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
            where = (address.before, address.tokens)
            if where in self._of or address.before not in after:
                continue
            self._of[where] = len(self.steps)
            if num_tokens(address.tokens) == keys.page_tokens:
                after[keys.after(*where)] = len(self.steps)
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


class Described(Protocol):
    """Which model an archive is of."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def page_tokens(self) -> int: ...


def encode_manifest(
    identity: Described, steps: Sequence[Step], items: Sequence[Item], points: Sequence[PointItem]
) -> bytes:
    """The manifest as JSON. It is made piece by piece: one long call of `json` would hold the interpreter's lock."""
    head = {
        "format": ARCHIVE_FORMAT,
        "byte_order": sys.byteorder,
        "fingerprint": identity.fingerprint,
        "model": identity.model,
        "page_tokens": identity.page_tokens,
    }
    told = ({"parent": step.parent, "tokens": b64encode(step.tokens).decode()} for step in steps)
    lists = {
        "steps": _encode_list(told),
        "items": _encode_list(map(vars, items)),
        "points": _encode_list(map(vars, points)),
    }
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    fields += [f"{json.dumps(name)}: {value}" for name, value in lists.items()]
    return f"{{{', '.join(fields)}}}".encode()


def _encode_list(objects: Iterable[dict[str, Any]]) -> str:
    return f"[{', '.join(map(json.dumps, objects))}]"


def decode_manifest(content: bytes) -> Manifest:
    """A manifest from JSON, checked as a whole; raises ValueError that names the first field which makes no sense."""
    num_values = content.count(b"{") + content.count(b"[")
    if num_values > _LEAST_VALUES + len(content) // _VALUE_BYTES:
        raise ValueError(f"its manifest has {num_values:,} objects and lists in {len(content):,} bytes: too many")
    try:
        return _decode(json.loads(content))
    except (LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"its manifest cannot be read: {error!r:.200}") from error


def _decode(data: Any) -> Manifest:
    if (data["format"], data["byte_order"]) != (ARCHIVE_FORMAT, sys.byteorder):
        raise ValueError(f"it has format {data['format']!r:.40}, {data['byte_order']!r:.40}-endian")
    page_tokens = _whole("page_tokens", data["page_tokens"], 1, MAX_PAGE_TOKENS)
    steps = _decode_steps(data["steps"], page_tokens)
    ends = _find_ends(steps)
    return Manifest(
        fingerprint=_text("fingerprint", data["fingerprint"]),
        model=_text("model", data["model"]),
        page_tokens=page_tokens,
        steps=steps,
        items=_decode_items(data["items"], steps, ends),
        points=_decode_points(data["points"], ends),
    )


def _decode_steps(data: Any, page_tokens: int) -> list[Step]:
    steps: list[Step] = []
    for index, (parent, tokens) in enumerate(_fields("steps", data, ("parent", "tokens"))):
        where = f"steps[{index}]"
        step = Step(_whole(f"{where}.parent", parent, NO_STEP, index - 1), b64decode(tokens, validate=True))
        if not are_tokens(step.tokens) or num_tokens(step.tokens) > page_tokens:
            raise ValueError(f"{where}.tokens are not 1 to {page_tokens} token ids of 4 bytes")
        if step.parent != NO_STEP and num_tokens(steps[step.parent].tokens) != page_tokens:
            raise ValueError(f"{where}.parent is {step.parent}, and that step is no whole page")
        steps.append(step)
    return steps


def _find_ends(steps: Sequence[Step]) -> list[int]:
    """For each step the offset at which it ends."""
    ends: list[int] = []
    for step in steps:
        ends.append((ends[step.parent] if step.parent != NO_STEP else 0) + num_tokens(step.tokens))
    return ends


def _decode_items(data: Any, steps: Sequence[Step], ends: Sequence[int]) -> list[Item]:
    items: list[Item] = []
    seen: set[tuple[int, int, int]] = set()
    for index, (step, group, start, end, nbytes, last_used) in enumerate(_fields("items", data, _ITEM_FIELDS)):
        where = f"items[{index}]"
        last = _whole(f"{where}.step", step, 0, len(steps) - 1)
        _whole(f"{where}.end", end, ends[last], ends[last])
        item = Item(
            step=last,
            group=_whole(f"{where}.group", group, 0, MAX_GROUP - 1),
            start=_whole(f"{where}.start", start, ends[last] - num_tokens(steps[last].tokens), ends[last]),
            end=ends[last],
            nbytes=_whole(f"{where}.nbytes", nbytes, 0, MAX_CONTENT_BYTES),
            last_used=_moment(f"{where}.last_used", last_used),
        )
        if (item.step, item.group, item.start) in seen:
            raise ValueError(f"{where} is there twice")
        seen.add((item.step, item.group, item.start))
        items.append(item)
    return items


def _decode_points(data: Any, ends: Sequence[int]) -> list[PointItem]:
    points: list[PointItem] = []
    for index, (step, end, reason, is_kept, is_superseded, last_used) in enumerate(_fields("points", data, _POINT_FIELDS)):
        where = f"points[{index}]"
        last = _whole(f"{where}.step", step, 0, len(ends) - 1)
        _whole(f"{where}.end", end, ends[last], ends[last])
        point = PointItem(
            step=last,
            end=ends[last],
            reason=_whole(f"{where}.reason", reason, min(POINT_REASONS), max(POINT_REASONS)),
            is_kept=_flag(f"{where}.is_kept", is_kept),
            is_superseded=_flag(f"{where}.is_superseded", is_superseded),
            last_used=_moment(f"{where}.last_used", last_used),
        )
        points.append(point)
    return points


def _fields(name: str, data: Any, wanted: Sequence[str]) -> Iterator[list[Any]]:
    """The fields of each object in a list; raises ValueError if one has others."""
    if type(data) is not list:
        raise ValueError(f"{name} is a {type(data).__name__}, and must be a list")
    for index, each in enumerate(data):
        if type(each) is not dict or each.keys() != set(wanted):
            raise ValueError(f"{name}[{index}] must have the fields {', '.join(wanted)}, and no others")
        yield [each[field] for field in wanted]


def _whole(where: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{where} is {value!r:.40}, and must be a whole number from {low} to {high}")
    return value


def _moment(where: str, value: Any) -> float:
    if not is_time(value):
        raise ValueError(f"{where} is {value!r:.40}, and must be a finite number of seconds")
    return float(value)


def _flag(where: str, value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{where} is {value!r:.40}, and must be true or false")
    return value


def _text(where: str, value: Any) -> str:
    if type(value) is not str or len(value) > _LONGEST_TEXT or not value.isprintable():
        raise ValueError(f"{where} is {value!r:.40}, and must be a printable text of at most {_LONGEST_TEXT} characters")
    return value
