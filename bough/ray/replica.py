"""A replica as a deployment of Ray Serve: one model with its own engine, tree and tiers.

It tells the `Holdings` actor its figures and what has changed in its tree. Serve drains it before it is stopped, and then
its tree is saved. One that was killed finds its tree again, as far as it was on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from ray.exceptions import RayError

from bough.config import Settings, limit_thread_spinning, read_cluster_secret
from bough.errors import BoughError, EngineStuck, UnsupportedModel
from bough.ray.folder import claim_folder, settings_for
from bough.ray.holdings import Report, find_holdings
from bough.ray.replicas import RayReplicas
from bough.routing import Outbox, ReplicaRates
from bough.routing.outbox import INTERVAL_S
from bough.runtime import Runtime, find_model, load_runtime
from bough.scheduling.worker import Limits
from bough.server.serving.remote.host import ReplicaHost
from bough.server.serving.remote.messages import Message, Operation, RemoteRequest, ReplicaFacts

log = logging.getLogger(__name__)

REPORT_S = 0.5
"""How often a replica tells its figures, also if its tree has not changed."""


class Replica:
    """What Serve runs. Its methods are called by handles, on one event loop."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._folder = claim_folder(settings.cache_folder)
        own = settings_for(settings, self._folder)
        runtime = await asyncio.to_thread(_load, own)
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._holdings = find_holdings(context.app_name)
        others = RayReplicas(serve.get_deployment_handle(context.deployment, context.app_name), context.app_name)
        secret = read_cluster_secret(settings) or await others.read_secret()
        self._host = ReplicaHost(self._folder.name, runtime, secret, others)
        self._reporting = asyncio.create_task(self._report())
        log.info("%s serves %s", self._folder.name, settings.model)

    def facts(self) -> ReplicaFacts:
        return self._host.facts()

    async def generate(self, request: RemoteRequest) -> AsyncGenerator[list[Message], None]:
        async with contextlib.aclosing(self._host.generate(request)) as stream:
            async for messages in stream:
                yield messages

    async def call(self, operation: Operation, replica_id: str = "") -> Any:
        """Do an operation on the tree. The router has read `replica_id`."""
        return await self._host.call(operation)

    def check_health(self) -> None:
        """Serve starts this replica anew if this raises three times."""
        if self._host.is_stuck:
            raise EngineStuck("a step of the engine takes too long")

    async def _report(self) -> None:
        """Tell figures and changes of the tree, again and again; after a failure all pages are told."""
        outbox, messages = Outbox(self._host.name, time.time_ns()), list[bytes]()
        told_s, rates = -math.inf, ReplicaRates()
        while True:
            now = time.monotonic()
            try:
                looked = await self._host.look()
                rates = looked.rates
                for digest, note in looked.notes.items():
                    outbox.note(digest, note, now)
                if outbox.is_due(now):
                    messages.append(outbox.take().pack())
            except BoughError as error:
                log.debug("the tree cannot be looked at now: %s", error)
            if messages or now - told_s >= REPORT_S:
                report = Report(self._host.name, self._id, self._host.snapshot(), rates, messages)
                told_s, messages = now, []
                try:
                    if await self._holdings.report.remote(report):
                        messages = [outbox.list_all().pack()]
                except RayError as error:
                    log.warning("what has changed cannot be told now: %s", error)
                    messages = [outbox.list_all().pack()]
            await asyncio.sleep(INTERVAL_S)

    async def __del__(self) -> None:  # Serve awaits it when the replica is drained
        if not hasattr(self, "_host"):
            return
        self._reporting.cancel()
        with contextlib.suppress(Exception):
            await self._holdings.leave.remote(self._host.name, self._id)
        await asyncio.to_thread(self._host.close)
        self._folder.lock.release()


def _load(settings: Settings) -> Runtime:
    """Load the model of the settings, which is on this machine or is fetched. Raises UnsupportedModel for an encoder."""
    limit_thread_spinning()
    files = find_model(settings.model, settings)
    runtime = load_runtime(files, settings, limits=Limits(settings.queue, settings.watchdog))
    if not isinstance(runtime, Runtime):
        raise UnsupportedModel(f"{files.name} generates no text: encoders run on one machine")
    _ = runtime.worker  # the first use starts it
    return runtime
