"""From a name and settings to a runner: finds the files, chooses the engine and loads the model.

This is the only module that imports an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bough import models
from bough.config import Settings, limit_thread_spinning, load_settings
from bough.engines.choice import choose_engine, find_installed, install_command
from bough.engines.contract import Engine, EngineMaker
from bough.engines.torch.cpu.library import explain_missing_isa, load_kernels
from bough.errors import KernelsMissing, ModelNotFound, SettingsError, UnsupportedModel
from bough.models import Announce
from bough.models.files import ModelFiles
from bough.models.sources import GgufSupport
from bough.models.tokenizer import Tokenizer, load_tokenizer
from bough.runner.runner import Runner
from bough.runner.tiers import open_tiers
from bough.system.processes import without_gc
from bough.types import Progress

log = logging.getLogger(__name__)

_MAY_BE_PACKED = ("auto", "packed")  # of the setting weights: the others never read packed weights

Advise = Callable[[str], None]
"""Told, once for each load, how the model could be faster here."""


def load(
    name_or_path: str | Path | None = None,
    *,
    progress: Progress | None = None,
    announce: Announce | None = None,
    advise: Advise | None = None,
    **settings: Any,
) -> Runner:
    """Load a model by name, hub id, Hugging Face folder or GGUF file; without one, the default model.

    A known name or hub id that is not on this machine is fetched first; `announce` is told before what will be fetched, and
    may raise to prevent it. `advise` is told if the model could be faster here; if it is not given, a warning is logged.
    `cache=False` runs without reuse.
    """
    chosen = load_settings(settings)
    return load_files(find_model(str(name_or_path or chosen.model), chosen, progress, announce), chosen, progress, advise)


def load_files(
    files: ModelFiles, chosen: Settings, progress: Progress | None = None, advise: Advise | None = None
) -> Runner:
    """Load a model that is on this machine."""
    files = models.convert_if_needed(files, chosen, gguf_support(chosen), progress)
    engine = make_engine(files, chosen, progress)
    if advice := find_advice(files, engine, chosen):
        (advise or _log_advice)(advice)
    tokenizer = load_tokenizer(files, chosen.trust_remote_code)
    return Runner(engine, tokenizer, chosen, files, open_tiers(engine, files, chosen, progress))


def find_model(
    name: str, settings: Settings, progress: Progress | None = None, announce: Announce | None = None
) -> ModelFiles:
    """The files of a model. A known name or hub id that is not on this machine is fetched first."""
    gguf = gguf_support(settings)
    _note_overlay(name, settings)
    try:
        return models.resolve(name, settings, gguf, progress)
    except ModelNotFound:
        if not models.can_pull(name) or Path(name).is_dir():  # a folder without a model is no name on the hub
            raise
        return models.pull(name, settings, gguf, progress, announce)


def _note_overlay(name: str, settings: Settings) -> None:
    """Say that what a created model adds is not used here: only a server reads it."""
    try:
        alias = models.Store(settings.models_folder).find_alias(name)
    except ModelNotFound:
        return  # a path
    if alias is not None and not alias.overlay.is_empty:
        log.warning("%s runs as %s: only a server uses its own system prompt and parameters", alias.name, alias.target)


def gguf_support(settings: Settings) -> GgufSupport:
    """What can be done here with GGUF files, for the engine that the settings ask for. Imports no engine."""
    try:
        engine = choose_engine(settings)
    except UnsupportedModel as error:  # fetching safetensors needs no engine: only a GGUF file raises this
        return GgufSupport(False, False, str(error))
    may_pack = settings.weights in _MAY_BE_PACKED
    return GgufSupport(is_readable=engine == "mlx", is_convertible="torch" in find_installed(), may_pack=may_pack)


def find_advice(files: ModelFiles, engine: Engine, settings: Settings) -> str:
    """How a loaded model could be faster on this machine, in a sentence; "" if nothing is known.

    Only about what a user can change and did not choose: kernels that are missing, and a model that was converted without
    its packed weights.
    """
    info = engine.info
    if not (info.name == "torch" and info.is_on_cpu and info.dtype == "float32" and settings.weights == "auto"):
        return ""
    try:
        load_kernels()
    except KernelsMissing as missing:
        slow = f"{files.name} runs in float32 without kernels for this CPU, several times slower than with them"
        return f"{slow} ({missing.reason})" + (f": {missing.todo}" if missing.todo else "")
    return models.why_not_packed(files)


def _log_advice(advice: str) -> None:
    log.warning("%s", advice)


def describe_kernels() -> str:
    """The instruction set for which there are CPU kernels, and what keeps them from a better one. Imports no engine.

    Raises KernelsMissing if there are none.
    """
    title, why = load_kernels().title, explain_missing_isa()
    return f"{title} ({why})" if why else title


def make_engine(files: ModelFiles, settings: Settings, progress: Progress | None = None) -> Engine:
    """The engine that the settings ask for, with the model loaded. Damaged files are found before the engine reads them."""
    engine = _import_engine(settings)
    models.check_weights(files)
    if engine.uses_packed(settings):
        _check_packed(files, settings, progress)
    if progress is None:
        return engine.load(files.folder, settings)
    try:
        return engine.load(files.folder, settings, lambda text: progress.start(text, None))
    finally:
        progress.finish()


def _check_packed(files: ModelFiles, settings: Settings, progress: Progress | None) -> None:
    """Find damaged packed weights, and those that the user asked for and that are not there, before the engine starts."""
    packed = models.check_packed(files, settings, progress)
    why_not = models.why_not_packed(files) if packed is None and settings.weights == "packed" else ""
    if why_not:
        raise SettingsError(f"weights is 'packed', and {why_not}")


def load_shape(config: dict[str, Any], **settings: Any) -> Runner:
    """Make a model with random weights from a transformers configuration, for benchmarks without real weights."""
    chosen = load_settings(settings)
    engine = make_shape(config, chosen)
    return Runner(engine, Tokenizer(None), chosen, tiers=open_tiers(engine, None, chosen))


def make_shape(config: dict[str, Any], settings: Settings) -> Engine:
    """The engine of a model with random weights, as `load_shape` makes it."""
    return _import_engine(settings).load_shape(config, settings)


def _import_engine(settings: Settings) -> EngineMaker:
    """Import the class of the engine that the settings ask for."""
    name = choose_engine(settings)
    limit_thread_spinning()
    try:
        if name == "mlx":
            from bough.engines.mlx import MlxEngine

            return MlxEngine
        with without_gc():  # imports make many objects that all stay
            from bough.engines.torch import TorchEngine

        return TorchEngine
    except ImportError as error:  # a package that is installed but broken; errors of our own modules are raised as they are
        if (error.name or "").startswith("bough"):
            raise
        raise UnsupportedModel(f"the engine {name} cannot be used: {error}; {install_command(name)}") from error
