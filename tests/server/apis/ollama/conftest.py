"""The server that tests of Ollama's models share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bough.models import Store

NO_INDEX = "http://127.0.0.1:9/simple"  # where nobody listens


@pytest.fixture(scope="session")
def little(tiny_server, tiny_model: Path, tmp_path_factory) -> Iterator[httpx.Client]:
    """A server with a model of its own in its model folder, which tests may copy and delete, and no way to fetch others."""
    data_folder = tmp_path_factory.mktemp("models_of_ollama")
    with Store(data_folder / "models").making("little") as making:
        shutil.copytree(tiny_model, making.folder, dirs_exist_ok=True)
        making.commit("a test", "", 0, "F32")
    server = tiny_server(data_folder=data_folder, index_url=NO_INDEX)
    with httpx.Client(base_url=server.url, timeout=60) as opened:
        yield opened
