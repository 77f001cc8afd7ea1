"""A replica as a deployment of Ray Serve: one model with its own engine, tree and tiers.

It reports its figures and the changes of its tree to the `Holdings` actor. Serve drains it before it is stopped, and then
its tree is saved. Its folder is the one with the lowest number that no other process of this machine holds. So a replica
that starts after another has ended, or was killed, takes over its folder, and the tree as far as it was on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.util import get_node_ip_address

from bough.cache.disk import DiskBusy
from bough.cache.disk.folder import FolderLock
from bough.config import Settings, limit_thread_spinning, read_cluster_secret
from bough.errors import EngineStuck, UnsupportedModel
from bough.ray.holdings import find_holdings
from bough.ray.replicas import RayReplicas
from bough.ray.reporter import Reporter
from bough.runtime import Runtime, find_model, load_runtime
from bough.scheduling.worker import Limits
from bough.server.serving.remote.host import ReplicaHost
from bough.server.serving.remote.replicas import Message, Operation, RemoteRequest, ReplicaFacts

log = logging.getLogger(__name__)


class Replica:
    """What Serve runs. Its methods are called by handles, on one event loop."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._folder = claim_folder(settings.cache_folder)
        own = settings_for(settings, self._folder)
        runtime = await asyncio.to_thread(_load, own)
        name = name_replica(self._folder, get_node_ip_address(), _count_machines())
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._holdings = find_holdings(context.app_name)
        others = RayReplicas(serve.get_deployment_handle(context.deployment, context.app_name), context.app_name)
        secret = read_cluster_secret(settings) or await others.read_secret()
        self._host = ReplicaHost(name, runtime, secret, others)
        self._reporting = asyncio.create_task(Reporter(self._host, self._holdings, self._id).run(), name="bough-report")
        log.info("%s serves %s", name, settings.model)

    def facts(self) -> ReplicaFacts:
        return self._host.facts()

    async def generate(self, request: RemoteRequest) -> AsyncGenerator[list[Message], None]:
        async with contextlib.aclosing(self._host.generate(request)) as stream:
            async for messages in stream:
                yield messages

    async def call(self, operation: Operation, replica_id: str = "") -> Any:
        """Do an operation on the tree. Only the router reads `replica_id`."""
        return await self._host.call(operation)

    def check_health(self) -> None:
        """Raise if the engine is stuck. After three times Serve replaces this replica."""
        if self._host.is_stuck:
            raise EngineStuck("a step of the engine takes too long")

    async def __del__(self) -> None:  # Serve awaits it when the replica is drained
        if not hasattr(self, "_host"):
            return
        self._reporting.cancel()
        with contextlib.suppress(Exception):
            await self._holdings.leave.remote(self._host.name, self._id)
        await asyncio.to_thread(self._host.close)
        self._folder.lock.release()


@dataclass(frozen=True)
class ReplicaFolder:
    """A folder that this process holds until it ends."""

    path: Path
    lock: FolderLock


def claim_folder(base: Path) -> ReplicaFolder:
    """Take `base/replica-K` with the lowest K that is free."""
    for number in count():
        path = base / f"replica-{number}"
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(DiskBusy):
            return ReplicaFolder(path, FolderLock(path))
    raise AssertionError("there is always a number that is free")


def name_replica(folder: ReplicaFolder, address: str, num_machines: int) -> str:
    """The name of a replica: that of its folder, and its machine's address if there are several, which may have the same
    folders. It has no colon, which ends the replica's name in the names of roots.
    """
    return folder.path.name if num_machines <= 1 else f"{folder.path.name}@{address.replace(':', '-')}"


@dataclass(frozen=True)
class ReplicaSettings(Settings):
    """The settings of one replica: its trees are in its own folder; the rest is shared with the others of its machine."""

    own_folder: Path = Path()

    @property
    def trees_folder(self) -> Path:
        return self.own_folder / "trees"


def settings_for(settings: Settings, folder: ReplicaFolder) -> ReplicaSettings:
    return ReplicaSettings(**vars(settings), own_folder=folder.path)


def _count_machines() -> int:
    return len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})


def _load(settings: Settings) -> Runtime:
    """Load the model of the settings, fetching it if it is missing. Raise UnsupportedModel for an encoder."""
    limit_thread_spinning()
    files = find_model(settings.model, settings)
    runtime = load_runtime(files, settings, limits=Limits(settings.queue))
    if not isinstance(runtime, Runtime):
        raise UnsupportedModel(f"{files.name} generates no text: encoders run on one machine")
    _ = runtime.worker  # the first use starts it
    return runtime
