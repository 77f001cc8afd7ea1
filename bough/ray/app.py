"""The server on Ray Serve: starting replicas of models, and the ingress that clients reach.

`bough serve --ray` is the ingress itself, with its own socket. `build_app` is for Serve's config files and `serve run`:
there the ingress is a deployment behind Serve's proxies.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.handle import DeploymentHandle

from bough import models
from bough.config import Settings, load_settings, read_cluster_secret
from bough.errors import RequestError, SettingsError
from bough.models.defaults import read_defaults
from bough.models.files import ModelFiles
from bough.models.prompts import Prompts
from bough.models.tokenizer import load_tokenizer
from bough.ray.applications import DRAIN_S, LOCAL, MOST_ONGOING, Application, Applications, deploy_replicas
from bough.ray.holdings import NAMESPACE
from bough.ray.replicas import RayReplicas, stop_routers
from bough.runtime import find_model, gguf_support
from bough.server.app import make_app, make_service
from bough.server.serving.remote.held_pages import digest_prompt, make_keys
from bough.server.serving.remote.model import RemoteModel, read_facts

START_S = 1800.0
"""How long the first replica may take to start: it may have to fetch and convert a model."""

_OBJECT_BYTES = 128 * 2**20  # messages are small, and weights never go this way


class RemoteStart:
    """Loads models for `LoadedModels`: waits for a replica, and reads the tokenizer here.

    `find` starts or finds the replicas of a model; `end` gets the name of their application when the model is unloaded.
    """

    def __init__(self, find: Callable[[ModelFiles], Application], end: Callable[[str], None] = lambda name: None) -> None:
        self._find = find
        self._end = end

    def __call__(self, files: ModelFiles, settings: Settings) -> Awaitable[RemoteModel]:
        application = self._find(files)
        try:
            files = models.convert_if_needed(files, settings, gguf_support(settings))
            tokenizer = load_tokenizer(files, settings.trust_remote_code)
            defaults = read_defaults(files)
        except BaseException:
            self._end(application.name)
            raise

        async def connect() -> RemoteModel:
            replicas = RayReplicas(application.handle, application.name, partial(self._end, application.name))
            try:
                facts = await read_facts(replicas, START_S)
                keys = make_keys(read_cluster_secret(settings) or await replicas.read_secret())
            except BaseException:
                await replicas.close()
                raise
            prompts = Prompts(tokenizer, facts.vocab_size)
            return RemoteModel(files.name, replicas, facts, prompts, defaults, partial(digest_prompt, keys))

        return connect()


@contextmanager
def connected(settings: Settings, model: str) -> Iterator[RemoteStart]:
    """Connect to the cluster of the settings, or to one that is started here and ends with this context.

    Yields the loader of models. All replicas are deleted at the end, also if loading failed: in a cluster that was not
    started here they would go on running.
    """
    own: dict[str, Any] = {}
    if settings.ray == LOCAL:
        own = {
            "num_cpus": os.cpu_count() or 1,
            "include_dashboard": False,
            "object_store_memory": _OBJECT_BYTES,
            "_node_ip_address": "127.0.0.1",  # no other machine needs to reach it
        }
    ray.init(settings.ray, log_to_driver=False, configure_logging=False, namespace=NAMESPACE, **own)
    try:
        serve.start(proxy_location=ProxyLocation.Disabled)
        applications = Applications(settings, model)
        try:
            yield RemoteStart(applications.start, applications.end)
        finally:
            applications.end_all()
            stop_routers()
    finally:
        ray.shutdown()


@serve.ingress()
class Ingress:
    """The server behind Serve's proxies: every API, key, salt and limit as without Ray."""

    async def __init__(self, settings: Settings, replicas: DeploymentHandle) -> None:  # type: ignore[misc]
        files = find_model(settings.model, settings)
        application = Application(serve.get_replica_context().app_name, replicas)

        def find(wanted: ModelFiles) -> Application:
            if wanted.name != files.name:
                raise RequestError(f"this application serves {files.name} alone: {wanted.name} cannot be loaded")
            return application

        self._service = make_service(settings, files, start=RemoteStart(find))
        await self._service.load(files.name)

    def __serve_build_asgi_app__(self) -> Any:
        return make_app(self._service.settings, self._service)


def build_app(args: dict[str, Any]) -> Any:
    """The application for Serve's config files: `args` are settings by their names, as in bough.toml.

    `ingresses` is the number of servers behind Serve's proxies. Raise SettingsError if they are not valid.
    """
    given = dict(args)
    ingresses = int(given.pop("ingresses", 1))
    settings = load_settings(given)
    if ingresses > 1 and settings.keys_file is not None and not read_cluster_secret(settings):
        raise SettingsError(
            f"there are {ingresses} ingresses and a keys_file: set store_secret_file, so that a key has "
            "the same tree at each of them"
        )
    if not ray.is_initialized():  # `serve run` connects only when it has the application
        ray.init(namespace=NAMESPACE)
    ingress = serve.deployment(Ingress).options(
        num_replicas=ingresses, max_ongoing_requests=MOST_ONGOING, graceful_shutdown_timeout_s=DRAIN_S
    )
    return ingress.bind(settings, deploy_replicas(settings))
