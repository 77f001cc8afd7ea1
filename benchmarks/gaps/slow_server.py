"""`python -m benchmarks.gaps.slow_server FILE serve …`: the command `bough`, with a disk as slow as a small file says.

The file is read at every access, so that the disk of a running server can become slow and well again. Only page files are
slowed down: the index is written by SQLite. The process ends when its standard input does, and so with its parent.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bough.cache.disk import page_files


@dataclass(frozen=True)
class DiskSpeed:
    """How fast page files are read, and how long each write of one hangs. The default is the disk as it is."""

    read_bytes_s: float | None = None
    write_hang_s: float = 0.0

    def write(self, file: Path) -> None:
        """Set the speed of the server that reads this file."""
        temporary = file.with_name(f".{file.name}.tmp")
        temporary.write_text(json.dumps(asdict(self)), encoding="ascii")
        temporary.replace(file)

    @classmethod
    def read(cls, file: Path) -> DiskSpeed:
        return cls(**json.loads(file.read_text(encoding="ascii")))


def slow_down(file: Path) -> None:
    """Make all reading and writing of page files in this process as slow as the file says, from now on."""
    read_into, write_some = page_files.read_into, page_files.write_some

    def read_slowly(descriptor: int, view: memoryview) -> int:
        count, speed = read_into(descriptor, view), DiskSpeed.read(file)
        time.sleep(count / speed.read_bytes_s if speed.read_bytes_s else 0.0)
        return count

    def write_slowly(descriptor: int, parts: list[memoryview]) -> int:
        time.sleep(DiskSpeed.read(file).write_hang_s)
        return write_some(descriptor, parts)

    page_files.read_into, page_files.write_some = read_slowly, write_slowly


def end_with_parent() -> None:
    """Stop this process, as a signal would, when its parent has gone."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="bough-bench-parent", daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    slow_down(Path(sys.argv[1]))
    sys.argv = ["bough", *sys.argv[2:]]
    runpy.run_module("bough", run_name="__main__")
