"""What a folder says about an encoder: how the states of its tokens become one vector, or one score.

sentence-transformers keeps this in small files: `modules.json` lists the steps, and each step that has options or weights
has a folder of its own. A folder without these files has the defaults of that library. A value that we cannot follow raises
UnsupportedModel with the file and the value: a vector is computed as the files say, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.errors import UnsupportedModel
from bough.models.files import ModelFiles, read_json

MODULES_FILE = "modules.json"
MODEL_FILE = "config_sentence_transformers.json"
STEP_WEIGHTS = "model.safetensors"
_TEXT_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_OLD_POOLING = {  # the fields of older files, in the order in which their vectors are joined
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = (
    "ELU",
    "GELU",
    "Hardtanh",
    "Identity",
    "LeakyReLU",
    "LogSigmoid",
    "Mish",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Softsign",
    "Tanh",
)
"""The functions of `torch.nn` that a file may name."""

_VECTOR = "sentence_embedding"
_WITHOUT_EFFECT = ("Dropout",)  # outside of training


@dataclass(frozen=True)
class Pooling:
    """How the states of a text's tokens become one vector. Several modes give vectors that are joined.

    If it does not include the prompt, the tokens of the model's own prompt are left out.
    """

    modes: tuple[str, ...] = ("mean",)
    includes_prompt: bool = True


@dataclass(frozen=True)
class Dense:
    """A linear layer over the vector, then a function of `torch.nn`. Its weights are in `folder`."""

    folder: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: str


@dataclass(frozen=True)
class LayerNorm:
    """A layer norm over the vector. Its weights are in `folder`."""

    folder: Path
    size: int


@dataclass(frozen=True)
class Normalize:
    """The vector is scaled to length 1."""


VectorStep = Dense | LayerNorm | Normalize


@dataclass(frozen=True)
class TextOptions:
    """How a text is tokenized: its largest number of tokens (None: what the tokenizer and the model allow), whether it is
    lowercased, and the prompt that goes before it."""

    max_tokens: int | None = None
    lowercases: bool = False
    prompt: str = ""


@dataclass(frozen=True)
class EmbedderFiles:
    """How an encoder makes vectors. `dimensions` cuts them, if set; `is_default`: the folder does not say how."""

    pooling: Pooling = Pooling()
    steps: tuple[VectorStep, ...] = ()
    text: TextOptions = TextOptions()
    dimensions: int | None = None
    is_default: bool = False


@dataclass(frozen=True)
class RerankerFiles:
    """How an encoder scores a pair of texts: a function of `torch.nn` over its one logit."""

    activation: str = "Sigmoid"
    text: TextOptions = TextOptions()


def read_embedder(files: ModelFiles) -> EmbedderFiles:
    """What the folder says about its vectors. Raises UnsupportedModel."""
    modules = read_modules(files)
    text = _read_text(files, "feature-extraction", "last_hidden_state")
    if not modules:
        return EmbedderFiles(text=text, is_default=True)
    first, *others = modules
    pools, steps = others[:1], others[1:]
    if first.kind != "Transformer" or not pools or pools[0].kind != "Pooling":
        kinds = ", ".join(each.kind for each in modules)
        raise UnsupportedModel(
            f"{files.folder / MODULES_FILE} has the modules {kinds}, and must begin with Transformer, Pooling"
        )
    return EmbedderFiles(
        _read_pooling(pools[0].folder / "config.json"),
        tuple(_read_step(step, files) for step in steps if step.kind not in _WITHOUT_EFFECT),
        text,
        _read_dimensions(files),
    )


def read_reranker(files: ModelFiles) -> RerankerFiles:
    """What the folder says about its scores. Raises UnsupportedModel."""
    modules = read_modules(files)
    if [each.kind for each in modules] not in ([], ["Transformer"]):
        kinds = ", ".join(each.kind for each in modules)
        raise UnsupportedModel(f"{files.folder / MODULES_FILE} has the modules {kinds}; rerankers of Transformer alone run")
    text = _read_text(files, "sequence-classification", "logits")
    if text.prompt:
        raise UnsupportedModel(f"{files.folder / MODEL_FILE} has the prompt {text.prompt!r}; rerankers with none run")
    return RerankerFiles(_read_score_activation(files), text)


@dataclass(frozen=True)
class Module:
    """An entry of `modules.json`: the name of its class, and its folder."""

    kind: str
    folder: Path


def read_modules(files: ModelFiles) -> list[Module]:
    """The steps that `modules.json` lists; none if there is no such file. Raises UnsupportedModel."""
    file = files.folder / MODULES_FILE
    if not file.is_file():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"cannot read {file}: {error}") from error
    if not isinstance(found, list) or not found:
        raise UnsupportedModel(f"{file} holds {type(found).__name__}, and must hold a list of modules")
    return [_read_module(file, each) for each in found]


def _read_module(file: Path, entry: Any) -> Module:
    fields = entry if isinstance(entry, dict) else {}
    kind, path = fields.get("type"), fields.get("path")
    if not isinstance(kind, str) or not isinstance(path, str):
        raise UnsupportedModel(f"{file} has the module {entry!r}, and each must have a type and a path")
    package, _, name = kind.rpartition(".")
    if package.partition(".")[0] != "sentence_transformers":
        raise UnsupportedModel(f"{file} has a module of the type {kind}: code that comes with a model is not run")
    folder = (file.parent / path).resolve()
    if not folder.is_relative_to(file.parent.resolve()) or (name == "Transformer" and path not in ("", ".")):
        raise UnsupportedModel(f"{file} has the path {path!r} for {name}, which cannot be followed")
    return Module(name, folder)


def _read_pooling(file: Path) -> Pooling:
    config = read_json(file)
    found = config.get("pooling_mode")
    if found is None:
        found = [mode for field, mode in _OLD_POOLING.items() if config.get(field)] or ["mean"]
    modes = [found] if isinstance(found, str) else found
    if not isinstance(modes, list) or not modes or any(mode not in POOLING_MODES for mode in modes):
        raise UnsupportedModel(f"{file} has the pooling_mode {found!r}, and the modes are {', '.join(POOLING_MODES)}")
    return Pooling(tuple(modes), _read_flag(file, config, "include_prompt", True))


def _read_step(module: Module, files: ModelFiles) -> VectorStep:
    file = module.folder / "config.json"
    if module.kind not in ("Dense", "LayerNorm", "Normalize"):
        raise UnsupportedModel(f"{files.folder / MODULES_FILE} has the module {module.kind}, which cannot be computed")
    config = read_json(file) if module.kind != "Normalize" or file.is_file() else {}
    for field in ("module_input_name", "module_output_name"):
        if config.get(field) not in (None, _VECTOR):
            raise UnsupportedModel(f"{file} has the {field} {config[field]!r}, and only {_VECTOR!r} can be computed")
    if module.kind == "Normalize":
        return Normalize()
    _require_step_weights(module.folder)
    if module.kind == "LayerNorm":
        return LayerNorm(module.folder, _read_size(file, config, "dimension"))
    if config.get("use_residual"):
        raise UnsupportedModel(f"{file} has the use_residual {config['use_residual']!r}, which cannot be computed")
    return Dense(
        module.folder,
        _read_size(file, config, "in_features"),
        _read_size(file, config, "out_features"),
        _read_flag(file, config, "bias", True),
        _read_activation(file, config.get("activation_function", "torch.nn.modules.activation.Tanh")),
    )


def _require_step_weights(folder: Path) -> None:
    if (folder / STEP_WEIGHTS).is_file():
        return
    has_pickle = (folder / "pytorch_model.bin").is_file()
    reason = "it has pytorch_model.bin, and pickles are never loaded" if has_pickle else f"it has no {STEP_WEIGHTS}"
    raise UnsupportedModel(f"no safetensors weights in {folder}: {reason}")


def _read_activation(file: Path, name: Any) -> str:
    """The name of a class of `torch.nn`, from its full path."""
    package, _, plain = str(name).rpartition(".")
    if not (package == "torch.nn" or package.startswith("torch.nn.modules")) or plain not in ACTIVATIONS:
        raise UnsupportedModel(f"{file} has the activation {name!r}; those of torch.nn that run: {', '.join(ACTIVATIONS)}")
    return plain


def _read_score_activation(files: ModelFiles) -> str:
    """The function over the score: what the files say, or else the one that sentence-transformers takes for one label."""
    ours, config = _read_optional(files.folder / MODEL_FILE), files.config
    nested = config.get("sentence_transformers")
    inner: Mapping[str, Any] = nested if isinstance(nested, dict) else {}
    said = [
        (files.folder / MODEL_FILE, ours.get("activation_fn")),
        (files.folder / "config.json", inner.get("activation_fn")),
        (files.folder / "config.json", config.get("sbert_ce_default_activation_function")),
    ]
    return next((_read_activation(file, name) for file, name in said if name is not None), "Sigmoid")


def _read_text(files: ModelFiles, task: str, output: str) -> TextOptions:
    file = next((files.folder / name for name in _TEXT_FILES if (files.folder / name).is_file()), None)
    config = read_json(file) if file else {}
    if file:
        _require_plain(file, config, task, output)
        lowercases = _read_flag(file, config, "do_lower_case", False)
        has_limit = config.get("max_seq_length") is not None
        max_tokens = _read_size(file, config, "max_seq_length") if has_limit else None
        return TextOptions(max_tokens, lowercases, _read_prompt(files))
    return TextOptions(prompt=_read_prompt(files))


def _require_plain(file: Path, config: Mapping[str, Any], task: str, output: str) -> None:
    """Raise UnsupportedModel if newer fields ask for another task, another output, or options for the tokenizer."""
    modalities = config.get("modality_config")
    text = modalities.get("text", {}) if isinstance(modalities, dict) else {"method_output_name": output}
    said = text.get("method_output_name") if isinstance(text, dict) else text
    wanted: Sequence[tuple[str, Any, Any]] = (
        ("transformer_task", config.get("transformer_task") or task, task),
        ("modality_config for text", [said] if isinstance(said, str) else said, [output]),
        ("processing_kwargs", config.get("processing_kwargs") or {}, {}),
    )
    for name, found, must in wanted:
        if found != must:
            raise UnsupportedModel(f"{file} has the {name} {found!r}, and only {must!r} can be computed")


def _read_prompt(files: ModelFiles) -> str:
    """The prompt that sentence-transformers puts before a text if none is asked for."""
    file = files.folder / MODEL_FILE
    config = _read_optional(file)
    name = config.get("default_prompt_name")
    if name is None:
        return ""
    prompts = config.get("prompts")
    found = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(found, str):
        raise UnsupportedModel(f"{file} has the default_prompt_name {name!r}, and no prompt of that name")
    return found


def _read_dimensions(files: ModelFiles) -> int | None:
    file = files.folder / MODEL_FILE
    config = _read_optional(file)
    return None if config.get("truncate_dim") is None else _read_size(file, config, "truncate_dim")


def _read_optional(file: Path) -> Mapping[str, Any]:
    return read_json(file) if file.is_file() else {}


def _read_size(file: Path, config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"{file} has the {field} {value!r}, and it must be a whole number of at least 1")
    return value


def _read_flag(file: Path, config: Mapping[str, Any], field: str, default: bool) -> bool:
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise UnsupportedModel(f"{file} has the {field} {value!r}, and it must be true or false")
    return value
