"""Export and import over replicas: one archive of all trees, which goes in pieces, and of which nothing is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bough.cache.admin.archive import measure_archive
from bough.cache.disk import DiskError
from bough.config import Settings
from bough.errors import RequestError, Unavailable
from bough.prompting.ask import Ask
from bough.server.serving import transfers
from bough.server.serving.model.in_process import InProcessTree
from bough.server.serving.remote import archives
from bough.server.serving.remote.archives import Archives
from bough.server.serving.remote.held_pages import digest_prompt, make_keys
from bough.server.serving.remote.leases import LEASE_S
from bough.server.serving.remote.replicas import Operation
from bough.server.serving.service import Service
from bough.types import SamplingParams
from tests.gates import Gate, Notes, pass_time
from tests.server.serving.remote.local_replicas import SECRET, LocalReplicas
from tests.server.serving.remote.test_watch import TEXTS, ask_at
from tests.waiting import wait_until

DISK = 2**28


def left_behind(folder: Path) -> list[Path]:
    """What archives on their way have left in the folders of the server and of the replicas."""
    return list(folder.rglob("transfers/*"))


async def wait_until_nothing_is_left(folder: Path) -> None:
    """Who drops an archive does not wait for long: a busy replica deletes it after that."""
    await asyncio.to_thread(wait_until, lambda: left_behind(folder) == [])


async def count_cached(service: Service, text: str, salt: str) -> dict[str, int]:
    """How many tokens of a text each replica would reuse."""
    known = (await service.cache.explain(Ask("tiny", text=text, salt=salt))).known
    return {name: each.cached for name, each in known.items()}


def test_an_archive_has_what_any_replica_has_and_is_imported_by_one(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "PIECE_BYTES", 4096)
    monkeypatch.setattr(archives, "WAIT_S", 0.0)  # so that the server has to ask more than once

    async def scene(service: Service, replicas: LocalReplicas) -> None:
        for name in TEXTS:
            await ask_at(service, replicas, name)
        exported = (await service.cache.export("tiny", "")).result
        names = [call.name for call in replicas.calls]
        assert names.count("read_archive") > 4 and names.count("write_archive") > 2
        assert left_behind(tmp_path) == [exported]
        assert measure_archive(exported).num_items == 2

        imported = (await service.cache.import_archive("tiny", exported, "mine")).result
        assert (imported.num_items, imported.num_skipped, imported.problems) == (2, 0, ())
        sizes = {len(call.arguments[2]) for call in replicas.calls if call.name == "add_to_archive"}
        assert max(sizes) == 4096
        for text in TEXTS.values():
            found = await count_cached(service, text, "mine")
            assert sorted(found.values())[0] == 0 < sorted(found.values())[1]
        exported.unlink()
        await wait_until_nothing_is_left(tmp_path)

    play(scene, disk=DISK)


def test_the_router_hears_of_what_a_replica_has_imported(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        ask = Ask("tiny", text="a text of some length, " * 8, params=SamplingParams(max_tokens=1))
        prompt = (await service.complete(ask)).started.prompt
        exported = (await service.cache.export("tiny", "")).result
        for host in replicas.hosts.values():
            await host.look()

        await service.cache.import_archive("tiny", exported, "mine")

        exported.unlink()
        pages = set(digest_prompt(make_keys(SECRET), prompt, "mine"))
        heard = [set((await host.look()).notes) for host in replicas.hosts.values()]
        assert [pages <= each for each in heard].count(True) == 1

    play(scene, disk=DISK)


def test_an_export_fails_as_a_whole_if_a_replica_is_lost_and_leaves_nothing(play: Any, tmp_path: Path) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        for name in TEXTS:
            await ask_at(service, replicas, name)

        async def lose(operation: Operation) -> None:
            if operation.name == "read_archive":
                replicas.hosts.pop("replica-1", None)

        replicas.hold, lost = lose, replicas.hosts["replica-1"]
        with pytest.raises(Unavailable, match="replica-1 was lost"):
            await service.cache.export("tiny", "")
        replicas.hold, replicas.hosts["replica-1"] = None, lost

        def is_left_behind() -> bool:
            return any("replica-1/" not in str(each) for each in left_behind(tmp_path))

        await asyncio.to_thread(wait_until, lambda: not is_left_behind())  # the other replica's thread ends its own file

    play(scene, disk=DISK)


def test_what_is_no_archive_and_a_replica_without_a_disk_are_refused(play: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.tar"
    wrong.write_text("this is no archive")

    async def refuse(service: Service, replicas: LocalReplicas) -> None:
        with pytest.raises(RequestError, match="the archive is not an archive of a tree"):
            await service.cache.import_archive("tiny", wrong, "")
        await wait_until_nothing_is_left(tmp_path)

    async def without_disk(service: Service, replicas: LocalReplicas) -> None:
        with pytest.raises(RequestError, match="there is no disk tier"):
            await service.cache.export("tiny", "")
        with pytest.raises(RequestError, match="there is no disk tier"):
            await service.cache.import_archive("tiny", wrong, "")
        await wait_until_nothing_is_left(tmp_path)

    play(refuse, disk=DISK)
    play(without_disk)


def test_an_archive_that_no_server_asks_for_any_more_is_deleted(play: Any, tmp_path: Path) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        await service.complete(Ask("tiny", text="a text", params=SamplingParams(max_tokens=1)))
        runtime = replicas.hosts["replica-0"]._runtime
        held = Archives(InProcessTree(runtime), runtime.settings)
        assert (await held.write("id", "", 0) or 0) > 0
        await held.add("another", 0, b"a piece")
        assert (len(held), len(left_behind(tmp_path))) == (2, 2)

        pass_time(LEASE_S)

        await asyncio.to_thread(wait_until, lambda: (len(held), left_behind(tmp_path)) == (0, []))
        assert await held.read("id", 0) == b""
        with pytest.raises(DiskError, match="the archive is not there any more"):
            await held.add("another", len(b"a piece"), b"the next piece")
        await asyncio.gather(held.drop("id"), held.drop("another"))

    play(scene, disk=DISK)


@pytest.mark.parametrize("operation", ["write", "add"])
def test_an_archive_that_is_dropped_while_its_file_is_made_leaves_none(
    operation: str, play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: Notes[str] = Notes()
    may_make = Gate()

    def make_file(settings: Settings) -> Path:
        notes.append("making")
        may_make.wait()
        file = transfers.make_file(settings)
        notes.append("made")
        return file

    monkeypatch.setattr(archives, "make_file", make_file)

    async def scene(service: Service, replicas: LocalReplicas) -> None:
        runtime = replicas.hosts["replica-0"]._runtime
        held = Archives(InProcessTree(runtime), runtime.settings)
        asked = asyncio.create_task(held.write("id", "", 0) if operation == "write" else held.add("id", 0, b"a piece"))
        await notes.until(lambda: "making" in notes)

        dropped = asyncio.create_task(held.drop("id"))
        while len(held):
            await asyncio.sleep(0)
        dropped.cancel()  # as a server that does not wait any longer
        asked.cancel()
        await asyncio.gather(dropped, asked, return_exceptions=True)
        may_make.open()

        await notes.until(lambda: "made" in notes)
        await wait_until_nothing_is_left(tmp_path)

    play(scene, disk=DISK)
