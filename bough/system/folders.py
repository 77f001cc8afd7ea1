"""Folders and files: whether a folder can be written, and files that only their owner can read.

Whether a folder can be written is found by writing, because neither modes nor mounts are reliable.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

_PROBE = b"bough"


def why_not_writable(folder: Path) -> str:
    """The system's reason why no file can be written into a folder; "" if one can.

    A folder that does not exist is not made: its nearest parent that exists is tried.
    """
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=nearest, prefix=".bough-probe-") as probe:
            probe.write(_PROBE)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def write_private(file: Path, content: str | bytes, prefix: str = "") -> None:
    """Write the file as a whole, readable by its owner alone. Raises OSError, and then the file is as it was.

    Until its bytes are on the disk it has another name, which begins with `prefix`.
    """
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=prefix or f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as output:
            output.write(content.encode() if isinstance(content, str) else content)
            output.flush()
            os.fsync(descriptor)
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
