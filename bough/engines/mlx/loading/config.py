"""Configurations as transformers 5 writes them, translated to the keys that mlx-lm reads.

mlx-lm reads the keys that it knows and takes its own defaults for those that are missing. A configuration with other keys
gives another model, without an error. So each setting under another key is repeated under mlx-lm's. A setting that mlx-lm
has no key for raises UnsupportedModel, or becomes a warning where the model is still useful.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from bough.engines.mlx.library import utils
from bough.errors import UnsupportedModel

Config = dict[str, Any]
_OTHER_NAMES = {  # mlx-lm's name: transformers' name
    "num_experts": "num_local_experts",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "n_ctx": "n_positions",
    "block_dim": "hidden_size",
}
_ROTARY_SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_dim", "rope_parameters")
_HALF_BY_ITSELF = ("recurrent_gemma",)
_ONLY_SCALINGS = {"phi3": ("longrope", "su", "linear")}
_KNOWN_DIFFERENCES = {
    "jamba": "mlx-lm weighs the experts of jamba among themselves, and not among all: its answers differ",
    "ernie4_5_moe": "mlx-lm chooses the experts of ernie4_5_moe without their correction: its answers differ",
}


@dataclass(frozen=True)
class TranslatedConfig:
    """A configuration that mlx-lm can read, and warnings about how the model will differ from it."""

    config: Config
    warnings: tuple[str, ...] = ()


def translate(config: Config) -> TranslatedConfig:
    """Add mlx-lm's keys to the configuration; the others stay. Raises UnsupportedModel where mlx-lm has no such key."""
    new = dict(config)
    inner: tuple[str, ...] = ()
    if isinstance(new.get("text_config"), dict):
        text = translate(new["text_config"])
        new["text_config"], inner = text.config, text.warnings
    arguments = _arguments_of(new)
    _set_rotation(new)
    _set_layers(new, arguments)
    _set_family(new)
    _set_missing(new, arguments)
    return TranslatedConfig(new, (*inner, *_find_differences(new, arguments)))


def _arguments_of(config: Config) -> dict[str, inspect.Parameter]:
    """The parameters that mlx-lm's model reads from a configuration; none if it has no model of this type by itself."""
    try:
        _, arguments = utils._get_classes(config)
    except (KeyError, ValueError, SystemExit):
        return {}
    return dict(inspect.signature(arguments).parameters)


def _set_rotation(config: Config) -> None:
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    main = rope.get("full_attention", rope)
    local = rope.get("sliding_attention")
    if isinstance(local, dict) and "rope_theta" in local:
        config["rope_local_base_freq"] = local["rope_theta"]
    config |= {name: main[name] for name in ("rope_theta", "partial_rotary_factor") if name in main}
    if main.get("rope_type", "default") != "default":
        scaling = {name: value for name, value in main.items() if name != "rope_theta"}
        config["rope_scaling"] = scaling | {"type": main["rope_type"]}  # its older name, which some models read


def _set_layers(config: Config, arguments: dict[str, inspect.Parameter]) -> None:
    """The kinds of layers, where mlx-lm needs the period in which they alternate."""
    types = config.get("layer_types")
    if not types or "layer_types" in arguments:
        return
    if "sliding_window_pattern" in arguments and config.get("model_type") == "exaone4":
        config["sliding_window_pattern"] = "".join("L" if each == "sliding_attention" else "G" for each in types)
    elif "sliding_window_pattern" in arguments:
        config["sliding_window_pattern"] = _period_of(types, "sliding_attention", config)
    elif "full_attention_interval" in arguments:
        config["full_attention_interval"] = _period_of(types, "linear_attention", config)


def _period_of(types: list[str], other: str, config: Config) -> int:
    """The number of layers from one of full attention to the next."""
    period = types.index("full_attention") + 1 if "full_attention" in types else len(types) + 1
    regular = [other if (i + 1) % period else "full_attention" for i in range(len(types))]
    if types != regular or period > len(types):
        raise UnsupportedModel(
            f"mlx-lm runs {config.get('model_type')} only with layers that take turns, the last of each turn with full "
            f"attention; of these {len(types)} layers, {types.count('full_attention')} have it: {', '.join(types)}"
        )
    return period


def _set_family(config: Config) -> None:
    """Settings of single families, some of which have no default in mlx-lm."""
    match config.get("model_type"):
        case "apertus":
            config |= {"mlp_bias": False, "post_norm": False, "qk_norm": True} | config
        case "falcon_h1":
            config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        case "granitemoehybrid":
            words = {"linear_attention": "mamba", "full_attention": "attention"}
            config["layer_types"] = [words.get(each, each) for each in config["layer_types"]]
            if config.get("position_embedding_type") is None:
                config["position_embedding_type"] = "nope"
        case "mistral" if _window_of(config) and not config.get("layer_types"):
            config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]  # else mlx-lm has no window


def _set_missing(config: Config, arguments: dict[str, inspect.Parameter]) -> None:
    """Keys that mlx-lm requires, under another name or with no value."""
    for name, other in _OTHER_NAMES.items():
        if name in arguments and name not in config and other in config:
            config[name] = config[other]
    required = [name for name, each in arguments.items() if each.default is each.empty and name not in config]
    if "rope_scaling" in required:
        config["rope_scaling"] = None
    if "mlp_only_layers" in required:
        config["mlp_only_layers"] = []
    if "head_dim" in required:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]


def _find_differences(config: Config, arguments: dict[str, inspect.Parameter]) -> list[str]:
    """Warnings about settings that mlx-lm ignores. Raises UnsupportedModel if the model would be useless."""
    kind = str(config.get("model_type"))
    if not arguments:
        return []
    found = [_KNOWN_DIFFERENCES[kind]] if kind in _KNOWN_DIFFERENCES else []
    window = _window_of(config)
    knows_which = "layer_types" not in arguments or bool(config.get("layer_types"))
    if window and not ("sliding_window" in arguments and knows_which):
        found.append(f"mlx-lm runs {kind} without its window of {window:,} tokens: beyond that its answers differ")
    share = config.get("partial_rotary_factor") or 1
    if share != 1 and kind not in _HALF_BY_ITSELF and not any(name in arguments for name in _ROTARY_SHARES):
        found.append(f"mlx-lm rotates all of a head of {kind}, and not {share} of it: its answers differ")
    return found + _find_scaling(config, arguments, kind)


def _find_scaling(config: Config, arguments: dict[str, inspect.Parameter], kind: str) -> list[str]:
    scaling = config.get("rope_scaling") or {}
    name = scaling.get("type") or scaling.get("rope_type") or "default"
    if name == "default":
        return []
    is_taken = bool({"rope_scaling", "rope_parameters"} & arguments.keys())
    if not is_taken or name not in _ONLY_SCALINGS.get(kind, (name,)):
        raise UnsupportedModel(f"mlx-lm runs {kind} without the {name} rotary scaling that it has")
    if name in ("longrope", "su"):
        length = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        return [f"mlx-lm uses the rotary factors for long texts always: up to {length} tokens its answers differ"]
    return []


def _window_of(config: Config) -> int | None:
    """The window of some layers, if it is shorter than the model's whole context."""
    window, types = config.get("sliding_window"), config.get("layer_types")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return None
    if types and "sliding_attention" not in types:
        return None
    return window if window < (config.get("max_position_embeddings") or window + 1) else None
