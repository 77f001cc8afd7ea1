"""The applications of a server on Ray Serve: one for each loaded model, with replicas of it.

An application is started when its model is loaded and deleted when it is unloaded; replicas then finish their answers and
save their trees. The model of the settings has the application `bough`, others add their name to that.
"""

from __future__ import annotations

import re
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from bough.config import Settings
from bough.errors import ModelError
from bough.models.files import ModelFiles, is_model_path
from bough.ray.holdings import find_holdings
from bough.ray.replica import Replica
from bough.ray.replicas import stop_routers
from bough.ray.router import ReplicaRouter

APPLICATION = "bough"
LOCAL = "local"
"""The value of the setting `ray` for a cluster of this machine alone, which the server starts and ends."""

MOST_ONGOING = 10_000  # Serve's own limit: a replica has its queue, and refuses what is beyond it
DRAIN_S = 120.0

_STARTS = 2  # attempts to start a first replica: two failures mean a wrong setting or a broken model
_FREED_S = 5.0  # Ray reports freed resources with a delay


class NoFreeResources(MemoryError):
    """The cluster has no room for the replicas of another model. The server then unloads an idle one, if there is one."""


@dataclass(frozen=True)
class Application:
    """The replicas of a model: the name of their application at Serve, and their handle."""

    name: str
    handle: DeploymentHandle


class Applications:
    """Starts and ends applications. `model` is the name of the settings' model. Any thread may call."""

    def __init__(self, settings: Settings, model: str) -> None:
        path = Path(settings.model).expanduser()
        self._settings = replace(settings, model=str(path.resolve())) if is_model_path(path) else settings
        self._model = model
        self._names: set[str] = set()

    def start(self, files: ModelFiles) -> Application:
        """Start replicas of a model, and wait for the first. Raises ModelError if none starts, or NoFreeResources."""
        settings, name = self._settings, APPLICATION
        if files.name != self._model:
            settings, name = replace(settings, model=files.name), name_application(files.name)
            _require_resources(settings, files.name)
        self._names.add(name)
        try:
            return Application(name, serve.run(deploy_replicas(settings), name=name, route_prefix=None))
        except RuntimeError as error:
            self.end(name)
            raise ModelError(f"no replica of {files.name} could start: {_cause(str(error))}") from error

    def end(self, name: str) -> None:
        """Delete an application, and wait for its replicas."""
        self._names.discard(name)
        serve.delete(name)
        stop_routers(name)
        ray.kill(find_holdings(name))

    def end_all(self) -> None:
        for name in sorted(self._names):
            self.end(name)


def name_application(model: str) -> str:
    """The name of another model's application. Serve uses it in the names of actors."""
    plain = re.sub(r"[^\w.-]", "-", model)
    return f"{APPLICATION}-{plain}" if plain == model else f"{APPLICATION}-{plain}-{zlib.crc32(model.encode()):08x}"


def deploy_replicas(settings: Settings) -> Any:
    """The deployment of a model's replicas, bound to its settings."""
    wanted: dict[str, Any] = {"num_replicas": settings.replicas}
    if not settings.replicas:
        wanted = {"autoscaling_config": AutoscalingConfig(min_replicas=1, max_replicas=_most_replicas())}
    deployment = serve.deployment(Replica).options(
        **wanted,
        ray_actor_options={f"num_{name.lower()}s": count for name, count in _resources(settings).items()},
        max_ongoing_requests=MOST_ONGOING,
        max_constructor_retry_count=_STARTS,
        graceful_shutdown_timeout_s=DRAIN_S,
        health_check_period_s=10.0,
        health_check_timeout_s=10.0,  # after three times, a replica whose process hangs is replaced
        request_router_config=RequestRouterConfig(request_router_class=ReplicaRouter),
    )
    return deployment.bind(settings)


def _resources(settings: Settings) -> dict[str, float]:
    """What Ray reserves for a replica: a GPU, if the cluster has some and the device is not the CPU.

    On this machine alone no CPU is reserved: memory is what limits the models.
    """
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    cpus = {"CPU": 0.0 if settings.ray == LOCAL else 1.0}
    return cpus | {"GPU": 1.0} if has_gpus and settings.device != "cpu" else cpus


def _most_replicas() -> int:
    """One for each GPU; in a cluster without any, one for each machine."""
    return max(1, int(ray.cluster_resources().get("GPU", 0)) or len(ray.nodes()))


def _require_resources(settings: Settings, model: str) -> None:
    """Raise NoFreeResources if the cluster cannot hold one replica, or all that the settings want."""
    num_replicas = max(1, settings.replicas)
    needed = {name: num_replicas * count for name, count in _resources(settings).items()}
    deadline = time.monotonic() + _FREED_S
    while True:
        free = ray.available_resources()
        short = {name: count for name, count in needed.items() if free.get(name, 0) < count}
        if not short:
            return
        if time.monotonic() >= deadline:
            needs = ", ".join(f"{count:g} {name}s and {free.get(name, 0):g} are free" for name, count in short.items())
            raise NoFreeResources(f"{num_replicas} replicas of {model} need {needs}")
        time.sleep(0.2)


def _cause(trace: str) -> str:
    """What a replica raised: the last error in the tracebacks that Serve reports."""
    errors = re.findall(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Model|Settings)\w*: .+)$", trace, re.MULTILINE)
    return errors[-1] if errors else trace.strip().partition("\n")[0]
