"""Whatever an archive's objects say, importing them is refused or harmless: what others have stays, and is written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.cache.admin.archive import export_tree, import_tree
from bough.cache.admin.archive_file import read_head
from bough.cache.admin.trees import verify_tree
from bough.cache.disk import Disk
from bough.cache.disk.keys import PageKeys
from bough.cache.store.format import Object, Section, encode, read_object
from bough.tokens import pack
from tests.cache.admin.members import Member, read_members, write_members
from tests.fakes import MODELS
from tests.scenarios.world import World

OURS = list(range(1, 24))
THEIRS = list(range(50, 71))
NUMBERS = (*(-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 22, 23, 99, -2, -3), *(2**15, 2**31 - 1, 2**62, -(2**62)))
TEXTS = (b"", b"x", bytes(16), bytes(64), b"\xff" * 16, pack(OURS), pack(THEIRS), pack([1, 2, 3, 4]))


def open_disk(folder: Path) -> Disk:
    return Disk(folder, fingerprint="f", page_tokens=4, budget_bytes=2**30, floor_bytes=0)


def make_archive(folder: Path, model: str) -> Path:
    """An export of two branches, with states and restore points."""
    with open_disk(folder / "origin") as disk:
        world = World(MODELS[model], 4, disk=disk)
        world.run(OURS, [24, 25])
        world.run([*OURS[:9], *range(80, 88)], [88])
        assert world.cache.upkeep.flush()
        export_tree(disk, folder / "archive.tar")
    return folder / "archive.tar"


def mutate(keys: PageKeys, members: Sequence[Member], chance: random.Random) -> list[Member]:
    """The members with one to three changed and sealed again, taken out, doubled, or moved."""
    entries: list[Object | bytes] = [read_object(keys, each.content) for each in members[1:]]
    for _ in range(chance.choice((1, 1, 2, 3))):
        index, what = chance.randrange(len(entries)), chance.random()
        found = entries[index]
        if what < 0.1 and len(entries) > 1:
            del entries[index]
        elif what < 0.2:
            entries.insert(chance.randrange(len(entries)), found)
        elif what < 0.25:
            entries[index] = chance.randbytes(chance.randrange(200))
        elif isinstance(found, Object):
            entries[index] = _mutate_object(found, chance.choice(entries) if what > 0.9 else None, chance)
    contents = [encode(keys, each.address, each.sections) if isinstance(each, Object) else each for each in entries]
    return [members[0], *(Member(f"{number}", content, 1.0) for number, content in enumerate(contents))]


def _mutate_object(found: Object, other: Object | bytes | None, chance: random.Random) -> Object:
    name = chance.choice(("group", "start", "end", "root", "before", "tokens", "section", "section"))
    if name == "section" and found.sections:
        return replace(found, sections=_mutate_sections(list(found.sections), chance))
    if name == "section":
        return found
    value: Any = chance.choice(TEXTS if name in ("root", "before", "tokens") else NUMBERS)
    if isinstance(other, Object):
        value = getattr(other.address, name)
    if name == "group":
        value %= 2**31
    return replace(found, address=replace(found.address, **{name: value}))


def _mutate_sections(sections: list[Section], chance: random.Random) -> tuple[Section, ...]:
    index, what = chance.randrange(len(sections)), chance.random()
    if what < 0.2:
        sections.append(sections[index])
    elif what < 0.4:
        del sections[index]
    elif what < 0.6:
        sections[index] = replace(sections[index], data=chance.choice((b"", b"x", bytes(9), bytes(100))))
    else:
        name = chance.choice(("group", "start", "end"))
        sections[index] = replace(sections[index], **{name: chance.choice(NUMBERS) % 2**31})
    return tuple(sections)


def fuzz(folder: Path, model: str, rounds: int) -> None:
    """Import mutated archives into a tree that somebody else uses, one after the other, and start again on the result."""
    archive = make_archive(folder, model)
    keys, members = read_head(archive).keys, read_members(archive)
    chance, num_harmed = random.Random(f"{model} {rounds}"), 0
    tree = folder / "tree"
    with open_disk(tree) as disk:
        world = World(MODELS[model], 4, disk=disk)
        for number in range(rounds):
            write_members(archive, mutate(keys, members, chance))
            done = import_tree(disk, archive, "", lambda files, points: world.cache.attach("", files, points))
            num_harmed += bool(done.problems)
            world.check()
            prompt = [*THEIRS, 100 + number]
            world.run(prompt, salt="theirs")
            assert world.cache.upkeep.flush(), "what others computed was not written"
            assert world.run(OURS, [24]).tokens[: len(OURS)] == OURS
        assert (disk.counts.bad_rows, disk.counts.failed_writes) == (0, 0)
        assert max(found.last_used for found in disk.files()) <= disk.now()
    assert verify_tree(tree).problems == ()
    with open_disk(tree) as disk:
        again = World(MODELS[model], 4, disk=disk)
        for number in range(rounds):
            assert again.known([*THEIRS, 100 + number], salt="") <= len(OURS)
            assert again.run([*THEIRS, 100 + number, 999], salt="theirs").cached > 0
    assert 0 < num_harmed < rounds


every_kind = pytest.mark.parametrize("model", ["full", "full+window", "full+recurrent", "window", "recurrent"])


@every_kind
def test_no_archive_harms_a_tree(model: str, tmp_path: Path) -> None:
    fuzz(tmp_path, model, 12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@every_kind
def test_none_of_many_archives_harms_a_tree(model: str, tmp_path: Path) -> None:
    fuzz(tmp_path, model, 1_000)
