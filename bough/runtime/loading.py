"""From a name and settings to a runtime: finds the files, chooses the engine and loads the model.

Models that generate text have a `Runtime`, encoders (embedders and rerankers) an `EncoderRuntime`. This is the only module
that imports an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bough import models
from bough.config import Settings, limit_thread_spinning, load_settings
from bough.engines.choice import choose_engine, find_installed
from bough.engines.contract import EncoderEngine, Engine, EngineMaker, ReportProgress
from bough.engines.torch.cpu.library import explain_missing_isa, load_kernels
from bough.errors import KernelsMissing, ModelNotFound, SettingsError, UnsupportedModel
from bough.models import Announce
from bough.models.encoders.files import EmbedderFiles, RerankerFiles, read_embedder, read_reranker
from bough.models.encoders.kinds import ModelKind, find_kind
from bough.models.encoders.tokenizer import load_encoder_tokenizer
from bough.models.files import ModelFiles
from bough.models.sources import GgufSupport
from bough.models.tokenizer import Tokenizer, load_tokenizer
from bough.runtime.encoder_runtime import EncoderRuntime
from bough.runtime.runtime import Runtime
from bough.runtime.tiers import open_tiers
from bough.scheduling.worker import Limits
from bough.system.distribution import install_command
from bough.system.processes import without_gc
from bough.system.tested_versions import find_untested
from bough.types import Progress

log = logging.getLogger(__name__)

_MAY_BE_PACKED = ("auto", "packed")  # of the setting weights: the others never read packed weights

Advise = Callable[[str], None]
"""Called at each load with what the user should know: no reuse, untested libraries, how the model could be faster here."""

_LIBRARIES = {"torch": ("torch", "transformers"), "mlx": ("mlx", "mlx-lm")}


def load_runtime(
    files: ModelFiles,
    settings: Settings,
    progress: Progress | None = None,
    advise: Advise | None = None,
    limits: Limits | None = None,
) -> Runtime:
    """Load a model that generates text and is on this machine. Raises UnsupportedModel for encoders.

    `advise` is called with what the user should know about it; without `advise`, that is logged.
    """
    files = models.convert_if_needed(files, settings, gguf_support(settings), progress)
    engine = make_engine(files, settings, progress)
    for line in (*find_limits(files, engine, settings), find_advice(files, engine, settings)):
        if line:
            (advise or _log_advice)(line)
    tokenizer = load_tokenizer(files, settings.trust_remote_code)
    return Runtime(engine, tokenizer, settings, files, open_tiers(engine, files, settings, progress), limits)


def load_encoder(
    files: ModelFiles, settings: Settings, progress: Progress | None = None, limits: Limits | None = None
) -> EncoderRuntime:
    """Load an encoder that is on this machine: an embedder or a reranker. Raises UnsupportedModel for other models."""
    kind = find_kind(files)
    if kind is ModelKind.GENERATOR:
        raise UnsupportedModel(f"the model {files.name} {kind.value}, and is no encoder")
    models.check_weights(files)
    description = read_embedder(files) if kind is ModelKind.EMBEDDER else read_reranker(files)
    with _reporting(progress) as report:
        engine = _load_encoder_engine(files, description, settings, report)
    tokenizer = load_encoder_tokenizer(
        files, description.text, engine.context_tokens, engine.vocab_size, settings.trust_remote_code
    )
    return EncoderRuntime(kind, engine, tokenizer, settings, files, limits)


def load_any(
    files: ModelFiles,
    settings: Settings,
    progress: Progress | None = None,
    advise: Advise | None = None,
    limits: Limits | None = None,
) -> Runtime | EncoderRuntime:
    """Load a model that is on this machine, whatever it does."""
    if find_kind(files) is ModelKind.GENERATOR:
        return load_runtime(files, settings, progress, advise, limits)
    return load_encoder(files, settings, progress, limits)


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


def find_limits(files: ModelFiles, engine: Engine, settings: Settings) -> list[str]:
    """What a loaded model cannot do here, and why: libraries in untested versions, and no reuse although it is wanted."""
    can, found = engine.capabilities, []
    if untested := find_untested(*_LIBRARIES.get(engine.info.name, ())):
        found.append(f"{files.name} runs on {' and '.join(untested)}; what the self-check found right is used")
    if settings.cache and not can.can_reuse:
        found.append(f"{files.name} runs without reuse: every prompt is computed whole, because {can.reason}")
    return found


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
    _require_generator(files)
    engine = _import_engine(settings)
    models.check_weights(files)
    if engine.uses_packed(settings):
        _check_packed(files, settings, progress)
    with _reporting(progress) as report:
        return engine.load(files.folder, settings, report)


def _require_generator(files: ModelFiles) -> None:
    kind = find_kind(files)
    if kind is not ModelKind.GENERATOR:
        raise UnsupportedModel(f"the model {files.name} {kind.value}, and generates no text")


@contextmanager
def _reporting(progress: Progress | None) -> Iterator[ReportProgress | None]:
    """What an engine calls at each stage of a load; None if nobody is to be told."""
    if progress is None:
        yield None
        return
    try:
        yield lambda text: progress.start(text, None)
    finally:
        progress.finish()


def _check_packed(files: ModelFiles, settings: Settings, progress: Progress | None) -> None:
    """Find damaged packed weights, and those that the user asked for and that are not there, before the engine starts."""
    packed = models.check_packed(files, settings, progress)
    why_not = models.why_not_packed(files) if packed is None and settings.weights == "packed" else ""
    if why_not:
        raise SettingsError(f"weights is 'packed', and {why_not}")


def load_shape(config: dict[str, Any], **settings: Any) -> Runtime:
    """Make a model with random weights from a transformers configuration, for benchmarks without real weights."""
    chosen = load_settings(settings)
    engine = make_shape(config, chosen)
    return Runtime(engine, Tokenizer(None), chosen, tiers=open_tiers(engine, None, chosen))


def make_shape(config: dict[str, Any], settings: Settings) -> Engine:
    """The engine of a model with random weights, as `load_shape` makes it."""
    return _import_engine(settings).load_shape(config, settings)


def _import_engine(settings: Settings) -> EngineMaker:
    """Import the class of the engine that the settings ask for."""
    name = choose_engine(settings)
    limit_thread_spinning()
    with _importing(name):
        if name == "mlx":
            from bough.engines.mlx import MlxEngine

            return MlxEngine
        with without_gc():  # imports make many objects that all stay
            from bough.engines.torch import TorchEngine

        return TorchEngine


def _load_encoder_engine(
    files: ModelFiles, description: EmbedderFiles | RerankerFiles, settings: Settings, report: ReportProgress | None
) -> EncoderEngine:
    """The encoder on torch, the only engine that runs encoders. Raises UnsupportedModel if it cannot be used here."""
    if settings.engine not in ("auto", "torch") or "torch" not in find_installed():
        why = f"the setting engine is {settings.engine!r}" if settings.engine == "mlx" else "torch is not installed"
        raise UnsupportedModel(f"the encoder {files.name} needs the engine torch, and {why}: {install_command('torch')}")
    limit_thread_spinning()
    with _importing("torch"), without_gc():
        import transformers  # noqa: F401  # before torch, whose library another thread may be loading

        from bough.engines.torch.encoders import TorchEncoder
    return TorchEncoder.load(files.folder, description, settings, report)


@contextmanager
def _importing(name: str) -> Iterator[None]:
    """Translate the error of a package that is installed but broken. Errors of our own modules are raised as they are."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("bough"):
            raise
        raise UnsupportedModel(f"the engine {name} cannot be used: {error}; {install_command(name)}") from error
