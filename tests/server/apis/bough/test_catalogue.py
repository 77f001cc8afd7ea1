"""What a client is offered to fetch."""

from __future__ import annotations

from pathlib import Path

import httpx

from bough.config import Settings
from bough.models import ModelFolder
from bough.system.resources import read_host_memory
from tests.server.servers import StartServer


def test_the_catalogue_says_what_can_be_fetched_what_fits_and_what_is_here(
    tiny_server: StartServer, tmp_path: Path
) -> None:
    server = tiny_server(data_folder=tmp_path)
    with ModelFolder(Settings(data_folder=tmp_path).models_folder).making("qwen3") as making:
        (making.folder / "config.json").write_text("{}")
        making.commit("a test", "", 0, "")

    found = httpx.get(f"{server.url}/api/catalogue", timeout=30).json()

    models = {each["name"]: each for each in found["models"]}
    assert found["memory_bytes"] == read_host_memory().total_bytes
    assert models["qwen3:4b"]["is_here"] and not models["qwen3:8b"]["is_here"]
    assert models["qwen3:4b"]["names"] == ["qwen3", "qwen3:4b"]
    assert all((each["needed_bytes"] > found["memory_bytes"]) == (each["fits"] == "no") for each in models.values())
