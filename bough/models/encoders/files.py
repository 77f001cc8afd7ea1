"""Reads a model's kind from its folder, and how an encoder turns token states into one vector or one score.

sentence-transformers keeps this in small files: `modules.json` lists the steps, and a step with options or weights has its
own folder. A folder without these files has the defaults of that library. A value that cannot be followed raises
UnsupportedModel with the file and the value: a vector is computed as the files say, or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from bough.errors import UnsupportedModel
from bough.models.files import CONFIG_FILE, ModelFiles, read_json

MODULES_FILE = "modules.json"
MODEL_FILE = "config_sentence_transformers.json"
STEP_WEIGHTS = "model.safetensors"
_TEXT_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

_POOLING_FLAGS = {  # by mode, the flag in older files; their vectors are joined in this order
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}

_ACTIVATIONS = (
    "ELU, GELU, Hardtanh, Identity, LeakyReLU, LogSigmoid, Mish, ReLU, ReLU6, SiLU, Sigmoid, Softplus, Softsign, Tanh"
)
"""The functions of `torch.nn` that a file may name."""

_ENCODER_TYPES = re.compile(
    "albert|bert|big_bird|camembert|canine|convbert|data2vec-text|deberta|deberta-v2|distilbert|electra|ernie|esm|esmc|"
    "eurobert|flaubert|fnet|funnel|gte|ibert|jina_embeddings_v3|layoutlm|longformer|luke|markuplm|megatron-bert|mobilebert|"
    "modernbert|mpnet|mra|nomic_bert|nystromformer|rembert|roberta|roberta-prelayernorm|roc_bert|roformer|splinter|"
    "squeezebert|ultrabert|xlm|xlm-roberta|xlm-roberta-xl|xmod|yoso"
)
"""The values of `model_type` of encoders, which cannot generate text."""

_CAUSAL_ENDS = ("ForCausalLM", "LMHeadModel")
_VECTOR = "sentence_embedding"
_WITHOUT_EFFECT = ("Dropout",)  # outside of training


class ModelKind(Enum):
    """The purpose of a model. The value is shown to people."""

    GENERATOR = "generates text"
    EMBEDDER = "makes embeddings"
    RERANKER = "scores pairs of texts"


_SAVED_KINDS = {"SentenceTransformer": ModelKind.EMBEDDER, "CrossEncoder": ModelKind.RERANKER}


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
class TokenizerOptions:
    """How a text is tokenized: its largest number of tokens (None: what the tokenizer and the model allow), whether it is
    lowercased, and the prompt before it."""

    max_tokens: int | None = None
    lowercases: bool = False
    prompt: str = ""


@dataclass(frozen=True)
class EmbedderFiles:
    """How an encoder makes vectors. `dimensions` cuts them, if set; `is_default`: the folder does not say how."""

    pooling: Pooling = Pooling()
    steps: tuple[VectorStep, ...] = ()
    text: TokenizerOptions = TokenizerOptions()
    dimensions: int | None = None
    is_default: bool = False


@dataclass(frozen=True)
class RerankerFiles:
    """How an encoder scores a pair of texts: a function of `torch.nn` over its one logit."""

    activation: str = "Sigmoid"
    text: TokenizerOptions = TokenizerOptions()


@dataclass(frozen=True)
class _Options:
    """The fields of one JSON file. Reading a field of a wrong type raises UnsupportedModel with the file and the value."""

    file: Path
    fields: Mapping[str, Any]

    def get(self, field: str) -> Any:
        return self.fields.get(field)

    def read_size(self, field: str) -> int:
        value = self.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModel(f"{self.file} has the {field} {value!r}, and it must be a whole number of at least 1")
        return value

    def read_optional_size(self, field: str) -> int | None:
        return None if self.get(field) is None else self.read_size(field)

    def read_flag(self, field: str, default: bool) -> bool:
        value = self.fields.get(field, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{self.file} has the {field} {value!r}, and it must be true or false")
        return value


def _read_options(file: Path) -> _Options:
    return _Options(file, read_json(file))


def _read_model_options(files: ModelFiles) -> _Options:
    """The options for the whole model; none if the file is missing."""
    file = files.folder / MODEL_FILE
    return _Options(file, read_json(file) if file.is_file() else {})


def find_kind(files: ModelFiles) -> ModelKind:
    """The purpose of a model, by its files. Raises UnsupportedModel if they are damaged or name a kind that cannot run."""
    if files.is_gguf:
        return ModelKind.GENERATOR  # other GGUF files are refused before they have a folder
    if (files.folder / MODULES_FILE).is_file():
        options = _read_model_options(files)
        saved = options.fields.get("model_type", "SentenceTransformer")
        if saved not in _SAVED_KINDS:
            raise UnsupportedModel(
                f"{options.file} has the model_type {saved!r}, and the kinds that run are {', '.join(_SAVED_KINDS)}"
            )
        return _SAVED_KINDS[saved]
    architecture = str((files.config.get("architectures") or [""])[0])
    if architecture.endswith("ForSequenceClassification"):
        return ModelKind.RERANKER
    if architecture.endswith(_CAUSAL_ENDS):
        return ModelKind.GENERATOR
    is_encoder = architecture.endswith(("ForMaskedLM", "EncoderModel"))
    if is_encoder or _ENCODER_TYPES.fullmatch(str(files.config.get("model_type"))):
        return ModelKind.EMBEDDER
    return ModelKind.GENERATOR


def read_embedder(files: ModelFiles) -> EmbedderFiles:
    """Read how the folder's model makes vectors. Raises UnsupportedModel."""
    modules = _read_modules(files)
    text = _read_text(files, "feature-extraction", "last_hidden_state")
    if not modules:
        return EmbedderFiles(text=text, is_default=True)
    kinds = [each.kind for each in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise UnsupportedModel(
            f"{files.folder / MODULES_FILE} has the modules {', '.join(kinds)}, and must begin with Transformer, Pooling"
        )
    return EmbedderFiles(
        _read_pooling(_read_options(modules[1].folder / CONFIG_FILE)),
        tuple(_read_step(step, files) for step in modules[2:] if step.kind not in _WITHOUT_EFFECT),
        text,
        _read_model_options(files).read_optional_size("truncate_dim"),
    )


def read_reranker(files: ModelFiles) -> RerankerFiles:
    """Read how the folder's model makes scores. Raises UnsupportedModel."""
    kinds = [each.kind for each in _read_modules(files)]
    if kinds not in ([], ["Transformer"]):
        raise UnsupportedModel(
            f"{files.folder / MODULES_FILE} has the modules {', '.join(kinds)}; rerankers of Transformer alone run"
        )
    text = _read_text(files, "sequence-classification", "logits")
    if text.prompt:
        raise UnsupportedModel(f"{files.folder / MODEL_FILE} has the prompt {text.prompt!r}; rerankers with none run")
    return RerankerFiles(_read_score_activation(files), text)


@dataclass(frozen=True)
class _Module:
    """An entry of `modules.json`: the name of its class, and its folder."""

    kind: str
    folder: Path


def _read_modules(files: ModelFiles) -> list[_Module]:
    """The steps that `modules.json` lists; none without such a file. Raises UnsupportedModel."""
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


def _read_module(file: Path, entry: Any) -> _Module:
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
    return _Module(name, folder)


def _read_pooling(options: _Options) -> Pooling:
    found = options.get("pooling_mode")
    if found is None:
        found = [mode for mode, flag in _POOLING_FLAGS.items() if options.get(flag)] or ["mean"]
    modes = [found] if isinstance(found, str) else found
    if not isinstance(modes, list) or not modes or any(mode not in _POOLING_FLAGS for mode in modes):
        raise UnsupportedModel(
            f"{options.file} has the pooling_mode {found!r}, and the modes are {', '.join(_POOLING_FLAGS)}"
        )
    return Pooling(tuple(modes), options.read_flag("include_prompt", True))


def _read_step(module: _Module, files: ModelFiles) -> VectorStep:
    if module.kind not in ("Dense", "LayerNorm", "Normalize"):
        raise UnsupportedModel(f"{files.folder / MODULES_FILE} has the module {module.kind}, which cannot be computed")
    file = module.folder / CONFIG_FILE
    options = _read_options(file) if module.kind != "Normalize" or file.is_file() else _Options(file, {})
    for field in ("module_input_name", "module_output_name"):
        if options.get(field) not in (None, _VECTOR):
            raise UnsupportedModel(f"{file} has the {field} {options.get(field)!r}, and only {_VECTOR!r} can be computed")
    if module.kind == "Normalize":
        return Normalize()
    _require_step_weights(module.folder)
    if module.kind == "LayerNorm":
        return LayerNorm(module.folder, options.read_size("dimension"))
    if options.get("use_residual"):
        raise UnsupportedModel(f"{file} has the use_residual {options.get('use_residual')!r}, which cannot be computed")
    return Dense(
        module.folder,
        options.read_size("in_features"),
        options.read_size("out_features"),
        options.read_flag("bias", True),
        _read_activation(file, options.fields.get("activation_function", "torch.nn.modules.activation.Tanh")),
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
    if not (package == "torch.nn" or package.startswith("torch.nn.modules")) or plain not in _ACTIVATIONS.split(", "):
        raise UnsupportedModel(f"{file} has the activation {name!r}; those of torch.nn that run: {_ACTIVATIONS}")
    return plain


def _read_score_activation(files: ModelFiles) -> str:
    """The function over the score: what the files say, or else the default of sentence-transformers for one label."""
    own, config, config_file = _read_model_options(files), files.config, files.folder / CONFIG_FILE
    nested = config.get("sentence_transformers")
    candidates = (
        (own.file, own.get("activation_fn")),
        (config_file, nested.get("activation_fn") if isinstance(nested, dict) else None),
        (config_file, config.get("sbert_ce_default_activation_function")),
    )
    return next((_read_activation(file, name) for file, name in candidates if name is not None), "Sigmoid")


def _read_text(files: ModelFiles, task: str, output: str) -> TokenizerOptions:
    file = next((files.folder / name for name in _TEXT_FILES if (files.folder / name).is_file()), None)
    if file is None:
        return TokenizerOptions(prompt=_read_prompt(files))
    options = _read_options(file)
    _require_plain(options, task, output)
    lowercases = options.read_flag("do_lower_case", False)
    return TokenizerOptions(options.read_optional_size("max_seq_length"), lowercases, _read_prompt(files))


def _require_plain(options: _Options, task: str, output: str) -> None:
    """Raise UnsupportedModel if newer fields ask for another task, another output, or options for the tokenizer."""
    modalities = options.get("modality_config")
    text = modalities.get("text", {}) if isinstance(modalities, dict) else {"method_output_name": output}
    name_of_output = text.get("method_output_name") if isinstance(text, dict) else text
    fields: tuple[tuple[str, Any, Any], ...] = (
        ("transformer_task", options.get("transformer_task") or task, task),
        ("modality_config for text", [name_of_output] if isinstance(name_of_output, str) else name_of_output, [output]),
        ("processing_kwargs", options.get("processing_kwargs") or {}, {}),
    )
    for name, found, expected in fields:
        if found != expected:
            raise UnsupportedModel(f"{options.file} has the {name} {found!r}, and only {expected!r} can be computed")


def _read_prompt(files: ModelFiles) -> str:
    """The prompt that sentence-transformers puts before a text if the caller names none."""
    options = _read_model_options(files)
    name, prompts = options.get("default_prompt_name"), options.get("prompts")
    if name is None:
        return ""
    found = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(found, str):
        raise UnsupportedModel(f"{options.file} has the default_prompt_name {name!r}, and no prompt of that name")
    return found
