"""Objects of the store: what is read is what was written for just this prefix, or it is a miss."""

from __future__ import annotations

import pytest

from bough.cache.disk.errors import DiskMiss
from bough.cache.disk.keys import PageKeys
from bough.cache.store.format import ListedPoint, Section, StorePath, decode, encode, list_section, read_points
from bough.tokens import pack

KEYS = PageKeys(bytes(32), "model", 4)
SECTIONS = [Section(0, 0, 2, b"left"), Section(0, 2, 4, b"right"), Section(1, 4, 4, b"")]


def path(tokens: list[int], salt: str = "") -> StorePath:
    made = StorePath(KEYS, salt)
    made.add(pack(tokens))
    return made


ADDRESS = path([1, 2, 3, 4]).rows(0)


def test_an_object_comes_back_as_it_was() -> None:
    content = encode(KEYS, ADDRESS, SECTIONS)
    found = decode(KEYS, ADDRESS, content)
    assert [(each.group, each.start, each.end, bytes(each.data)) for each in found.sections] == [
        (0, 0, 2, b"left"),
        (0, 2, 4, b"right"),
        (1, 4, 4, b""),
    ]
    assert found.nbytes == len(content)


def test_every_cut_and_every_flipped_byte_is_a_miss() -> None:
    content = encode(KEYS, ADDRESS, SECTIONS)
    for at in range(len(content)):
        for wrong in (content[:at], content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], content + b"x"):
            with pytest.raises(DiskMiss):
                decode(KEYS, ADDRESS, wrong)


@pytest.mark.parametrize(
    ("keys", "address"),
    [
        (PageKeys(bytes(31) + b"x", "model", 4), ADDRESS),
        (PageKeys(bytes(32), "other", 4), ADDRESS),
        (KEYS, path([1, 2, 3, 9]).rows(0)),
        (KEYS, path([1, 2, 3, 4], salt="other").rows(0)),
        (KEYS, path([1, 2, 3, 4]).points(0)),
        (KEYS, path([1, 2, 3, 4]).point(4)),
    ],
    ids=["secret", "model", "tokens", "salt", "list", "point"],
)
def test_an_object_of_another_secret_model_or_address_is_a_miss(keys: PageKeys, address: object) -> None:
    content = encode(KEYS, ADDRESS, SECTIONS)
    with pytest.raises(DiskMiss):
        decode(keys, address, content)  # type: ignore[arg-type]


def test_addresses_depend_on_all_tokens_before_and_on_nothing_after() -> None:
    first, second = path([1, 2, 3, 4, 5, 6, 7, 8]), path([0, 2, 3, 4, 5, 6, 7, 8])
    assert KEYS.name(first.rows(1)) != KEYS.name(second.rows(1))
    longer = path([1, 2, 3, 4, 5, 6])
    longer.add(pack([7, 8, 9]))
    assert longer.num_pages == 2 and longer.num_tokens == 9
    assert longer.rows(1) == first.rows(1) and longer.points(0) == first.points(0)
    assert longer.point(6) == path([1, 2, 3, 4, 5, 6, 70, 80]).point(6)


def test_a_list_of_restore_points_is_of_its_own_page() -> None:
    address = path([1, 2, 3, 4, 5, 6, 7, 8]).points(1)
    points = [ListedPoint(8, 3), ListedPoint(5, 1)]
    content = encode(KEYS, address, [list_section(address, points)])
    found = read_points(address, decode(KEYS, address, content))
    assert found == sorted(points) and [each.reason for each in found] == [1, 3]
    wrong = encode(KEYS, address, [list_section(address, [ListedPoint(4, 0)])])
    with pytest.raises(DiskMiss):
        read_points(address, decode(KEYS, address, wrong))
