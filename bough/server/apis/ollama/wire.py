"""Bodies of Ollama's API: options, durations, and how they become an ask.

Always true of a body that was read: known options have the right type and fit in 64 bits, unknown ones were ignored; null
is the same as absent; `keep_alive` is a number of seconds, infinite for one that was negative; nothing is larger than
`bounds` says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from bough.errors import RequestError
from bough.models.defaults import unset_names
from bough.server.apis.ollama.format import close_objects
from bough.server.http.bounds import (
    FAIL_FAST,
    FEW_STOPS,
    MAX_DURATION_CHARACTERS,
    MAX_IDS,
    SHORT_NAME,
    SHORT_STOP,
    at_most,
    no_longer_than,
    show,
)
from bough.server.http.messages import Images, Messages, Name, Tools, check_schema_size
from bough.server.http.wire import Wire
from bough.server.serving.ask import Ask
from bough.types import TO_THE_END, SamplingParams

MAX_TOP_LOGPROBS = 20
DEFAULTS: Mapping[str, int | float] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "repeat_penalty": 1.1,
    "repeat_last_n": 64,
}
_LEAST_TOP_P = 1e-9  # keeps only the likeliest token
_LONGEST_S = (2**63 - 1) / 1e9  # what a Go duration can hold
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION = re.compile(rf"([-+]?)((?:{_PART.pattern})+|0)")
_DEPTHS_OF_THOUGHT = ("low", "medium", "high", "max")
_ANY_SEED = -1


def write_time(moment: datetime) -> str:
    """A time in the format of RFC 3339, in UTC and with fractions of a second."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """A duration as answers have it: never 0, which clients leave out."""
    return max(1, round(seconds * 1e9))


def parse_keep_alive(value: Any) -> float | None:
    """Seconds of a number or of a Go duration such as "1h30m"; negative ones are infinite. Raises ValueError for others."""
    if value is None:
        return None
    seconds = _parse_duration(value) if isinstance(value, str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        raise ValueError(f"{show(value)} is no time: give seconds, or a duration such as '5m'")
    return math.inf if seconds < 0 or seconds > _LONGEST_S else float(seconds)


def _parse_duration(text: str) -> float:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is no duration: give one such as '5m', '1h30m' or '300ms'")
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(found[2]))
    if seconds > _LONGEST_S:
        raise ValueError(f"{text[:40]!r} is longer than {_LONGEST_S:.0f} seconds")
    return -seconds if found[1] == "-" else seconds


def _to_whole(value: Any) -> Any:
    """An integer may come as a float without a fraction, as all numbers of JavaScript do."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to_list(value: Any) -> Any:
    """A text may stand for a list of one; an empty text is the same as none."""
    if isinstance(value, str):
        return [value] if value else None
    return value


def _to_thought(value: Any) -> Any:
    if isinstance(value, str) and value in _DEPTHS_OF_THOUGHT:
        return True
    if value is None or isinstance(value, bool):
        return value
    raise ValueError(f"{show(value)} must be true, false, 'low', 'medium', 'high' or 'max'")


def _to_format(value: Any) -> Any:
    if value is None or value == "":
        return None
    if isinstance(value, dict):
        check_schema_size(value)
        return close_objects(value)
    if value == "json":
        return value
    raise ValueError(f"{show(value)} must be 'json' or a JSON schema object")


def _to_ids(value: Any) -> Any:
    """Convert all ids in one pass: a validator per id would block the event loop for a second at a million ids."""
    if isinstance(value, list) and float in set(map(type, value)):
        return [_to_whole(each) for each in value]
    return value


Whole = Annotated[int, Field(ge=-(2**63), lt=2**63), BeforeValidator(_to_whole)]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), BeforeValidator(_to_whole)]
Real = Annotated[float, Field(allow_inf_nan=False)]
KeepAlive = Annotated[
    float | None,
    BeforeValidator(parse_keep_alive, json_schema_input_type=float | str | None),
    no_longer_than(MAX_DURATION_CHARACTERS),
]
Thought = Annotated[bool | None, BeforeValidator(_to_thought, json_schema_input_type=bool | str | None)]
Format = Annotated[str | dict[str, Any] | None, BeforeValidator(_to_format)]
Ids = Annotated[list[Annotated[int, Field(ge=-(2**63), lt=2**63)]], FAIL_FAST, BeforeValidator(_to_ids), at_most(MAX_IDS)]
Stops = Annotated[list[Annotated[str, SHORT_STOP]], FAIL_FAST, FEW_STOPS]


class Options(Wire):
    """Sampling and other options. Those after the blank line are for Ollama's own engine, and are ignored here."""

    temperature: Real | None = None
    top_k: Whole | None = None
    top_p: Real | None = None
    min_p: Real | None = None
    seed: Whole | None = None
    num_predict: Whole | None = None
    num_ctx: Whole | None = None
    stop: Annotated[Stops | None, BeforeValidator(to_list, json_schema_input_type=list[str] | str | None)] = None
    repeat_penalty: Real | None = None
    repeat_last_n: Whole | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None

    typical_p: Real | None = None
    num_keep: Whole | None = None
    num_batch: Whole | None = None
    num_gpu: Whole | None = None
    main_gpu: Whole | None = None
    num_thread: Whole | None = None
    use_mmap: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """The values for `SamplingParams`, with Ollama's defaults and its handling of numbers out of range.

        A `num_predict` below 0 means as many tokens as the context has room for.
        """
        values = {**DEFAULTS, **self.given()}
        values["top_k"] = max(0, values["top_k"])
        values["top_p"] = min(1.0, max(_LEAST_TOP_P, values["top_p"]))
        values["seed"] = None if self.seed == _ANY_SEED else self.seed
        return {**values, "max_tokens": None if self.num_predict is None else max(TO_THE_END, self.num_predict)}

    def given(self) -> dict[str, Any]:
        """The options that are parameters of sampling, and were given."""
        return self.model_dump(exclude_none=True, include=set(SamplingParams.__dataclass_fields__))


class AnswerRequest(Wire):
    """The fields that chats and prompts share."""

    model: Name
    stream: bool | None = None
    format: Format = None
    options: Options | None = None
    keep_alive: KeepAlive = None
    think: Thought = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt unloads the model instead of loading it."""
        return self.keep_alive == 0

    def params(self) -> SamplingParams:
        """How to answer. Raises RequestError, with its value, for an option that is out of range."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return SamplingParams(format=self.format, logprobs=logprobs, **(self.options or Options()).sampling())

    def to_ask(self, salt: str) -> Ask:
        """The request so far: messages, text or ids are for the endpoint to fill in."""
        context_tokens = self.options.num_ctx if self.options else None
        if context_tokens is not None and context_tokens < 1:
            raise RequestError(f"num_ctx is {context_tokens}, and must be at least 1")
        return Ask(
            self.model,
            params=self.params(),
            unset=unset_names(self.options.given() if self.options else ()),
            think=self.think,
            context_tokens=context_tokens,
            truncates=self.truncate is not False,
            keep_alive_s=self.keep_alive,
            salt=salt,
        )

    def refuse_images(self, images: list[Any] | None, where: str) -> None:
        if images:
            raise RequestError(f"{where} has {len(images)} images, and {self.model} does not support images")


class ChatRequest(AnswerRequest):
    """The body of /api/chat. Without messages it loads or unloads the model."""

    messages: Messages | None = None
    tools: Tools | None = None


class GenerateRequest(AnswerRequest):
    """The body of /api/generate. Without a prompt it loads or unloads the model."""

    prompt: str | None = None
    system: str | None = None
    template: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    context: Ids | None = None
    images: Images | None = None

    def check(self) -> None:
        """Raise RequestError for fields that are not supported, or not together."""
        if self.raw and (self.system or self.template or self.context):
            raise RequestError("raw mode does not support template, system, or context")
        if self.suffix and (self.raw or self.system or self.context):
            raise RequestError("suffix does not go together with raw mode, system, or context")
        if self.template:
            raise RequestError(
                f"{self.model} uses its own template: to use another, send the text of a whole prompt as raw"
            )
        self.refuse_images(self.images, "the request")


class NamedRequest(Wire):
    """A body that names a model, by the new or by the old name of the field."""

    model: Annotated[str, SHORT_NAME] | None = None
    name: Annotated[str, SHORT_NAME] | None = None

    @property
    def wanted(self) -> str:
        """The model's name. Raises RequestError if the body has none."""
        found = self.model or self.name
        if not found:
            raise RequestError("model is required")
        return found


class PullRequest(NamedRequest):
    stream: bool | None = None


class CopyRequest(Wire):
    source: Name
    destination: Name
