"""The application on Ray Serve: replicas of one model, and the ingress that clients reach.

`bough serve --ray` is the ingress itself, with its own socket. `build_app` is for Serve's config files and `serve run`:
there the ingress is a deployment behind Serve's proxies.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, ProxyLocation, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from bough import models
from bough.config import Settings, load_settings, read_cluster_secret
from bough.errors import ModelError, RequestError, SettingsError
from bough.models.defaults import read_defaults
from bough.models.files import ModelFiles
from bough.models.prompts import Prompts
from bough.models.tokenizer import load_tokenizer
from bough.ray.first_tokens import stop_routers
from bough.ray.holdings import NAMESPACE, find_holdings
from bough.ray.replica import Replica
from bough.ray.replicas import RayReplicas
from bough.ray.router import ReplicaRouter
from bough.runtime import find_model, gguf_support
from bough.server.app import make_app, make_service
from bough.server.serving.remote.held_pages import digest_prompt, make_keys
from bough.server.serving.remote.model import RemoteModel, read_facts

APPLICATION = "bough"
LOCAL = "local"
"""As the setting `ray`: a cluster of this machine alone, which the server starts and ends."""

START_S = 1800.0
"""How long the first replica may take: it may have to fetch and convert a model."""

_ONGOING = 10_000  # Serve's own limit: a replica has its queue, and refuses what is beyond it
_STARTS = 2  # replicas that may fail before any has started: what fails twice is a wrong setting or a broken model
_DRAIN_S = 120.0
_OBJECT_BYTES = 128 * 2**20  # messages are small, and weights never go this way


def deploy_replicas(settings: Settings) -> Any:
    """The deployment of a model's replicas, bound to its settings."""
    wanted: dict[str, Any] = {"num_replicas": settings.replicas}
    if not settings.replicas:
        wanted = {"autoscaling_config": AutoscalingConfig(min_replicas=1, max_replicas=_most_replicas())}
    deployment = serve.deployment(Replica).options(
        **wanted,
        ray_actor_options=_resources(settings),
        max_ongoing_requests=_ONGOING,
        max_constructor_retry_count=_STARTS,
        graceful_shutdown_timeout_s=_DRAIN_S,
        health_check_period_s=10.0,
        health_check_timeout_s=10.0,  # after three times, a replica whose process hangs is replaced
        request_router_config=RequestRouterConfig(request_router_class=ReplicaRouter),
    )
    return deployment.bind(settings)


def _resources(settings: Settings) -> dict[str, float]:
    """What Ray reserves for a replica: a GPU where the cluster has some and the settings do not say otherwise."""
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    return {"num_cpus": 1, "num_gpus": 1} if has_gpus and settings.device != "cpu" else {"num_cpus": 1}


def _most_replicas() -> int:
    """One for each GPU; in a cluster without any, one for each machine."""
    return max(1, int(ray.cluster_resources().get("GPU", 0)) or len(ray.nodes()))


class RemoteStart:
    """Loads the model of an application for `LoadedModels`: waits for a replica, and reads the tokenizer here."""

    def __init__(self, model: str, application: str, find_handle: Callable[[], DeploymentHandle]) -> None:
        self._model = model
        self._application = application
        self._find_handle = find_handle

    def __call__(self, files: ModelFiles, settings: Settings) -> Awaitable[RemoteModel]:
        if files.name != self._model:
            raise RequestError(f"this server runs on Ray and serves {self._model} alone: {files.name} cannot be loaded")
        handle = self._find_handle()
        files = models.convert_if_needed(files, settings, gguf_support(settings))
        tokenizer = load_tokenizer(files, settings.trust_remote_code)
        defaults = read_defaults(files)

        async def connect() -> RemoteModel:
            replicas = RayReplicas(handle, self._application)
            facts = await read_facts(replicas, START_S)
            keys = make_keys(read_cluster_secret(settings) or await replicas.read_secret())
            prompts = Prompts(tokenizer, facts.vocab_size)
            return RemoteModel(replicas, facts, prompts, defaults, partial(digest_prompt, keys))

        return connect()


def start_here(settings: Settings, model: str) -> RemoteStart:
    """What starts the replicas when a server of this process loads its model. `connected` ends them."""
    path = Path(settings.model)
    shared = replace(settings, model=str(path.resolve())) if path.exists() else settings

    @cache  # a model that is loaded again after its keep-alive finds its replicas as they are
    def deploy() -> DeploymentHandle:
        try:
            return serve.run(deploy_replicas(shared), name=APPLICATION, route_prefix=None)
        except RuntimeError as error:
            raise ModelError(f"no replica of {model} could start: {_cause(str(error))}") from error

    return RemoteStart(model, APPLICATION, deploy)


def _cause(told: str) -> str:
    """What a replica raised, as the last error in what Serve tells: it tells whole tracebacks."""
    errors = re.findall(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Model|Settings)\w*: .+)$", told, re.MULTILINE)
    return errors[-1] if errors else told.strip().partition("\n")[0]


@contextmanager
def connected(settings: Settings) -> Iterator[None]:
    """A connection to the cluster of the settings, or to one that is started here and ends with this context.

    The application is deleted at the end: replicas finish their answers and save their trees.
    """
    own: dict[str, Any] = {}
    if settings.ray == LOCAL:
        own = {
            "num_cpus": max(settings.replicas, os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": _OBJECT_BYTES,
            "_node_ip_address": "127.0.0.1",  # no other machine needs to reach it
        }
    ray.init(settings.ray, log_to_driver=False, configure_logging=False, namespace=NAMESPACE, **own)
    try:
        serve.start(proxy_location=ProxyLocation.Disabled)
        try:
            yield
        finally:  # also if loading failed: in a cluster that others started, the replicas would stay
            serve.delete(APPLICATION)  # waits for the replicas
            stop_routers()
            ray.kill(find_holdings(APPLICATION))
    finally:
        ray.shutdown()


@serve.ingress()
class Ingress:
    """The server behind Serve's proxies: every API, key, salt and limit as without Ray."""

    async def __init__(self, settings: Settings, replicas: DeploymentHandle) -> None:  # type: ignore[misc]
        files = find_model(settings.model, settings)
        application = serve.get_replica_context().app_name
        self._service = make_service(settings, files, start=RemoteStart(files.name, application, lambda: replicas))
        await self._service.load(files.name)

    def __serve_build_asgi_app__(self) -> Any:
        return make_app(self._service.settings, self._service)


def build_app(args: dict[str, Any]) -> Any:
    """The application for Serve's config files: `args` are settings by their names, as in bough.toml.

    `ingresses` is the number of servers behind Serve's proxies. Raises SettingsError.
    """
    given = dict(args)
    ingresses = int(given.pop("ingresses", 1))
    settings = load_settings(given)
    if ingresses > 1 and settings.keys_file is not None and not read_cluster_secret(settings):
        raise SettingsError(
            f"there are {ingresses} ingresses and a keys_file: set store_secret or store_secret_file, so that a key has "
            "the same tree at each of them"
        )
    if not ray.is_initialized():  # `serve run` connects only when it has the application
        ray.init(namespace=NAMESPACE)
    ingress = serve.deployment(Ingress).options(
        num_replicas=ingresses, max_ongoing_requests=_ONGOING, graceful_shutdown_timeout_s=_DRAIN_S
    )
    return ingress.bind(settings, deploy_replicas(settings))
