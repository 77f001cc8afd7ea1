"""Whether a folder can be written: found by writing, because neither modes nor mounts tell it for sure."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_PROBE = b"bough"


def why_not_writable(folder: Path) -> str:
    """Why no file can be written into a folder, in the system's words; "" if one can. The probe is deleted at once.

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
