"""Downloads one URL to one file. A broken download is resumed, and the file appears only when its SHA-256 is right.

Received bytes are in a `.part` file beside the target, from which a later call continues. Always true:
- the target is either absent or complete: it appears by a rename, after its hash was checked and its bytes were synced;
- bytes with a wrong hash are deleted, never kept for another try.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from bough.errors import DownloadError
from bough.models.files import hash_file, sync_file
from bough.types import Progress, SilentProgress

_TIMEOUT_S = 30.0


def make_client(timeout_s: float = _TIMEOUT_S) -> httpx.Client:
    """An HTTP client that honours SSL_CERT_FILE and the system's certificates. The caller closes it."""
    return httpx.Client(verify=ssl.create_default_context(), follow_redirects=True, timeout=timeout_s)


@dataclass(frozen=True)
class Download:
    """A URL, its target and its hash. A dropped connection is resumed, with growing pauses, up to `num_attempts` in all."""

    url: str
    target: Path
    sha256: str
    num_attempts: int = 5
    pause: Callable[[float], None] = time.sleep

    @property
    def part(self) -> Path:
        return self.target.with_name(self.target.name + ".part")

    @property
    def part_bytes(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0


def download(wanted: Download, client: httpx.Client, progress: Progress | None = None) -> Path:
    """Fetch the file and return its path. A target with the right hash is not fetched again.

    Raises DownloadError when there is no network, the server refuses, the connection drops too often or the hash is wrong.
    """
    progress = progress or SilentProgress()
    if wanted.target.exists():
        if hash_file(wanted.target) == wanted.sha256:
            return wanted.target
        wanted.target.unlink()
    was_resumed = wanted.part_bytes > 0
    _fetch(wanted, client, progress)
    if was_resumed and hash_file(wanted.part) != wanted.sha256:
        wanted.part.unlink()  # the old part was of another file, or damaged: start again
        _fetch(wanted, client, progress)
    require_hash(wanted.part, wanted.sha256, wanted.url)
    sync_file(wanted.part)
    return wanted.part.replace(wanted.target)


def require_hash(file: Path, sha256: str, name: str) -> None:
    """Delete a file with another hash, and raise DownloadError with its `name`. Raises OSError."""
    found = hash_file(file)
    if found != sha256:
        num_bytes = file.stat().st_size
        file.unlink()
        raise DownloadError(
            f"{name} arrived damaged: the SHA-256 of its {num_bytes:,} bytes is {found}, "
            f"and should be {sha256}; the file was deleted"
        )


def _fetch(wanted: Download, client: httpx.Client, progress: Progress) -> None:
    """Fill the part file up to the end, resuming after each dropped connection."""
    meter = _Meter(wanted.target.name, progress)
    try:
        for attempt in range(1, wanted.num_attempts + 1):
            try:
                return _receive(wanted, client, meter)
            except httpx.HTTPStatusError as error:
                raise DownloadError(f"{wanted.url} answered {error.response.status_code}") from error
            except (httpx.TransportError, _Restart) as error:
                if attempt == wanted.num_attempts or (attempt == 1 and isinstance(error, httpx.ConnectError)):
                    raise _describe_failure(wanted, attempt, error) from error
                wanted.pause(0.0 if isinstance(error, _Restart) else 0.25 * 2**attempt)
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                raise DownloadError(f"cannot fetch {wanted.url}: {error}") from error
    finally:
        meter.finish()


def _describe_failure(wanted: Download, attempt: int, error: Exception) -> DownloadError:
    if isinstance(error, httpx.ConnectError):
        return DownloadError(f"cannot reach {httpx.URL(wanted.url).host}: {error}; is there a network?")
    return DownloadError(
        f"{wanted.url} broke off {attempt} times; {wanted.part_bytes:,} bytes are kept, and the next try resumes there "
        f"({type(error).__name__}: {error})"
    )


def _receive(wanted: Download, client: httpx.Client, meter: _Meter) -> None:
    """Make one request, from the end of the part to the end of the file. Raises _Restart after deleting a bad part."""
    wanted.target.parent.mkdir(parents=True, exist_ok=True)
    have = wanted.part_bytes
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with client.stream("GET", wanted.url, headers=headers) as answer:
        if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            if _total_bytes(answer) == have:
                return  # nothing was missing
            wanted.part.unlink()
            raise _Restart(f"a part of {have:,} bytes does not fit the file")
        answer.raise_for_status()
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            have = 0  # the server sends everything
        elif not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            wanted.part.unlink(missing_ok=True)
            raise _Restart(f"the server sent another range than {have:,}-")
        meter.begin(have, _total_bytes(answer))
        with wanted.part.open("r+b" if have else "wb") as stream:
            stream.seek(have)
            for block in answer.iter_raw():  # without a chunk size, which would buffer bytes that a drop then loses
                stream.write(block)
                meter.advance(len(block))


def _total_bytes(answer: httpx.Response) -> int | None:
    found = re.search(r"/(\d+)$", answer.headers.get("Content-Range", ""))
    length = found[1] if found else answer.headers.get("Content-Length")
    return int(length) if length else None


class _Restart(Exception):
    """The part was unusable and has been deleted."""


class _Meter:
    """Reports the progress of one file over several connections."""

    def __init__(self, label: str, progress: Progress) -> None:
        self._label = label
        self._progress = progress
        self._done: int | None = None

    def begin(self, have: int, total_bytes: int | None) -> None:
        """A connection starts to deliver at byte `have`."""
        if self._done is None:
            self._progress.start(self._label, total_bytes)
            self._done = 0
        self._progress.advance(have - self._done)
        self._done = have

    def advance(self, num_bytes: int) -> None:
        assert self._done is not None, "begin comes first"
        self._progress.advance(num_bytes)
        self._done += num_bytes

    def finish(self) -> None:
        if self._done is not None:
            self._progress.finish()
