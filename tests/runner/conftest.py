"""A tiny model that can chat, loaded once for each module, and what must hold after every test of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bough
from bough import Runner
from tests.models.tiny_tokenizer import byte_level
from tests.tiny_models import make_folder


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of a few thousand weights, with a tokenizer of 407 tokens and a chat template."""
    folder = make_folder(
        "llama", tmp_path_factory.mktemp("models") / "chatty", vocab_size=420, max_position_embeddings=32_768
    )
    byte_level().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded(chat_folder: Path, one_thread: None) -> Iterator[Runner]:
    with bough.load(chat_folder, engine="torch", lanes=2) as runner:
        yield runner


@pytest.fixture
def runner(loaded: Runner) -> Iterator[Runner]:
    """Two lanes and an empty tree. After each test no request is under way, and the tree is whole."""
    loaded.cache.clear()
    yield loaded
    check_idle(loaded)


def check_idle(runner: Runner) -> None:
    assert runner.cache.stats()["busy_lanes"] == 0
    runner.runtime.worker.call(runner.runtime.prefix_cache.check).result()
