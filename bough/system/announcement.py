"""How a running server is found: it writes `server.json` into the cache folder, and proves that the file is its own.

The file names the process, the address and a nonce, and only its owner can read it. A process that reads it sends a random
challenge to the address; the answer is a hash of challenge and nonce, which only the server that wrote the file can give.
So neither a server that has died nor another program at its port is taken for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bough.system.folders import write_private

ANNOUNCEMENT_FILE = "server.json"
PROOF_PATH = "/api/announced"
_NONCE_BYTES = 32


@dataclass(frozen=True)
class Announcement:
    """What `server.json` says. `pid` and `nonce` are those of the process that wrote it."""

    pid: int
    url: str
    nonce: str

    def prove(self, challenge: str) -> str:
        """The answer to a challenge that only a process that knows the nonce can give."""
        return hmac.new(self.nonce.encode(), challenge.encode(), hashlib.sha256).hexdigest()


def make_announcement(url: str) -> Announcement:
    """An announcement of this process."""
    return Announcement(os.getpid(), url, secrets.token_hex(_NONCE_BYTES))


@contextlib.contextmanager
def announcing(folder: Path, announcement: Announcement) -> Iterator[None]:
    """Have the announcement in the folder meanwhile. It replaces another's, and is removed only if it is still there.

    Raises OSError if it cannot be written.
    """
    file = folder / ANNOUNCEMENT_FILE
    folder.mkdir(parents=True, exist_ok=True)
    write_private(file, json.dumps(asdict(announcement)))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if read_announcement(folder) == announcement:
                file.unlink(missing_ok=True)


def read_announcement(folder: Path) -> Announcement | None:
    """What the folder's file says, or None if it has none of a living process. The address is not asked."""
    try:
        found = json.loads((folder / ANNOUNCEMENT_FILE).read_text(encoding="utf-8"))
        announcement = Announcement(int(found["pid"]), str(found["url"]), str(found["nonce"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return announcement if _is_alive(announcement.pid) else None


def _is_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # another user's process
    return True
