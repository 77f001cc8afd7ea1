"""Ray is an extra: what does not need it works without it."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, bough.cli.server, bough.server.app
print([name for name in sys.modules if name.split('.')[0] == 'ray'])
"""


def test_nothing_of_ray_is_imported_by_the_server() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120)

    assert done.stdout.strip() == "[]"
