"""A server with a model for each kind of request: one that generates text, one that embeds, one that ranks."""

from __future__ import annotations

import asyncio
import gc
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from bough.config import Settings
from bough.models import ModelFiles, Store
from bough.server.app import make_app
from bough.server.http.listening import bind, url_of
from bough.server.serving.catalog import Catalog
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.loaded_model import Start, start_model
from bough.server.serving.service import Service
from tests.server.fake_encoders import FakeEmbedder, FakeEncoderRuntime, FakeReranker
from tests.tiny_models import make_folder


def start_fakes(files: ModelFiles, settings: Settings) -> Any:
    """Load the tiny model; the others are fakes."""
    if files.name == "vectors":
        return FakeEncoderRuntime(files.name, embedder=FakeEmbedder())
    if files.name == "ranker":
        return FakeEncoderRuntime(files.name, reranker=FakeReranker())
    return start_model(files, settings)


def put_model(settings: Settings, name: str, make: Callable[[Path], object]) -> None:
    """Add a model to the model folder."""
    with Store(settings.models_folder).making(name) as making:
        make(making.folder)
        making.commit("a test", "", 0, "F32")


@contextmanager
def serving(settings: Settings, files: ModelFiles, start: Start = start_model) -> Iterator[str]:
    """The application on a thread of this process; gives its address."""
    catalog = Catalog(settings, files)
    service = Service(settings, LoadedModels(settings, catalog, start=start), catalog)
    server = uvicorn.Server(uvicorn.Config(make_app(settings, service), log_config=None, ws="none"))
    with bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        try:
            yield url_of(bound)
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


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
def embedding_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the models `tiny` (generates), `vectors` (embeds) and `ranker` (ranks)."""
    folder = tmp_path_factory.mktemp("embedding_server")
    settings = Settings(
        data_folder=folder, cache_folder=folder / "cache", disk=0, threads=2, model="tiny", aliases="mine=vectors"
    )
    for number, name in enumerate(("vectors", "ranker"), start=1):  # of different sizes: equal models would be one
        put_model(settings, name, partial(make_folder, "llama", vocab_size=16 * number))
    with serving(settings, ModelFiles("tiny", tiny_model), start_fakes) as url:
        yield url
