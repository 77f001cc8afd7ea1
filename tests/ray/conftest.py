"""Servers on Ray, each with a cluster of its own on loopback, started and stopped as a user would."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.models.tiny_tokenizer import CHATML, byte_level
from tests.server.servers import Server, find_port, make_chat_folder, running
from tests.tiny_models import make_folder

if importlib.util.find_spec("ray"):
    with warnings.catch_warnings():  # those of Ray's own code are not ours to mend
        warnings.simplefilter("ignore")
        importlib.import_module("ray.serve")

REPLICAS = 3
SMALL = {"ray": "local", "threads": 1, "device_memory": 64 * 2**20, "disk": 2**30}


def let_router_hear() -> None:
    """Wait until the router has heard what a replica holds now.

    Nothing tells outside what a router knows, and asking would change it. Replicas tell it ten times a second.
    """
    time.sleep(1.0)


@pytest.fixture(scope="session", autouse=True)
def needs_ray() -> None:
    pytest.importorskip("ray")


@pytest.fixture(scope="session")
def ray_server(tmp_path_factory: pytest.TempPathFactory, needs_ray: None) -> Iterator[Server]:
    """Three replicas of the tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        folder = tmp_path_factory.mktemp("ray")
        model = make_chat_folder(folder / "tiny")
        with running(str(model), folder, data_folder=folder / "data", replicas=REPLICAS, **SMALL) as started:
            yield started


@dataclass(frozen=True)
class Cluster:
    """Where a cluster is reached, by Ray and at Serve's proxy."""

    address: str
    port: int


@pytest.fixture(scope="module")
def cluster(needs_ray: None) -> Iterator[Cluster]:
    """A cluster on loopback to which the test itself is connected, as an operator would be."""
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            "local",
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=128 * 2**20,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            configure_logging=False,
            namespace="serve",
        )
        try:
            port = find_port()
            serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
            yield Cluster(ray.get_runtime_context().gcs_address, port)
        finally:
            serve.shutdown()
            ray.shutdown()


@pytest.fixture
def hybrid_server(tmp_path: Path, needs_ray: None) -> Iterator[Server]:
    """Two replicas of a tiny model with recurrent layers."""
    tokenizer = byte_level(CHATML)
    model = make_folder("qwen3_next", tmp_path / "hybrid", vocab_size=len(tokenizer), max_position_embeddings=2048)
    tokenizer.save_pretrained(model)
    (model / "generation_config.json").write_text('{"do_sample": false, "eos_token_id": 2}')
    with running(str(model), tmp_path, data_folder=tmp_path / "data", replicas=2, **SMALL) as started:
        yield started
