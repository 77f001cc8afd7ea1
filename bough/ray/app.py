"""The application on Ray Serve: replicas of one model, and how a server or Serve's own ingress reaches them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, ProxyLocation, RequestRouterConfig

from bough import models
from bough.cache.disk.keys import SECRET_BYTES
from bough.config import Settings
from bough.errors import RequestError
from bough.models.defaults import read_defaults
from bough.models.files import ModelFiles
from bough.models.prompts import Prompts
from bough.models.tokenizer import load_tokenizer
from bough.ray.holdings import NAMESPACE, find_holdings
from bough.ray.replica import Replica
from bough.ray.replicas import RayReplicas
from bough.ray.router import ReplicaRouter
from bough.runtime import gguf_support
from bough.server.serving.remote.held_pages import digest_prompt, make_keys
from bough.server.serving.remote.model import RemoteModel, read_facts

APPLICATION = "bough"
LOCAL = "local"
"""As the setting `ray`: a cluster of this machine alone, which the server starts and ends."""

START_S = 1800.0
"""How long the first replica may take: it may have to fetch and convert a model."""

_ONGOING = 10_000  # Serve's own limit: a replica has its queue, and refuses what is beyond it
_DRAIN_S = 120.0


def deploy_replicas(settings: Settings) -> Any:
    """The deployment of a model's replicas, for `serve.run` or to be bound to an ingress."""
    wanted: dict[str, Any] = {"num_replicas": settings.replicas}
    if not settings.replicas:
        wanted = {"autoscaling_config": AutoscalingConfig(min_replicas=1, max_replicas=_most_replicas())}
    return serve.deployment(Replica).options(
        **wanted,
        ray_actor_options=_resources(settings),
        max_ongoing_requests=_ONGOING,
        graceful_shutdown_timeout_s=_DRAIN_S,
        health_check_period_s=10.0,
        request_router_config=RequestRouterConfig(
            request_router_class=ReplicaRouter, request_router_kwargs={"application": APPLICATION}
        ),
    )


def _resources(settings: Settings) -> dict[str, float]:
    """What Ray reserves for a replica: a GPU where the cluster has some and the settings do not say otherwise."""
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    return {"num_cpus": 1, "num_gpus": 1} if has_gpus and settings.device != "cpu" else {"num_cpus": 1}


def _most_replicas() -> int:
    resources = ray.cluster_resources()
    return max(1, int(resources.get("GPU", 0) or len(ray.nodes())))


class RemoteStart:
    """Starts the application for `LoadedModels`, waits for a replica, and reads the tokenizer here."""

    def __init__(self, settings: Settings, model: str) -> None:
        self._settings = settings
        self._model = model

    def __call__(self, files: ModelFiles, settings: Settings) -> Awaitable[RemoteModel]:
        if files.name != self._model:
            raise RequestError(f"this server runs on Ray and serves {self._model} alone: {files.name} cannot be loaded")
        secret = secrets.token_bytes(SECRET_BYTES)
        application = deploy_replicas(self._settings).bind(self._settings, secret)
        handle = serve.run(application, name=APPLICATION, route_prefix=None)
        files = models.convert_if_needed(files, settings, gguf_support(settings))
        tokenizer = load_tokenizer(files, settings.trust_remote_code)
        defaults, keys = read_defaults(files), make_keys(secret)

        async def connect() -> RemoteModel:
            replicas = RayReplicas(handle, APPLICATION)
            facts = await read_facts(replicas, START_S)
            prompts = Prompts(tokenizer, facts.vocab_size)
            return RemoteModel(replicas, facts, prompts, defaults, partial(digest_prompt, keys))

        return connect()


def replica_settings(settings: Settings) -> Settings:
    """The settings of the server for its replicas. A model that is given by a path must be there on every machine."""
    path = Path(settings.model)
    return replace(settings, model=str(path.resolve())) if path.exists() else settings


@contextmanager
def connected(settings: Settings) -> Iterator[None]:
    """A connection to the cluster of the settings, or to one that is started here and ends with this context.

    The application is deleted at the end: replicas finish their answers and save their trees.
    """
    is_local = settings.ray == LOCAL
    own: dict[str, Any] = (
        {"include_dashboard": False, "num_cpus": max(settings.replicas, os.cpu_count() or 1)} if is_local else {}
    )
    ray.init(settings.ray, log_to_driver=False, configure_logging=False, namespace=NAMESPACE, **own)
    try:
        serve.start(proxy_location=ProxyLocation.Disabled)
        yield
        serve.delete(APPLICATION)  # waits for the replicas
        ray.kill(find_holdings(APPLICATION))
    finally:
        ray.shutdown()


def build_app(args: dict[str, Any]) -> Any:
    raise NotImplementedError
