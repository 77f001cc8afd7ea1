"""The sampling parameters: one list, from which all others are made.

Each field of `SamplingParams` has a `Parameter`: its range, a sentence for people, and its names in APIs and files. From
these come the checks here, the options of Ollama's API and of Modelfiles, fields of OpenAI's bodies, the defaults that
models bring, the flags of `bough run`, the words of `/set`, the fields of the page and the table in the documentation.
`SamplingOptions` repeats names and types for type checkers, which cannot read a list; a test compares them.

Always true of a `SamplingParams`: every value is in its range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Any, Literal, TypedDict

from bough.errors import RequestError
from bough.python_types import make_schema

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1_024
MAX_LOGIT_BIASES = 1_024
TO_THE_END = -1
"""As `max_tokens`: the answer may go on to the end of the context."""

_JUST_ABOVE = 1e-9  # the least that is above an excluded limit: as top-p it keeps only the likeliest token
_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, NoneType),
    "float": (int, float),
    "bool": (bool,),
    "str | dict[str, Any] | None": (str, dict, NoneType),
}
"""The types that a value may have, by the type of its field. The fields of other types are checked one by one."""


@dataclass(frozen=True)
class Parameter:
    """One sampling parameter, without its own name, type and default.

    `least` and `most` are its range; with `is_above` the least itself is excluded. `neutral` is the value that changes
    nothing; a parameter that has one may have a default in a model's files. An empty name means that it is not known there.
    """

    help: str
    least: float | None = None
    most: float | None = None
    is_above: bool = False
    neutral: Any = None
    ollama: str = ""  # in the options of Ollama's API, which the page uses, and in Modelfiles
    openai: str = ""  # in the bodies of OpenAI's chats and completions
    generation: str = ""  # in a model's generation_config.json
    gguf: str = ""  # in the metadata of a GGUF file, below general.sampling
    is_clamped: bool = False  # APIs move a number that is out of range to the end of the range, and do not refuse it

    def holds(self, value: float) -> bool:
        """Whether a number is in the range."""
        is_large_enough = self.least is None or value > self.least or (value == self.least and not self.is_above)
        return is_large_enough and (self.most is None or value <= self.most)

    def describe_range(self) -> str:
        """The range as the end of a sentence; empty if there is none."""
        if self.least is None:
            return ""
        if self.most is None:
            return f"{'above' if self.is_above else 'at least'} {self.least:g}"
        return f"in {'(' if self.is_above else '['}{self.least:g}, {self.most:g}]"

    def clamp(self, value: Any) -> Any:
        """The number that is meant by one that may be out of range."""
        if not self.is_clamped or self.least is None:
            return value
        least = self.least + _JUST_ABOVE if self.is_above else self.least
        return min(max(value, least), math.inf if self.most is None else self.most)


def _parameter(default: Any, help: str, **known: Any) -> Any:
    return field(default=default, metadata=_about(help, **known))


def _about(help: str, *, known_to: str = "", **known: Any) -> Mapping[str, Any]:
    """The APIs and files that are listed in `known_to` use the parameter's own name."""
    return {"parameter": Parameter(help, **known), "known_to": known_to.split()}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. The defaults are greedy, until the model ends its answer.

    Every character of an answer is compared with every stop string. So there may be at most `MAX_STOPS`, each of at most
    `MAX_STOP_CHARACTERS`.

    The order is: logits → logit bias → repetition, presence and frequency penalties → grammar mask → top-n-sigma →
    temperature → top-k → top-p → min-p → one draw by inverse transform in token order. Temperature 0 takes the largest
    logit.

    `logit_bias` is added to the logits of single tokens. It is given as a mapping from token ids, or as pairs, and kept as
    pairs in the order of ids. -100 in effect bans a token, 100 in effect forces it, unless a grammar forbids it.

    `format` may be given as a type, and is kept as its JSON schema.

    `loop_guard` ends an answer that repeats itself; with `ignore_eos` it does nothing, because then the length is wanted.
    """

    max_tokens: int | None = _parameter(
        None,
        "The most tokens to generate; -1: to the context's end.",
        least=TO_THE_END,
        ollama="num_predict",
        is_clamped=True,
    )  # None: a length that suits the context
    temperature: float = _parameter(
        0.0, "0: always take the likeliest token.", least=0, neutral=1.0, gguf="temp", known_to="ollama openai generation"
    )
    top_k: int = _parameter(
        0,
        "Sample from the k likeliest tokens; 0: all.",
        least=0,
        neutral=0,
        is_clamped=True,
        known_to="ollama openai generation gguf",
    )
    top_p: float = _parameter(
        1.0,
        "Sample from the likeliest tokens up to this total probability.",
        least=0,
        most=1,
        is_above=True,
        neutral=1.0,
        is_clamped=True,
        known_to="ollama openai generation gguf",
    )
    min_p: float = _parameter(
        0.0,
        "Drop tokens below this fraction of the best probability.",
        least=0,
        most=1,
        neutral=0.0,
        known_to="ollama openai generation gguf",
    )
    top_n_sigma: float = _parameter(
        0.0,
        "Drop tokens whose logit is more than n standard deviations below the largest, as in llama.cpp; 0: none.",
        least=0,
        neutral=0.0,
        known_to="ollama openai",
    )
    repeat_penalty: float = _parameter(
        1.0,
        "Above 1: repeat less; 1: no penalty.",
        least=0,
        is_above=True,
        neutral=1.0,
        openai="repetition_penalty",
        generation="repetition_penalty",
        gguf="penalty_repeat",
        known_to="ollama",
    )
    repeat_last_n: int = _parameter(
        64,
        "How many of the last tokens count as repeated; -1: the whole context, 0: none.",
        least=-1,
        neutral=64,
        gguf="penalty_last_n",
        known_to="ollama generation",  # the latter only in folders that were made from a GGUF file
    )
    presence_penalty: float = _parameter(
        0.0, "Above 0: avoid tokens that were there before.", least=-2, most=2, neutral=0.0, known_to="ollama openai"
    )
    frequency_penalty: float = _parameter(
        0.0,
        "Above 0: avoid tokens, the more the more often they were there before.",
        least=-2,
        most=2,
        neutral=0.0,
        known_to="ollama openai",
    )
    seed: int | None = _parameter(None, "The same seed gives the same text.", known_to="ollama openai")
    stop: tuple[str, ...] = _parameter(
        (), "End the answer before this text.", neutral=(), generation="stop_strings", known_to="ollama openai"
    )
    ignore_eos: bool = _parameter(False, "Go on after the model's end token.", known_to="openai")
    loop_guard: bool = _parameter(True, "End an answer that repeats itself again and again.")
    logprobs: int | None = _parameter(
        None, "The log-probability of each token, and of this many of the likeliest ones.", least=0, most=20
    )
    format: str | dict[str, Any] | None = field(
        default=None, metadata=_about('"json", or a JSON schema; for a command a file with one.')
    )
    logit_bias: tuple[tuple[int, float], ...] = _parameter(
        (), "What is added to the logits of single tokens, by token id, from -100 to 100.", known_to="openai"
    )

    def __post_init__(self) -> None:
        _require(isinstance(self.stop, str | Sequence | NoneType), "stop", self.stop, "a text or several")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        _check_stops(stop)
        object.__setattr__(self, "logit_bias", _read_logit_bias(self.logit_bias))
        if callable(self.format):
            object.__setattr__(self, "format", make_schema(self.format))
        for name in _CHECKED:
            _check(name, getattr(self, name))

    @property
    def has_penalties(self) -> bool:
        return self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, as keywords."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    loop_guard: bool
    logprobs: int | None
    format: Literal["json"] | dict[str, Any] | Callable[..., Any] | None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]


PARAMETERS: Mapping[str, Parameter] = {
    each.name: replace(each.metadata["parameter"], **dict.fromkeys(each.metadata["known_to"], each.name))
    for each in fields(SamplingParams)
}
TYPES: Mapping[str, str] = {each.name: str(each.type) for each in fields(SamplingParams)}
"""The type of each parameter, as it is written above."""
NEUTRAL: Mapping[str, Any] = {name: each.neutral for name, each in PARAMETERS.items() if each.neutral is not None}
"""The parameters that a model may have defaults for, each with the value that changes nothing."""
_CHECKED = tuple(name for name, kind in TYPES.items() if kind in _KINDS)


@dataclass(frozen=True)
class ModelDefaults:
    """A model's recommendations; empty if none are known. `problems` are sentences about values that were left out."""

    values: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def fill(self, params: SamplingParams, unset: Collection[str]) -> SamplingParams:
        """The parameters with those in `unset` replaced by the model's own, or neutral if the model has none.

        A model without any defaults changes nothing. Defaults of two origins are never mixed: a temperature that was chosen
        for the whole distribution does not suit a top-k from another origin.
        """
        if not self.values or not unset:
            return params
        return replace(params, **{name: self.values.get(name, NEUTRAL[name]) for name in unset})


NO_DEFAULTS = ModelDefaults()


def unset_names(given: Collection[str]) -> frozenset[str]:
    """The parameters that a model may have defaults for, without those that a request gives."""
    return frozenset(NEUTRAL.keys() - set(given))


def _check(name: str, value: Any) -> None:
    kinds, parameter = _KINDS[TYPES[name]], PARAMETERS[name]
    if kinds == (bool,):
        return _require(isinstance(value, bool), name, value, "True or False")
    if not isinstance(value, kinds) or isinstance(value, bool):
        named = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
        _require(False, name, value, f"of type {named}")
    _require(float not in kinds or _is_finite(value), name, value, "a finite number")
    if parameter.least is not None and value is not None and not parameter.holds(value):
        _require(False, name, value, parameter.describe_range() + (", or None" if NoneType in kinds else ""))
    return None


def _check_stops(stops: tuple[Any, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops):,} entries, and may have {MAX_STOPS}")
    for number, stop in enumerate(stops):
        if isinstance(stop, str) and len(stop) > MAX_STOP_CHARACTERS:
            raise RequestError(f"stop[{number}] has {len(stop):,} characters, and may have {MAX_STOP_CHARACTERS:,}")
    _require(all(isinstance(each, str) and each for each in stops), "stop", stops, "strings of at least one character")


def _read_logit_bias(given: Any) -> tuple[tuple[int, float], ...]:
    """The biases as pairs in the order of ids, from a mapping or from pairs."""
    try:
        biases = dict(given or ())
    except (TypeError, ValueError) as error:
        raise RequestError(f"logit_bias is {given!r:.200}, and must be a mapping from token ids to numbers") from error
    if len(biases) > MAX_LOGIT_BIASES:
        raise RequestError(f"logit_bias has {len(biases):,} entries, and may have {MAX_LOGIT_BIASES:,}")
    for token_id, bias in biases.items():
        _require(_is_number(token_id, int) and token_id >= 0, "logit_bias", token_id, "for token ids, which are at least 0")
        in_range = _is_number(bias, int | float) and -100 <= bias <= 100
        _require(in_range, f"logit_bias[{token_id}]", bias, "a number in [-100, 100]")
    return tuple(sorted((token_id, float(bias)) for token_id, bias in biases.items()))


def _is_finite(value: float) -> bool:
    """Whether a number is one that a float can hold; an integer may be larger."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value!r:.200}, and must be {wanted}")
