"""Places: what does not fit moves down and comes back, budgets hold everywhere, and the tree survives a restart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.cache.disk import Disk, DiskBusy
from bough.cache.tree.state import Tier
from bough.errors import EngineError
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS, FixedRates
from tests.scenarios.world import World

pytestmark = pytest.mark.usefixtures("lane_kind")

LONG = list(range(1, 33))
OTHER = list(range(40, 63))


def tiers(w: World) -> dict[Tier, int]:
    """How many items lie at each place."""
    items = [item for trie in w.cache.forest.tries.values() for node in trie.walk() for item in node.items()]
    return {tier: sum(item.tier is tier for item in items) for tier in Tier if tier is not Tier.STORE}


def demote_all(w: World) -> None:
    """Move everything from the device as far down as there are places, and forget what lanes hold."""
    for slot in w.cache.lanes.slots:
        slot.clear()
    evictor, disk = w.cache.residency.evictor, w.cache.memory.disk
    while evictor.evict_one(Tier.DEVICE, spares_waiting=disk is not None):
        w.check()
    if disk is not None and disk.pending and tiers(w)[Tier.DEVICE]:  # it was set aside; now it is written
        disk.work()
        demote_all(w)
    while evictor.evict_one(Tier.DEVICE):
        w.check()


@pytest.mark.parametrize("model", MODELS)
def test_what_lies_on_the_host_is_adopted_from_there(model: str) -> None:
    w = World(MODELS[model], 4, host_bytes=100_000)
    w.run(LONG, [1])
    demote_all(w)
    assert tiers(w)[Tier.DEVICE] == 0 and tiers(w)[Tier.HOST] > 0

    again = w.begin(LONG)

    assert again.cached == len(LONG) - 1
    assert again.loading.host_bytes > 0


@pytest.mark.parametrize("model", MODELS)
def test_what_lies_on_disk_is_read_back(model: str) -> None:
    disk = FakeDisk(4)
    w = World(MODELS[model], 4, disk=disk)
    w.run(LONG, [1])
    demote_all(w)
    assert tiers(w)[Tier.DEVICE] == tiers(w)[Tier.HOST] == 0

    again = w.begin(LONG)

    assert again.cached == len(LONG) - 1
    assert again.loading.disk_bytes > 0 and disk.counts.loaded_bytes > 0


def test_content_goes_down_one_place_at_a_time_and_only_the_last_lets_it_go() -> None:
    row = 8
    w = World(MODELS["full"], 4, budget_bytes=100_000, host_bytes=8 * row, disk=FakeDisk(4, 16 * row))
    w.run(LONG, [1])
    demote_all(w)
    held = tiers(w)
    assert held[Tier.HOST] == 2 and held[Tier.DISK] > 0 and w.known(LONG) < len(LONG)
    assert w.cache.memory.disk.claimed_bytes <= 16 * row


def test_a_path_that_a_lane_stands_on_is_not_moved() -> None:
    w = World(MODELS["full"], 4, num_lanes=2, host_bytes=100_000)
    w.run([*LONG, 90], [1])
    w.run([*LONG, 91], [1])  # a branch, so that the long part is an inner node
    session = w.begin([*LONG, 90, 1, 2])
    while w.cache.residency.evictor.evict_one(Tier.DEVICE):
        w.check()
    path = session.sequence.hold.node.path()
    rows = [
        page
        for node in path
        for pages in node.pages.values()
        for page in pages
        if page.start < session.sequence.hold.offset
    ]
    assert rows and all(page.tier is Tier.DEVICE for page in rows)
    w.close(session)
    assert w.cache.residency.evictor.evict_one(Tier.DEVICE)


def test_idle_content_moves_to_the_host_before_the_device_is_full() -> None:
    w = World(MODELS["full"], 4, budget_bytes=8 * 100, host_bytes=100_000)
    for first in range(10):
        w.run([first + 100, *LONG[:20]], [1])
        assert w.cache.residency.room.used_bytes <= 0.9 * 800
    assert w.cache.residency.evictor.counts.tokens == 0  # nothing was lost
    assert tiers(w)[Tier.HOST] > 0


def test_rows_come_back_to_the_device_from_the_lane_when_there_is_room() -> None:
    w = World(MODELS["full"], 4, budget_bytes=100_000, host_bytes=100_000)
    w.run(LONG, [1])
    demote_all(w)
    w.run([*LONG, 99], [1])
    assert tiers(w)[Tier.HOST] == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_refused_allocation_on_the_host_falls_through_to_the_disk(model: str) -> None:
    w = World(MODELS[model], 4, host_bytes=100_000, disk=FakeDisk(4))
    w.run(LONG, [1])
    w.engine.fail_next, w.engine.fail_with = "to_host", MemoryError
    assert w.cache.residency.evictor.evict_one(Tier.DEVICE)
    w.check()
    assert w.begin(LONG).cached == len(LONG) - 1


def test_a_full_disk_means_that_content_goes_for_good_and_nothing_else() -> None:
    disk = FakeDisk(4)
    w = World(MODELS["full"], 4, budget_bytes=8 * 80, disk=disk)
    disk.is_full = True
    for first in range(6):
        w.run([first + 100, *LONG[:20]], [1])
    assert disk.used_bytes == 0 and w.cache.residency.evictor.counts.tokens > 0
    disk.is_full = False
    w.run(LONG, [1])
    disk.work()
    assert disk.used_bytes > 0


@pytest.mark.parametrize("model", MODELS)
def test_a_page_that_cannot_be_read_is_a_miss_and_the_hole_is_filled_again(model: str) -> None:
    disk = FakeDisk(4)
    w = World(MODELS[model], 4, disk=disk)
    w.run(LONG, [1])
    demote_all(w)
    disk.fail_next = "read"

    first = w.run(LONG, [1])
    w.check()
    assert first.cached < len(LONG) - 1 and w.cache.residency.loader.counts.misses == 1
    for slot in w.cache.lanes.slots:
        slot.clear()
    assert w.run(LONG, [1]).cached == len(LONG) - 1


def test_no_memory_for_what_is_read_costs_that_part_only() -> None:
    w = World(MODELS["full"], 4, disk=FakeDisk(4))
    w.run(LONG, [1])
    demote_all(w)
    w.engine.fail_next, w.engine.fail_with = "unpack", EngineError
    session = w.begin(LONG)
    assert session.cached == 0 and w.cache.residency.loader.counts.failed_loads == 1
    w.close(session)
    assert w.run(LONG).cached > 0  # nothing was lost


@pytest.mark.parametrize(("token_s", "byte_s", "cached"), [(1.0, 0.001, 31), (0.001, 1.0, 0), (None, 1.0, 31)])
def test_what_is_sooner_computed_is_computed(token_s: float | None, byte_s: float, cached: int) -> None:
    rates = FixedRates(token_s, {Tier.DISK: byte_s})
    w = World(MODELS["full"], 4, disk=FakeDisk(4), rates=rates)
    w.run(LONG, [1])
    demote_all(w)

    session = w.begin(LONG)

    assert session.cached == cached
    assert session.loading.recomputed_tokens == len(LONG) - 1 - cached
    assert session.loading.estimated_load_s == pytest.approx(byte_s * 8 * 32)


def test_only_the_part_that_lies_too_far_away_is_computed() -> None:
    """The first half lies on the host, which is fast, the second on disk, which is slow."""
    rates = FixedRates(0.01, {Tier.HOST: 1e-6, Tier.DISK: 1.0})
    w = World(MODELS["full"], 4, host_bytes=16 * 8, disk=FakeDisk(4), rates=rates)
    w.run(LONG[:16])
    w.run(LONG)
    demote_all(w)
    assert tiers(w) == {Tier.DEVICE: 0, Tier.HOST: 4, Tier.DISK: 4}
    session = w.begin(LONG)
    assert session.cached == 16 and session.loading.disk_bytes == 0


def test_a_salt_that_is_over_its_share_evicts_its_own() -> None:
    row = 8
    w = World(MODELS["full"], 4, budget_bytes=400 * row, salt_share=0.25)
    w.run(LONG, [1], salt="a")
    w.run(OTHER, [1], salt="b")
    for first in range(30):
        w.run([first + 200, *LONG[:24]], [1], salt="greedy")
        greedy = w.cache.forest.tries["greedy"].memory.num_bytes[Tier.DEVICE]  # type: ignore[attr-defined]
        assert greedy <= 100 * row
    assert w.known(LONG, "a") == len(LONG) and w.known(OTHER, "b") == len(OTHER)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_shares_hold_on_every_place(tier: Tier) -> None:
    row = 8
    host_bytes = 400 * row if tier is Tier.HOST else 0
    disk = FakeDisk(4, 400 * row) if tier is Tier.DISK else None
    w = World(MODELS["full"], 4, budget_bytes=120 * row, salt_share=0.25, host_bytes=host_bytes, disk=disk)
    w.run(OTHER, [1], salt="b")
    for first in range(40):
        w.run([first + 200, *LONG[:12]], [1], salt="greedy")
        assert w.cache.forest.tries["greedy"].memory.num_bytes[tier] <= 100 * row  # type: ignore[attr-defined]
    assert w.known(OTHER, "b") == len(OTHER)


def test_what_nobody_used_for_its_time_to_live_is_forgotten_everywhere() -> None:
    disk = FakeDisk(4)
    w = World(MODELS["full"], 4, disk=disk, ttl_s=30.0)
    w.run(LONG, [1])
    for _ in range(12):
        w.run(OTHER, [1])
    assert w.known(LONG) == 0 and w.known(OTHER) == len(OTHER)
    assert {disk_file.address.tokens[:4] for disk_file in disk.live.values()} >= {bytes([40, 0, 0, 0])}
    assert bytes([1, 0, 0, 0]) not in {
        disk_file.address.tokens[:4] for disk_file in disk.live.values() if disk_file.address.start == 0
    }


def test_a_device_that_is_off_keeps_nothing_beyond_the_request_and_its_writes() -> None:
    w = World(MODELS["full"], 4, disk=FakeDisk(4), keeps_on_device=False)
    w.run(LONG, [1])
    w.cache.memory.disk.work()
    w.cache.finisher.clear_device()
    assert w.cache.residency.room.used_bytes == 0 and tiers(w)[Tier.DISK] > 0
    assert w.run([*LONG, 99]).cached == len(LONG)


@pytest.mark.parametrize("model", [model for model in MODELS if model != "full"])
def test_a_long_prompt_leaves_restore_points_on_its_way(model: str) -> None:
    w = World(MODELS[model], 4, point_spacing=10)
    w.run(LONG)
    w.cache.lanes.slots[0].clear()
    assert w.run([*LONG[:23], 99]).cached == 20


@pytest.mark.parametrize("model", MODELS)
def test_clearing_forgets_what_is_on_disk_too(model: str) -> None:
    disk = FakeDisk(4)
    w = World(MODELS[model], 4, disk=disk)
    w.run(LONG, [1])
    disk.work()
    w.cache.upkeep.clear()
    w.check()
    assert not disk.platter.files and not disk.platter.points and not w.engine.live


class RealDisks:
    """Real disks in one folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk: Disk | None = None

    def open(self, fingerprint: str = "f" * 64, page_tokens: int = 4) -> Disk:
        self.close()
        self.disk = Disk(self.folder, fingerprint=fingerprint, page_tokens=page_tokens, budget_bytes=1 << 30, floor_bytes=0)
        return self.disk

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()

    def page_files(self) -> list[Path]:
        return sorted(file for file in (self.folder / "pages").rglob("*") if file.is_file() and file.parent.name != "tmp")


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[RealDisks]:
    disks = RealDisks(tmp_path / "tree")
    yield disks
    disks.close()


def talk(w: World) -> list[list[int]]:
    """Chats over one system prompt, some of which branch, under two salts."""
    chance = random.Random(3)
    system = [chance.randrange(60) for _ in range(10)]
    chats = [[*system, *(chance.randrange(60) for _ in range(chance.randrange(3, 20)))] for _ in range(5)]
    chats.append([*chats[0][:14], 61, 62])
    for chat in chats:
        w.run(chat, [1, 2])
    w.run(chats[1], [1, 2], salt="other")
    return chats


@pytest.mark.parametrize("model", MODELS)
def test_a_restart_finds_the_same_tree_and_the_same_reuse(model: str, disks: RealDisks) -> None:
    before = World(MODELS[model], 4, disk=disks.open())
    chats = talk(before)
    expected = {tuple(chat): before.cache.count_reusable([*chat, 63]) for chat in chats}
    nodes = list(before.cache.forest.tries[""].walk())
    shape = [(node.start, node.end, sorted(node.points), node.hits) for node in nodes if node.parent]
    assert max(node.hits for node in nodes) > 2
    before.cache.upkeep.close()
    assert not before.engine.live

    after = World(MODELS[model], 4, disk=disks.open())

    after.check()
    assert sorted(shape) == sorted(
        (node.start, node.end, sorted(node.points), node.hits)
        for node in after.cache.forest.tries[""].walk()
        if node.parent
    )
    for chat in chats:
        assert after.cache.count_reusable([*chat, 63]) == expected[tuple(chat)]
        assert after.run([*chat, 63]).cached >= expected[tuple(chat)]
    assert after.cache.count_reusable([*chats[1], 63], "other") == expected[tuple(chats[1])]
    assert after.cache.count_reusable([*chats[0], 63], "other") <= 10  # the system prompt


@pytest.mark.parametrize("change", [{"fingerprint": "0" * 64}, {"page_tokens": 8}])
def test_another_fingerprint_or_page_size_finds_nothing(change: dict[str, object], disks: RealDisks) -> None:
    before = World(MODELS["full"], 4, disk=disks.open())
    before.run(LONG, [1])
    before.cache.upkeep.close()
    disk = disks.open(**change)  # type: ignore[arg-type]
    after = World(MODELS["full"], disk.page_tokens, disk=disk)
    assert after.cache.count_reusable(LONG) == 0
    assert disk.counts.set_aside == 1


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "swapped"])
@pytest.mark.parametrize("model", MODELS)
def test_damaged_files_are_misses_that_cost_computing_and_nothing_else(model: str, damage: str, disks: RealDisks) -> None:
    before = World(MODELS[model], 4, disk=disks.open())
    before.run(LONG, [1])
    before.run(OTHER, [1])
    before.cache.upkeep.close()
    damage_all(disks, damage)

    after = World(MODELS[model], 4, disk=disks.open())
    first = after.run(LONG, [1])

    assert first.cached < len(LONG) - 1
    assert sum(after.cache.memory.disk.counts.misses.values()) > 0
    for _ in range(20):  # each time one more is found out, and what it held is there again afterwards
        after.cache.lanes.slots[0].clear()
        last = after.run(LONG, [1])
    assert last.cached == len(LONG) - 1


@pytest.mark.parametrize("which", range(8))
def test_one_damaged_page_costs_what_follows_it_and_no_more(which: int, disks: RealDisks) -> None:
    before = World(MODELS["full"], 4, disk=disks.open())
    before.run(LONG)
    before.cache.upkeep.close()
    disks.page_files()[which].unlink()

    after = World(MODELS["full"], 4, disk=disks.open())
    first = after.run(LONG)

    assert first.cached % 4 == 0 and first.cached < len(LONG) - 1
    assert after.cache.memory.disk.counts.misses["missing"] == 1
    loaded = after.cache.memory.disk.counts.loaded
    after.cache.lanes.slots[0].clear()
    again = after.begin(LONG)
    assert again.cached == len(LONG) - 1
    assert after.cache.memory.disk.counts.loaded == loaded  # what follows was computed, and is in memory


def damage_all(disks: RealDisks, damage: str) -> None:
    files = disks.page_files()
    contents = [file.read_bytes() for file in files]
    for file, content, other in zip(files, contents, contents[1:] + contents[:1], strict=True):
        if damage == "truncated":
            file.write_bytes(content[: len(content) // 2])
        elif damage == "flipped":
            file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        elif damage == "missing":
            file.unlink()
        else:
            file.write_bytes(other)


def test_a_tree_that_another_process_uses_is_refused_with_its_number(disks: RealDisks) -> None:
    disks.open()
    with pytest.raises(DiskBusy, match=r"in use by process \d+"):
        Disk(disks.folder, fingerprint="f" * 64, page_tokens=4, budget_bytes=1)


def test_figures_agree_with_the_file_system(disks: RealDisks) -> None:
    w = World(MODELS["window+recurrent+full"], 4, disk=disks.open())
    talk(w)
    assert w.cache.upkeep.flush()
    on_disk = sum(file.stat().st_size for file in disks.page_files())
    assert w.stats()["disk_bytes"] == on_disk == w.cache.memory.num_bytes[Tier.DISK]
