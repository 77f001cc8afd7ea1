"""From a name and settings to a runtime: finds the files, chooses the engine and loads the model.

This is the only module that imports an engine.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bough import models
from bough.config import Settings, limit_thread_spinning, load_settings
from bough.engines.choice import choose_engine, find_installed
from bough.engines.contract import EncoderEngine, Engine, EngineMaker, ReportProgress
from bough.engines.shared.engine import check_context
from bough.engines.torch.cpu.library import TYPES, explain_missing_isa, load_kernels
from bough.errors import KernelsMissing, ModelNotFound, UnsupportedModel
from bough.models import Announce
from bough.models.encoders.files import EmbedderFiles, ModelKind, RerankerFiles, find_kind, read_embedder, read_reranker
from bough.models.encoders.tokenizer import load_encoder_tokenizer
from bough.models.files import ModelFiles
from bough.models.sources import GgufSupport
from bough.models.tokenizer import Tokenizer, load_tokenizer
from bough.models.weights.packed import PackedFile, read_packed
from bough.runtime.embedding import EncoderRuntime
from bough.runtime.runtime import Runtime
from bough.runtime.tiers import open_tiers
from bough.scheduling.worker import Limits
from bough.system.distribution import find_untested, install_command
from bough.system.processes import without_gc
from bough.system.resources import may_have_gpu
from bough.types import Progress

log = logging.getLogger(__name__)

Advise = Callable[[str], None]
"""Called at each load with advice: no reuse, untested libraries, how the model could be faster here."""

_HALF_TYPES = ("bfloat16", "float16")
_LIBRARIES = {"torch": ("torch", "transformers"), "mlx": ("mlx", "mlx-lm")}


def load_runtime(
    files: ModelFiles,
    settings: Settings,
    progress: Progress | None = None,
    advise: Advise | None = None,
    limits: Limits | None = None,
) -> Runtime:
    """Load a model that generates text. Without `advise`, advice is logged. Raises UnsupportedModel for encoders."""
    files = models.convert_if_needed(files, settings, gguf_support(settings), progress)
    engine = make_engine(files, settings, progress)
    for line in (*find_limits(files, engine, settings), find_advice(files, engine, settings)):
        if line:
            (advise or partial(log.warning, "%s"))(line)
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
    """Log that the overlay of a created model is not used here: only a server reads it."""
    try:
        alias = models.ModelFolder(settings.models_folder).find_alias(name)
    except ModelNotFound:
        return  # a path
    if alias is not None and not alias.overlay.is_empty:
        log.warning("%s runs as %s: only a server uses its own system prompt and parameters", alias.name, alias.target)


def gguf_support(settings: Settings) -> GgufSupport:
    """What the engine of the settings can do with GGUF files. Imports torch only where there may be a GPU for it."""
    try:
        engine = choose_engine(settings)
    except UnsupportedModel as error:  # fetching safetensors needs no engine: only a GGUF file raises this
        return GgufSupport(False, False, str(error))
    keeps_quantized = engine == "torch" and _keeps_quantized(settings)
    return GgufSupport(engine == "mlx", "torch" in find_installed(), is_preferred=keeps_quantized)


def _keeps_quantized(settings: Settings) -> bool:
    """Whether torch would compute with the weights of a GGUF file as they are: on a CPU for which there are kernels."""
    if settings.weights == "float32" or settings.dtype not in ("auto", "float32"):
        return False
    if settings.device == "auto" and (may_have_gpu() or sys.platform == "darwin"):
        from bough.engines.torch.device import choose_device

        is_on_cpu = choose_device("auto").type == "cpu"
    else:
        is_on_cpu = settings.device in ("auto", "cpu")
    try:
        return is_on_cpu and bool(load_kernels())
    except KernelsMissing:
        return False


def find_limits(files: ModelFiles, engine: Engine, settings: Settings) -> list[str]:
    """Warnings about a loaded model: libraries in untested versions, and no reuse although it is wanted."""
    can, found = engine.capabilities, []
    if untested := find_untested(*_LIBRARIES.get(engine.info.name, ())):
        found.append(f"{files.name} runs on {' and '.join(untested)}; what the self-check found right is used")
    if settings.cache and not can.can_reuse:
        found.append(f"{files.name} runs without reuse: every prompt is computed whole, because {can.reason}")
    return found


def find_advice(files: ModelFiles, engine: Engine, settings: Settings) -> str:
    """How a loaded model could be faster on this machine, in a sentence; "" if nothing is known.

    It names only what a user can change and did not choose: missing kernels.
    """
    info = engine.info
    if not (info.name == "torch" and info.is_on_cpu and info.dtype == "float32" and settings.weights == "auto"):
        return ""
    try:
        load_kernels()
    except KernelsMissing as missing:
        slow = f"{files.name} runs in float32 without kernels for this CPU, several times slower than with them"
        return f"{slow} ({missing.reason})" + (f": {missing.todo}" if missing.todo else "")
    return ""


def describe_kernels() -> str:
    """The instruction set of the CPU kernels, and why no better one. Imports no engine. Raises KernelsMissing."""
    title, why = load_kernels().title, explain_missing_isa()
    return f"{title} ({why})" if why else title


def make_engine(files: ModelFiles, settings: Settings, progress: Progress | None = None) -> Engine:
    """Load a model into the engine of the settings. Damaged files, and a context that the model does not have, are found
    before anything is loaded.
    """
    kind = find_kind(files)
    if kind is not ModelKind.GENERATOR:
        raise UnsupportedModel(f"the model {files.name} {kind.value}, and generates no text")
    config = files.config | (files.config.get("text_config") or {})
    check_context(int(config.get("max_position_embeddings") or 0), settings)
    engine = _import_engine(settings)
    models.check_weights(files)
    models.check_packed(files, settings, progress)
    with _reporting(progress) as report:
        loaded = engine.load(files.folder, settings, report)
    try:
        models.check_packed(files, settings, progress)  # again, in case its file was replaced while it was read
    except Exception:
        loaded.close()
        raise
    return loaded


@contextmanager
def _reporting(progress: Progress | None) -> Iterator[ReportProgress | None]:
    """The function that an engine calls at each stage of a load; None without `progress`."""
    if progress is None:
        yield None
        return
    try:
        yield lambda text: progress.start(text, None)
    finally:
        progress.finish()


def load_shape(config: dict[str, Any], **settings: Any) -> Runtime:
    """Make a model with random weights from a transformers configuration, for benchmarks."""
    chosen = load_settings(settings)
    engine = make_shape(config, chosen)
    return Runtime(engine, Tokenizer(None), chosen, tiers=open_tiers(engine, None, chosen))


def make_shape(config: dict[str, Any], settings: Settings) -> Engine:
    return _import_engine(settings).load_shape(config, settings)


def _import_engine(settings: Settings) -> EngineMaker:
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
    """Load an encoder on torch, the only engine for encoders. Raises UnsupportedModel if it cannot be used here."""
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


def weights_bytes(files: ModelFiles, settings: Settings, is_on_cpu: bool) -> int:
    """The memory of the weights, estimated from the files. On a CPU without kernels for their types they become float32.

    Raises UnsupportedModel if the table of a GGUF model is damaged.
    """
    is_packed = is_on_cpu and settings.weights in ("auto", "packed") and settings.dtype in ("auto", "float32")
    is_packed = is_packed and _has_kernels()
    becomes_float32 = not is_packed and (settings.dtype == "float32" or (settings.dtype == "auto" and is_on_cpu))
    table = read_packed(files.folder) if files.is_packed else None
    if table is not None:
        return _table_bytes(table, is_packed, 4 if is_packed or becomes_float32 else 2)
    size = sum(file.stat().st_size for file in files.weights)
    kept = files.config.get("dtype") or files.config.get("torch_dtype")
    return 2 * size if kept in _HALF_TYPES and becomes_float32 else size


def _table_bytes(table: PackedFile, is_packed: bool, number_bytes: int) -> int:
    """Weights of types that kernels know keep their size in the file; others take `number_bytes` a number."""
    each_once = {tensor.rows: tensor for tensor in table.tensors.values()}.values()
    return sum(
        tensor.num_rows * tensor.row_bytes if is_packed and tensor.type in TYPES else number_bytes * math.prod(tensor.shape)
        for tensor in each_once
    )


def _has_kernels() -> bool:
    try:
        load_kernels()
    except KernelsMissing:
        return False
    return True
