"""Whatever an archive's manifest says, importing it is refused or harmless: what others have stays, and is written."""

from __future__ import annotations

import copy
import io
import json
import math
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from bough.cache.admin.archive import export_tree, import_tree
from bough.cache.admin.archive_format import MANIFEST
from bough.cache.admin.trees import verify_tree
from bough.cache.disk import Disk, DiskError
from bough.cache.steps import run_at_once
from tests.fakes import MODELS
from tests.scenarios.world import World

OURS = list(range(1, 24))
THEIRS = list(range(50, 71))
ODD: tuple[Any, ...] = (
    *(None, True, False, "", "x", "AAAA", "AQAAAA==", "/////w==", [], {}, [1], {"a": 1}, [[[]]]),
    *(-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 99, 2**15, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(0.5, -1.5, 1e12, 1e308, math.nan, math.inf, -math.inf),
)


def open_disk(folder: Path) -> Disk:
    return Disk(folder, fingerprint="f", page_tokens=4, budget_bytes=2**30, floor_bytes=0)


def make_archive(folder: Path, model: str) -> tuple[dict[str, Any], list[tuple[str, bytes]]]:
    """The manifest and the members of an export of two branches, with states and restore points."""
    with open_disk(folder / "origin") as disk:
        world = World(MODELS[model], 4, disk=disk)
        world.run(OURS, [24, 25])
        world.run([*OURS[:9], *range(80, 88)], [88])
        assert world.cache.upkeep.flush()
        export_tree(disk, folder / "archive.tar")
    with tarfile.open(folder / "archive.tar") as archive:
        members = [(info.name, archive.extractfile(info).read()) for info in archive]  # type: ignore[union-attr]
    return json.loads(members.pop(0)[1]), members


def write_archive(file: Path, manifest: Any, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(file, "w") as archive:
        for name, content in [(MANIFEST, json.dumps(manifest).encode()), *members]:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def mutate(manifest: dict[str, Any], chance: random.Random) -> Any:
    """The manifest with one to three values changed, taken out, doubled, or exchanged for another's."""
    changed = copy.deepcopy(manifest)
    for _ in range(chance.choice((1, 1, 2, 3))):
        section = chance.choice(("steps", "items", "points", "points", None))
        if section is None or not isinstance(changed.get(section), list) or not changed[section]:
            changed[chance.choice(list(changed))] = chance.choice(ODD)
            continue
        entries = changed[section]
        index = chance.randrange(len(entries))
        what = chance.random()
        if what < 0.1:
            entries[index] = chance.choice(ODD)
        elif what < 0.2:
            entries.append(copy.deepcopy(entries[index]))
        elif what < 0.3:
            del entries[index]
        elif isinstance(entries[index], dict) and entries[index]:
            field = chance.choice(list(entries[index]))
            other = chance.choice(entries)
            is_swap = what < 0.5 and isinstance(other, dict) and field in other
            entries[index][field] = other[field] if is_swap else chance.choice(ODD)
    return changed


def fuzz(folder: Path, model: str, rounds: int) -> None:
    """Import mutated archives into a tree that somebody else uses, one after the other, and start again on the result."""
    manifest, members = make_archive(folder, model)
    chance, num_taken, num_refused = random.Random(f"{model} {rounds}"), 0, 0
    tree = folder / "tree"
    with open_disk(tree) as disk:
        world = World(MODELS[model], 4, disk=disk)
        for number in range(rounds):
            write_archive(folder / "hostile.tar", mutate(manifest, chance), members)
            try:
                import_tree(
                    disk, folder / "hostile.tar", graft=lambda steps: run_at_once(lambda: world.cache.graft("", steps))
                )
                num_taken += 1
            except DiskError:
                num_refused += 1
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
    assert num_taken > 0 and num_refused > 0


@pytest.mark.parametrize("model", ["full", "full+window", "full+recurrent"])
def test_no_manifest_harms_a_tree(model: str, tmp_path: Path) -> None:
    fuzz(tmp_path, model, 12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["full", "full+window", "full+recurrent"])
def test_none_of_many_manifests_harms_a_tree(model: str, tmp_path: Path) -> None:
    fuzz(tmp_path, model, 1_000)
