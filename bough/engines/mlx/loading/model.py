"""From a folder to a model that is ready to run, by mlx-lm's own loading.

A weight that no file holds, or that the model has no place for, is an error: a model never runs with random weights. Only
safetensors and GGUF files are read, never a pickle. Everything that leaves this module is evaluated: other arrays can only
be used in the thread that made them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from transformers import AutoConfig

from bough.config import Settings
from bough.engines.contract import ReportProgress
from bough.engines.mlx.device import choose_dtype, use_device
from bough.engines.mlx.library import VERSION, utils
from bough.engines.mlx.loading import gguf
from bough.engines.mlx.loading.config import TranslatedConfig, translate
from bough.engines.mlx.loading.families import model_classes
from bough.engines.shared.model_folder import hint_at_code, list_weight_files, require_config, require_suffixes
from bough.errors import ModelError, UnsupportedModel
from bough.models.weights.check import read_shapes

_ABOUT_WEIGHTS = ("Missing", "Received", "Expected shape")  # how the messages of mlx about weights begin


@dataclass(frozen=True)
class MlxModel:
    """A model for inference, its configuration as mlx-lm reads it, and warnings about how the model differs from it."""

    model: Any
    config: dict[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> dict[str, Any]:
        """The configuration of the language model, where the model has other parts too."""
        text: dict[str, Any] = self.config.get("text_config") or {}
        return self.config | text


def load_model(folder: Path, settings: Settings, progress: ReportProgress | None = None) -> MlxModel:
    """The causal language model in `folder`, on the device and in the type that the settings ask for.

    The device becomes MLX's default one, for the whole process. `settings.threads` has no effect: MLX has no such setting.
    """
    use_device(settings.device)
    translated = _read_config(folder)
    files = _weight_files(folder)
    if progress:
        progress("reading weights")
    with _as_model_errors(folder, settings.trust_remote_code):
        if files[0].suffix == ".gguf":
            model, config = gguf.load(files[0], translated.config)
        else:
            model, config = utils.load_model(
                folder,
                lazy=True,
                strict=True,
                model_config=translated.config,
                get_model_classes=model_classes,
                trust_remote_code=settings.trust_remote_code,
            )
        prepare(model, settings)
    return MlxModel(model, config, translated.warnings)


def make_random_model(config: dict[str, Any], settings: Settings) -> MlxModel:
    """A model of this transformers configuration; the same random weights every time.

    `bough bench --shape` measures sizes with it that would take long to download.
    """
    use_device(settings.device)
    shape = json.loads(AutoConfig.for_model(**config).to_json_string(use_diff=False))
    translated = translate(shape)
    model_class, arguments = model_classes(translated.config)
    mx.random.seed(0)
    model = model_class(arguments.from_dict(translated.config))
    prepare(model, settings)
    return MlxModel(model, translated.config, translated.warnings)


def prepare(model: Any, settings: Settings) -> None:
    """Put the model into the type that the settings ask for, for inference only, and evaluate it."""
    dtype = choose_dtype(settings.dtype, main_type(model), mx.default_device() == mx.gpu)
    may_cast = getattr(model, "cast_predicate", lambda path: True)  # some weights keep their type in every model

    def cast(path: str, weight: mx.array) -> mx.array:
        is_meant = mx.issubdtype(weight.dtype, mx.floating) and may_cast(path)
        return weight.astype(dtype) if is_meant else weight

    model.update(tree_map_with_path(cast, model.parameters()))
    model.eval()
    mx.eval(model.state)


def main_type(model: Any) -> mx.Dtype:
    """The floating type of most of the weights; of quantized ones, of their scales."""
    sizes: Counter[mx.Dtype] = Counter()
    for weight in weights_of(model).values():
        if mx.issubdtype(weight.dtype, mx.floating):
            sizes[weight.dtype] += weight.size
    return max(sizes, key=sizes.__getitem__, default=mx.float32)


def weights_of(model: Any) -> dict[str, mx.array]:
    found: Any = tree_flatten(model.parameters())
    return dict(found)


def _read_config(folder: Path) -> TranslatedConfig:
    """The configuration for a model that mlx-lm, or the folder's own code, has."""
    require_config(folder)
    try:
        translated = translate(utils.load_config(folder))
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise UnsupportedModel(f"cannot read the configuration in {folder}: {type(error).__name__}: {error}") from error
    config = translated.config
    try:
        if not config.get("model_file"):
            model_classes(config)
    except (LookupError, ValueError, SystemExit) as error:  # one family of mlx-lm exits if a package is missing
        raise UnsupportedModel(f"mlx-lm {VERSION} has no model of type {config.get('model_type')!r}") from error
    return translated


@contextmanager
def _as_model_errors(folder: Path, trust_remote_code: bool) -> Iterator[None]:
    """Raise ModelError for every error of mlx-lm, MLX and a family's code."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if text.startswith(_ABOUT_WEIGHTS):
            raise ModelError(f"the weights in {folder} do not fill the model: {text}") from error
        hint = hint_at_code(folder, trust_remote_code)
        raise UnsupportedModel(f"mlx-lm {VERSION} cannot load the model in {folder}: {text}{hint}") from error


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the model, each with a header that can be read; else a GGUF file. Raises ModelError."""
    found = list_weight_files(folder) or sorted(folder.glob("*.gguf"))
    files = require_suffixes(folder, found, ".safetensors", ".gguf")
    if files[0].suffix == ".gguf" and len(files) > 1:
        raise UnsupportedModel(f"{folder} holds {len(files)} GGUF files, and must hold one model")
    for file in files:
        if file.suffix == ".safetensors":
            read_shapes(file)
    return files
