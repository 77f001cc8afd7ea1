"""`bough cache export` and `import` on a cluster: one archive of all replicas, and one replica that takes it up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ray.test_server import LONG, NAMES, ask
from tests.server.servers import Server

pytestmark = [pytest.mark.ray, pytest.mark.alone]


def run_cache(server: Server, *arguments: str) -> dict[str, Any]:
    """What a command on the trees of this server tells."""
    done = subprocess.run(
        [sys.executable, "-m", "bough", "cache", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"BOUGH_CACHE_FOLDER": str(server.cache_folder), "BOUGH_DISK": str(2**30)},
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def explain(server: Server, number: int, salt: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"{number} {LONG}"}]}
    found: dict[str, Any] = httpx.post(
        f"{server.url}/api/cache/explain", json=body, headers={"X-Bough-Salt": salt}, timeout=60
    ).json()
    return found


def test_what_all_replicas_have_is_exported_and_imported_into_another_salt(ray_server: Server, tmp_path: Path) -> None:
    with ThreadPoolExecutor(12) as pool:  # so that each has something
        list(pool.map(lambda number: ask(ray_server, number, 8), range(12)))
    assert sorted(explain(ray_server, 0, "")["replicas"]) == NAMES

    exported = run_cache(ray_server, "export", "tiny", str(tmp_path / "all.tar"))
    imported = run_cache(ray_server, "import", str(tmp_path / "all.tar"), "--salt", "another")

    assert exported["num_items"] == imported["num_items"] >= 12
    takers = set()
    for number in range(12):  # wherever it was, one replica has all of it now
        before, after = explain(ray_server, number, ""), explain(ray_server, number, "another")
        assert after["cached_tokens"] == before["cached_tokens"] > 0
        takers.add(after["replica"])
    assert len(takers) == 1
    assert not list(ray_server.cache_folder.rglob("transfers/*"))
