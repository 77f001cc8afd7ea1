"""Which engine runs a model: by the settings, the machine, and the installed packages, none of which is imported here."""

from __future__ import annotations

import platform
from collections.abc import Collection
from importlib.util import find_spec

from bough.config import ENGINES, Settings
from bough.errors import UnsupportedModel
from bough.system.distribution import install_command

_PACKAGES = {"torch": ("torch",), "mlx": ("mlx", "mlx_lm")}


def choose_engine(settings: Settings) -> str:
    """The name of the engine that the settings ask for. Raises UnsupportedModel if it is not installed."""
    is_of_torch = settings.device.partition(":")[0] in ("cuda", "mps")  # names of devices that only torch has
    wanted = "torch" if settings.engine == "auto" and is_of_torch else settings.engine
    return choose_among(wanted, find_installed(), is_apple_silicon())


def choose_among(wanted: str, installed: Collection[str], on_apple_silicon: bool) -> str:
    """The engine `wanted`; "auto" prefers MLX on Apple silicon, torch elsewhere, and takes the other if it is missing."""
    preferred = ("mlx", "torch") if on_apple_silicon else ("torch", "mlx")
    allowed = preferred if wanted == "auto" else (wanted,)
    found = next((name for name in allowed if name in installed), None)
    if found is None:
        what = "no engine" if wanted == "auto" else f"the engine {wanted}"
        commands = " or ".join(install_command(name) for name in ENGINES if name in allowed)
        raise UnsupportedModel(f"{what} is {'' if wanted == 'auto' else 'not '}installed: {commands}")
    return found


def find_installed() -> set[str]:
    return {engine for engine, packages in _PACKAGES.items() if all(find_spec(package) for package in packages)}


def is_apple_silicon() -> bool:
    """Whether this machine is a Mac whose CPU and GPU share one memory."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"
