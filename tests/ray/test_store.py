"""Replicas with a store that they share: a prefix is copied when its replica is busy, and another server starts warm."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bough.cache.tree.state import PAGE_TOKENS
from tests.ray.conftest import SMALL, let_router_hear
from tests.ray.test_server import read_replicas
from tests.server.servers import Server, make_chat_folder, running

pytestmark = [pytest.mark.ray, pytest.mark.alone]

SHARED = " ".join(f"word{number}" for number in range(200))
STREAMS = 24
COUNTED = ("copied_prefixes", "missed_prefixes", "store_loaded", "store_sent")


def ask(server: Server, number: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": SHARED}, {"role": "user", "content": f"{number} " * 40}]
    body = {"model": "tiny", "messages": messages, "stream": False, "options": {"num_predict": 16}}
    answer: dict[str, Any] = httpx.post(f"{server.url}/api/chat", json=body, timeout=120).json()
    return answer


def test_a_busy_prefix_is_copied_to_another_replica_and_found_by_a_server_without_ray(tmp_path: Path) -> None:
    model = make_chat_folder(tmp_path / "tiny")
    (secret := tmp_path / "secret").write_text("a secret of a few words")
    shared = {"store": tmp_path / "store", "store_secret_file": secret, "data_folder": tmp_path / "data"}
    with running(str(model), tmp_path / "cluster", replicas=2, **SMALL, **shared) as server:
        first = ask(server, 0)
        let_router_hear()
        with ThreadPoolExecutor(STREAMS) as pool:
            answers = list(pool.map(lambda number: ask(server, number), range(STREAMS)))
        figures = read_replicas(server)
    num_pages = first["prompt_eval_count"] // PAGE_TOKENS
    total = {name: sum(each[name] for each in figures.values()) for name in next(iter(figures.values())) if name in COUNTED}
    assert total["copied_prefixes"] + total["missed_prefixes"] >= 1, figures  # so small a prefix is hardly waited for
    assert 1 <= total["store_loaded"] <= num_pages, figures
    assert total["store_sent"] == num_pages  # each page once

    with running(str(model), tmp_path / "alone", threads=1, **shared) as server:
        again = ask(server, 0)
    assert again["prompt_eval_cached_count"] >= num_pages * PAGE_TOKENS
    assert again["message"] == answers[0]["message"] == first["message"]
