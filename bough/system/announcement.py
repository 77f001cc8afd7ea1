"""How a running server is found: it writes `server.json` into the cache folder, and proves that the file is its own.

The file names the process, the address and a nonce, and only its owner can read it. A process that reads it sends a random
challenge to the address; the answer is a hash of challenge and nonce, which only the server that wrote the file can give.
So neither a server that has died nor another program at its port is taken for it. A file that another user wrote, or could
write, is not used: it could name any address with a nonce of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bough.system.folders import write_private
from bough.system.processes import is_alive

ANNOUNCEMENT_FILE = "server.json"
PROOF_PATH = "/api/announced"
_NONCE_BYTES = 32
_MAX_BYTES = 4_096

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Announcement:
    """The content of `server.json`. `pid` and `nonce` are those of the process that wrote it."""

    pid: int
    url: str
    nonce: str

    def prove(self, challenge: str) -> str:
        """The answer to a challenge, which only a process that knows the nonce can give."""
        return hmac.new(self.nonce.encode(), challenge.encode(), hashlib.sha256).hexdigest()


def make_announcement(url: str) -> Announcement:
    return Announcement(os.getpid(), url, secrets.token_hex(_NONCE_BYTES))


@contextlib.contextmanager
def announcing(folder: Path, announcement: Announcement) -> Iterator[None]:
    """Keep the announcement in the folder. It replaces another one, and is removed at the end if it is still there.

    If the server before it still runs then, that one is announced again. Raises OSError if it cannot be written.
    """
    file, before = folder / ANNOUNCEMENT_FILE, read_announcement(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_private(file, json.dumps(asdict(announcement)))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if read_announcement(folder) == announcement:
                file.unlink(missing_ok=True)
                if before is not None and is_alive(before.pid):
                    write_private(file, json.dumps(asdict(before)))


def read_announcement(folder: Path) -> Announcement | None:
    """The announcement in the folder, or None if it has none of a living process of this user. Uses no network."""
    try:
        found = json.loads(_read_private(folder / ANNOUNCEMENT_FILE))
        announcement = Announcement(int(found["pid"]), str(found["url"]), str(found["nonce"]))
    except PermissionError as error:
        log.warning("not using the server that is announced: %s", error)
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return announcement if is_alive(announcement.pid) else None


def _read_private(file: Path) -> bytes:
    """The content of a file. Raises PermissionError if another user wrote it, or could write it; OSError if it is none."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as content:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{file} is not a file")
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{file} is another user's, or others can write it")
        return content.read(_MAX_BYTES)
