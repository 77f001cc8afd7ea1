"""A simulated disk: it takes recorded calls, and tells what could lie on it if the power failed now.

What a sync of a file covers is safe, and so are the names in a folder that was synced: POSIX promises no more. Of all later
changes to a file, each may have arrived, or not, or in part; of all later changes to a folder's names, each may have, or
not. Syncing a file does not make its name safe, and a folder whose own name is not safe may be gone with all it holds.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.recorder import Kind, Record

Names = dict[str, "File | Folder"]


@dataclass(frozen=True)
class Write:
    """Bytes at an offset."""

    offset: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        content.extend(bytes(max(0, self.offset - len(content))))
        content[self.offset : self.offset + len(self.data)] = self.data

    def tear(self, chance: random.Random) -> Write:
        """What else may have arrived of it: its beginning, or its length without its content."""
        if chance.random() < 0.5:
            return Write(self.offset, self.data[: chance.randrange(len(self.data))])
        return Write(self.offset, bytes(len(self.data)))


@dataclass(frozen=True)
class Truncate:
    """A new size."""

    size: int

    def apply(self, content: bytearray) -> None:
        del content[self.size :]
        content.extend(bytes(self.size - len(content)))

    def tear(self, chance: random.Random) -> Truncate:
        return self


@dataclass(eq=False)
class File:
    """What is safe of a file, and what was changed since."""

    safe: bytearray = field(default_factory=bytearray)
    pending: list[Write | Truncate] = field(default_factory=list)

    def sync(self) -> None:
        self.safe, self.pending = self.content(), []

    def content(self) -> bytearray:
        """What whoever reads the file sees."""
        content = bytearray(self.safe)
        for change in self.pending:
            change.apply(content)
        return content

    def crash(self, chance: random.Random) -> bytes:
        """One of the contents that a power failure may leave."""
        content, share = bytearray(self.safe), chance.random()
        for change in self.pending:
            if chance.random() < share:
                (change.tear(chance) if chance.random() < 0.2 else change).apply(content)
        return bytes(content)


@dataclass(eq=False)
class Folder:
    """The names in a folder: those that are safe, and what was done to them since."""

    names: Names = field(default_factory=dict)
    safe: Names = field(default_factory=dict)
    pending: list[Callable[[Names], object]] = field(default_factory=list)

    def change(self, change: Callable[[Names], object]) -> None:
        change(self.names)
        self.pending.append(change)

    def sync(self) -> None:
        self.safe, self.pending = dict(self.names), []

    def crash(self, chance: random.Random) -> Names:
        """One of the sets of names that a power failure may leave; half the time, what was done first arrived first."""
        names, share = dict(self.safe), chance.random()
        in_order = chance.random() < 0.5
        kept = [chance.random() < share for _ in self.pending]
        for is_kept, change in zip(sorted(kept, reverse=True) if in_order else kept, self.pending, strict=True):
            if is_kept:
                change(names)
        return names


class Platter:
    """A disk below one folder, which itself is safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._top = Folder()
        self._open: dict[int, File | Folder] = {}

    def take(self, record: Record) -> None:
        """Let a call happen."""
        if record.kind is Kind.OPEN:
            self._open[record.descriptor] = self._opened(record)
        elif record.kind is Kind.WRITE:
            self._file(record).pending.append(Write(record.offset, record.data))
        elif record.kind is Kind.TRUNCATE:
            self._file(record).pending.append(Truncate(record.offset))
        elif record.kind is Kind.SYNC:
            self._open[record.descriptor].sync()
        else:
            self._change_names(record)

    def _change_names(self, record: Record) -> None:
        folder, name = self._place(record.path)
        if record.kind is Kind.MAKE_FOLDER:
            _link(folder, name, Folder())
        elif record.kind is Kind.UNLINK:
            _unlink(folder, name)
        elif record.kind is Kind.RENAME:
            new_folder, new_name = self._place(record.new_path)
            moved = folder.names[name]
            if folder is new_folder:
                folder.change(lambda names: names.update({new_name: names.pop(name, moved)}))
            else:
                _link(new_folder, new_name, moved)
                _unlink(folder, name)

    def content(self) -> dict[str, bytes | None]:
        """Every path below the root as programs see it, with its content; None for a folder."""
        return dict(_walk(self._top, "", lambda folder: folder.names, lambda file: bytes(file.content())))

    def crash(self, chance: random.Random) -> dict[str, bytes | None]:
        """The same as it may be after a power failure."""
        return dict(_walk(self._top, "", lambda folder: folder.crash(chance), lambda file: file.crash(chance)))

    def _opened(self, record: Record) -> File | Folder:
        if Path(record.path) == self.root:
            return self._top
        folder, name = self._place(record.path)
        if name not in folder.names:
            assert record.flags & os.O_CREAT
            _link(folder, name, File())
        found = folder.names[name]
        if record.flags & os.O_TRUNC and isinstance(found, File) and found.content():
            found.pending.append(Truncate(0))
        return found

    def _file(self, record: Record) -> File:
        file = self._open[record.descriptor]
        assert isinstance(file, File)
        return file

    def _place(self, path: str) -> tuple[Folder, str]:
        *folders, name = Path(path).relative_to(self.root).parts
        at: File | Folder = self._top
        for each in folders:
            assert isinstance(at, Folder)
            at = at.names[each]
        assert isinstance(at, Folder)
        return at, name


def _link(folder: Folder, name: str, file: File | Folder) -> None:
    folder.change(lambda names: names.update({name: file}))


def _unlink(folder: Folder, name: str) -> None:
    folder.change(lambda names: names.pop(name, None))


def _walk(
    folder: Folder, path: str, names: Callable[[Folder], Names], content: Callable[[File], bytes]
) -> Iterator[tuple[str, bytes | None]]:
    for name, found in names(folder).items():
        if isinstance(found, Folder):
            yield f"{path}{name}", None
            yield from _walk(found, f"{path}{name}/", names, content)
        else:
            yield f"{path}{name}", content(found)


def build(root: Path, content: dict[str, bytes | None], chance: random.Random) -> None:
    """Make the files and folders of a disk below a new folder; a folder comes before what lies in it.

    Beside a log of SQLite lies its shared memory, which nobody syncs: it may be gone, empty, or all zeros.
    """
    root.mkdir()
    for name, data in content.items():
        if data is None:
            (root / name).mkdir()
            continue
        (root / name).write_bytes(data)
        if name.endswith("-wal") and chance.random() < 0.7:
            (root / name.replace("-wal", "-shm")).write_bytes(bytes(chance.choice((0, 2**15))))


def read(root: Path) -> dict[str, bytes | None]:
    """The files and folders below a folder, as `Platter.content` tells them; without SQLite's shared memory."""
    paths = (path for path in root.rglob("*") if not path.name.endswith("-shm"))
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in paths}
