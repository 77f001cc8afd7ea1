"""The server that tests of Ollama's models share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import httpx
import pytest

from bough.models import ModelFiles, ModelFolder

NO_INDEX = "http://127.0.0.1:9/simple"  # where nobody listens


@pytest.fixture(scope="session")
def little(tiny_server, words_model: ModelFiles, tmp_path_factory) -> Iterator[httpx.Client]:
    """A server with a model of its own in its model folder, which tests may copy and delete, and no way to fetch others."""
    data_folder = tmp_path_factory.mktemp("models_of_ollama")
    with ModelFolder(data_folder / "models").making("little") as making:
        shutil.copytree(words_model.folder, making.folder, dirs_exist_ok=True)
        making.commit("a test", "", 0, "F32")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PIP_INDEX_URL", NO_INDEX)
        server = tiny_server(data_folder=data_folder)
    with httpx.Client(base_url=server.url, timeout=60) as opened:
        yield opened
