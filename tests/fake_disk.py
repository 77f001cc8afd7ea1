"""A disk in memory, for walks of many steps: the same promises as `bough.cache.disk.Disk`, and faults on demand.

Nothing is written or deleted until `work` is called. As with the real one, content is read from the item only then, what
was prioritized comes first, and a file that was to be deleted is used again if it is wanted before. Reads end at once, or
with `is_slow` when `finish` says so, in any order. A restart keeps what was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

from bough.cache.disk.errors import DiskMiss, DiskSlow
from bough.cache.disk.page_files import KeepReading
from bough.cache.disk.reader import DiskReader, Read, ReadProgress
from bough.cache.tree.address import Address, DiskFile, PointRecord
from bough.cache.tree.state import Buffer
from bough.tokens import TOKEN_BYTES


@dataclass
class Platter:
    """What outlives a restart."""

    files: dict[Address, tuple[bytes, int, float]] = field(default_factory=dict)
    points: dict[Address, PointRecord] = field(default_factory=dict)


class FakeReader(DiskReader):
    """The real reader without threads: what it has taken waits until it is carried out."""

    def __init__(self, read: Callable[[Any, KeepReading], Any]) -> None:
        super().__init__(read, lambda: self.now_s)
        self.now_s = 0.0
        self.is_slow = False
        self.taken: list[Read] = []

    def _start_threads(self) -> None:
        """There are none: `take_all` takes what is wanted."""

    def wait(self, timeout_s: float) -> None:
        if not self.finish(0):
            assert any(read.is_done for read in self._reads.values()), "nothing is being read, and somebody waits for it"

    def take_all(self) -> None:
        """Take all that is wanted; where the disk is quick, that is all."""
        with self.changed:
            while (read := self.take_next()) is not None:
                self.taken.append(read)
        while self.taken and not self.is_slow:
            self.carry_out(self.taken.pop(0))

    def finish(self, which: int) -> bool:
        """Let one read end, whichever; False if there is none."""
        self.take_all()
        if not self.taken:
            return False
        self.carry_out(self.taken.pop(which % len(self.taken)))
        return True

    def progress(self) -> ReadProgress:
        self.take_all()
        return super().progress()


class FakeDisk:
    """A disk for one run over a platter."""

    read_only = ""

    def __init__(self, page_tokens: int, budget_bytes: int = 1 << 40, platter: Platter | None = None) -> None:
        self.page_tokens = page_tokens
        self.budget_bytes = budget_bytes
        self.platter = platter or Platter()
        self.live: dict[Address, DiskFile] = {}
        self.pending: dict[DiskFile, Callable[[], Buffer | None]] = {}
        self.urgent: list[DiskFile] = []
        self.deleting: dict[Address, DiskFile] = {}
        self.num_revived = 0  # since `work`
        self.is_full = False
        self.fail_next: str | None = None  # "read" or "write"
        self.counts = SimpleNamespace(loaded_bytes=0, failed_writes=0, bad_rows=0, misses=Counter[str]())
        self.reader = FakeReader(self.read)

    def root(self, salt: str) -> bytes:
        return b"root:" + salt.encode()

    def digests(self, root: bytes, tokens: bytes) -> list[bytes]:
        step, chain = self.page_tokens * TOKEN_BYTES, [blake2b(root, digest_size=16).digest()]
        for at in range(0, len(tokens) - step + 1, step):
            chain.append(self.keys.after(chain[-1], tokens[at : at + step]))
        return chain

    @property
    def keys(self) -> SimpleNamespace:
        return SimpleNamespace(
            first=lambda root: blake2b(root, digest_size=16).digest(),
            after=lambda digest, block: blake2b(digest + block, digest_size=16).digest(),
            page_tokens=self.page_tokens,
        )

    def files(self) -> list[DiskFile]:
        for address, (_, nbytes, last_used) in self.platter.files.items():
            self.live[address] = DiskFile(b"", address, nbytes, last_used, is_saved=True, num_users=0)
        return sorted(self.live.values(), key=lambda disk_file: (disk_file.address.end - 1) // self.page_tokens)

    def points(self) -> list[PointRecord]:
        return list(self.platter.points.values())

    def put(
        self,
        address: Address,
        read: Callable[[], Buffer | None],
        nbytes: int,
        *,
        last_used: float = 0.0,
        has_user: bool = True,
    ) -> DiskFile:
        if address in self.live:
            self.live[address].num_users += has_user
            return self.live[address]
        disk_file = DiskFile(b"", address, nbytes, last_used, num_users=int(has_user))
        if self.claimed_bytes + nbytes > self.budget_bytes:
            disk_file.has_failed = True
            return disk_file
        if address in self.deleting:
            return self._revive(address, has_user)
        self.live[address] = disk_file
        self.pending[disk_file] = read
        return disk_file

    def _revive(self, address: Address, has_user: bool) -> DiskFile:
        self.num_revived += 1
        assert self.num_revived < 10_000, "files are dropped and used again without end"
        disk_file = self.live[address] = self.deleting.pop(address)
        disk_file.num_users += has_user
        return disk_file

    def work(self) -> None:
        """Write all that waits, and delete what was dropped."""
        for address in self.deleting:
            del self.platter.files[address]
        self.deleting, self.num_revived = {}, 0
        for disk_file in [*self.urgent, *self.pending]:
            if disk_file in self.pending:
                self._write(disk_file)
        self.urgent = []

    def prioritize(self, disk_file: DiskFile) -> None:
        if disk_file in self.pending:
            self.urgent.append(disk_file)

    def _write(self, disk_file: DiskFile) -> None:
        data = self.pending.pop(disk_file)()
        if data is None or self.fail_next == "write":
            self.counts.failed_writes += data is not None
            self.fail_next = None if data is not None else self.fail_next
            disk_file.has_failed = True
            self.live.pop(disk_file.address, None)
            return
        self.platter.files[disk_file.address] = (bytes(data), disk_file.nbytes, disk_file.last_used)
        disk_file.is_saved = True

    def read(self, disk_file: DiskFile, keep_reading: KeepReading) -> bytearray:
        """What a thread of the reader does."""
        if self.fail_next == "read" or disk_file.address not in self.platter.files:
            self.fail_next = None
            raise DiskMiss("missing")
        data = bytearray(self.platter.files[disk_file.address][0])
        if not keep_reading(len(data)):
            raise DiskSlow(len(data))
        return data

    def take(self, read: Read) -> bytearray:
        assert read.is_done
        if isinstance(read.error, DiskMiss) and not read.file.has_failed:
            self.counts.misses["missing"] += 1
            read.file.is_saved, read.file.has_failed = False, True
            if self.live.get(read.file.address) is read.file:
                del self.live[read.file.address]
            self.deleting.pop(read.file.address, None)
            self.platter.files.pop(read.file.address, None)
        if read.error is not None:
            raise read.error
        assert read.content is not None
        self.counts.loaded_bytes += len(read.content)
        return read.content

    def drop(self, disk_file: DiskFile) -> None:
        assert disk_file.num_users > 0
        disk_file.num_users -= 1
        if disk_file.num_users == 0:
            self.pending.pop(disk_file, None)
            if self.live.get(disk_file.address) is disk_file:
                del self.live[disk_file.address]
                if disk_file.is_saved:
                    self.deleting[disk_file.address] = disk_file

    def use(self, disk_file: DiskFile) -> None:
        disk_file.num_users += 1

    def drop_unused(self, files: Iterable[DiskFile]) -> None:
        for disk_file in files:
            if disk_file.num_users == 0 and self.has(disk_file):
                self.use(disk_file)
                self.drop(disk_file)

    def has(self, disk_file: DiskFile) -> bool:
        return self.live.get(disk_file.address) is disk_file

    def put_new_point(self, record: PointRecord) -> None:
        self.platter.points.setdefault(record.address, record)

    def put_point(self, record: PointRecord) -> None:
        self.platter.points[record.address] = record

    def drop_point(self, address: Address) -> None:
        self.platter.points.pop(address, None)

    def touch(self, files: Iterable[DiskFile], last_used: float) -> None:
        for disk_file in files:
            disk_file.last_used = last_used
            if disk_file.address in self.platter.files:
                data, nbytes, _ = self.platter.files[disk_file.address]
                self.platter.files[disk_file.address] = (data, nbytes, last_used)

    def file_bytes(self, content_bytes: int, num_tokens: int) -> int:
        return content_bytes

    def clear(self, root: bytes | None = None) -> Callable[[], None]:
        gone = [address for address in self.live if root is None or address.root == root]
        for address in gone:
            disk_file = self.live.pop(address)
            self.pending.pop(disk_file, None)
            disk_file.is_saved, disk_file.has_failed = False, True
        for kept in (self.deleting, self.platter.files, self.platter.points):
            for address in [each for each in kept if root is None or each.root == root]:
                del kept[address]  # type: ignore[attr-defined]
        return lambda: None

    def settle(self, root: bytes | None = None) -> bool:
        before = self.counts.failed_writes
        self.work()
        return self.counts.failed_writes == before

    @property
    def is_failing(self) -> bool:
        return self.is_full

    @property
    def problem(self) -> str:
        return "it is full" if self.is_full else ""

    @property
    def can_write(self) -> bool:
        return not self.is_full

    def has_room(self, nbytes: int) -> bool:
        return self.can_write and self.claimed_bytes + nbytes <= self.budget_bytes

    @property
    def claimed_bytes(self) -> int:
        return sum(disk_file.nbytes for disk_file in self.live.values())

    @property
    def used_bytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.platter.files.values())

    @property
    def pending_bytes(self) -> int:
        return sum(disk_file.nbytes for disk_file in self.pending)

    @property
    def num_files(self) -> int:
        return len(self.live)

    def flush(self) -> bool:
        self.work()
        return True

    def close(self) -> None:
        """Write what waits, as the real one does at its end."""
        self.work()

    def restarted(self) -> FakeDisk:
        """The disk of the next run: what was not written is gone."""
        return FakeDisk(self.page_tokens, self.budget_bytes, replace(self.platter))
