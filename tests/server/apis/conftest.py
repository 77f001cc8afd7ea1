"""Servers in this process: of a model that generates text, and of one for each kind of request."""

from __future__ import annotations

import asyncio
import gc
import importlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from bough.config import Settings
from bough.models import ModelFiles, ModelFolder
from tests.server.conftest import is_real
from tests.server.fake_encoders import FakeEmbedder, FakeEncoderRuntime, FakeReranker
from tests.server.in_process import make_words_folder, serving, start_words
from tests.server.servers import Address, running


def start_fakes(files: ModelFiles, settings: Settings) -> Any:
    """Load a model without weights: an embedder, a reranker, or one that generates text."""
    if files.name == "vectors":
        return FakeEncoderRuntime(files.name, embedder=FakeEmbedder())
    if files.name == "ranker":
        return FakeEncoderRuntime(files.name, reranker=FakeReranker())
    return start_words(files, settings)


def put_model(data_folder: Path, name: str, make: Callable[[Path], object]) -> None:
    """Add a model to the model folder."""
    with ModelFolder(data_folder / "models").making(name) as making:
        make(making.folder)
        making.commit("a test", "", 0, "F32")


@pytest.fixture
def litellm() -> Iterator[Any]:
    """LiteLLM, which warns of its own use of other libraries and leaves an event loop and connections open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("litellm")
        yield module
        asyncio.set_event_loop(None)
        module.in_memory_llm_clients_cache.flush_cache()
        gc.collect()  # here, or what is open is found by the next test that collects, where warnings fail


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """A model without weights, of the default model's name and context; the default model if an engine was asked for."""
    folder = tmp_path_factory.mktemp("server")
    if is_real(request.config):
        request.getfixturevalue("smollm2_files")
        with running("smollm2", folder) as started:
            yield started
        return
    files = ModelFiles("smollm2", make_words_folder(folder / "smollm2", context_tokens=8192))
    with serving(files, folder) as address:
        yield address


@pytest.fixture(scope="session")
def client(server: Address) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="session")
def embedding_server(words_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the models `tiny` (generates), `vectors` (embeds) and `ranker` (ranks)."""
    folder = tmp_path_factory.mktemp("embedding_server")
    for number, name in enumerate(("vectors", "ranker"), start=1):  # of different sizes: equal models would be one
        put_model(folder / "data", name, partial(make_words_folder, context_tokens=number))
    with serving(words_model, folder, start_fakes, disk=0, aliases="mine=vectors") as address:
        yield address.url
