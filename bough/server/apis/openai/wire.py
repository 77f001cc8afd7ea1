"""The parts that OpenAI's endpoints share: sampling fields and tools of bodies; usage, logprobs and errors of answers.

Every error of ours names the wrong field at its beginning; clients get that name as `param`.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from bough.errors import RequestError
from bough.models.chat.tools import find_problem
from bough.prompting.ask import ToolChoice
from bough.sampling_params import PARAMETERS, TYPES, Parameter, SamplingParams, unset_names
from bough.server.apis.openai.strict import check_strict
from bough.server.http import bounds
from bough.server.http.errors import HttpError
from bough.server.http.json_routes import Wire, read_json, with_fields
from bough.server.http.streaming import sse
from bough.server.serving.answer import Finished

DONE = sse("[DONE]")
LEAST_LOGPROB = -9999.0  # OpenAI's for a probability of nearly 0; JSON has no infinity
TOO_LONG = "context_length_exceeded"

_PARAM = re.compile(r"([a-z]\w*(?:\.\w+|\[\d+\])*)(?=:| is | has | needs | cannot | \()")
_MAX_ID_DIGITS = 20
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
TopP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
NumTokens = Annotated[int, Field(ge=1)]
NumAlternatives = Annotated[int, Field(ge=0, le=20)]
Name = Annotated[str, Field(min_length=1), bounds.SHORT_NAME]
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
_OWN = ("temperature", "top_p", "stop", "logit_bias")  # parameters that OpenAI's API takes in another way than we do


def format_error(http_error: HttpError) -> dict[str, Any]:
    """The body of an error in OpenAI's API. Some clients recognize a prompt that is too long by these words."""
    kind = _TYPES.get(http_error.status, "server_error" if http_error.status >= 500 else "invalid_request_error")
    code = http_error.code or ("rate_limit_exceeded" if http_error.status == 429 else None)
    text = f"This model's maximum context length is exceeded: {http_error.text}" if code == TOO_LONG else http_error.text
    named = _PARAM.match(http_error.text) if http_error.status == 400 and code is None else None
    param = "model" if code == "model_not_found" else named[1] if named and named[1] != "body" else None
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


class StreamOptions(Wire):
    """Whether a stream ends with the usage of the request."""

    include_usage: bool | None = None


def _field(name: str, parameter: Parameter) -> Any:
    least = None if parameter.is_clamped else parameter.least
    bounds: dict[str, Any] = {"gt" if parameter.is_above else "ge": least, "le": parameter.most}
    if TYPES[name] == "float":
        return Annotated[float, Field(**bounds, allow_inf_nan=False)]
    return Annotated[bool if TYPES[name] == "bool" else int, Field(**bounds)]


@with_fields({each.openai: _field(name, each) for name, each in PARAMETERS.items() if each.openai and name not in _OWN})
class Sampling(Wire):
    """The fields that chats and plain completions share. Those that OpenAI does not have are vLLM's."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=bounds.MAX_CHOICES)
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stop: Any = None  # a text or several: `SamplingParams` checks it
    logit_bias: Annotated[dict[str, Any], bounds.FEW_BIASES] | None = None  # by token ids as texts

    @property
    def has_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def params(self, max_tokens: int | None, **more: Any) -> SamplingParams:
        """The sampling of the body, with OpenAI's defaults. Raises RequestError for a wrong value."""
        values = {name: PARAMETERS[name].clamp(value) for name, value in self._given().items() if name not in _OWN}
        values |= {"stop": self.stop, "logit_bias": _read_logit_bias(self.logit_bias or {})}
        values |= with_defaults(self.temperature, self.top_p)
        return SamplingParams(max_tokens=max_tokens, **values, **more)

    def unset(self) -> frozenset[str]:
        """The parameters that the request leaves to the model."""
        return unset_names({**self._given(), **given_of(self.temperature, self.top_p)})

    def _given(self) -> dict[str, Any]:
        """The sampling parameters in the body, by the names of `SamplingParams`."""
        found = {name: getattr(self, each.openai) for name, each in PARAMETERS.items() if each.openai}
        given = {name: value for name, value in found.items() if value is not None}
        return given | ({"repeat_last_n": -1} if "repeat_penalty" in given else {})  # vLLM's is for all tokens so far


def given_of(temperature: float | None, top_p: float | None) -> dict[str, float]:
    """Those of the two that a request gives. A top-p of 0 is greedy, and gives both."""
    given = {"temperature": 0.0, "top_p": 1.0} if top_p == 0 else {"temperature": temperature, "top_p": top_p}
    return {name: value for name, value in given.items() if value is not None}


def with_defaults(temperature: float | None, top_p: float | None) -> dict[str, Any]:
    return {**_DEFAULTS, **given_of(temperature, top_p)}


def _read_logit_bias(given: Mapping[str, Any]) -> tuple[tuple[int, Any], ...]:
    """The biases by token ids, which JSON writes as texts. `SamplingParams` checks their values."""
    for text in given:
        if not (text.isascii() and text.isdecimal()) or len(text) > _MAX_ID_DIGITS:
            raise RequestError(f"logit_bias has the field {bounds.show(text)}, and must have token ids for fields")
    return tuple((int(text), bias) for text, bias in given.items())


class Schema(Wire):
    """A JSON schema with the name that clients must give it."""

    name: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any], bounds.SMALL_SCHEMA] = Field(alias="schema")


def read_format(kind: str, schema: dict[str, Any] | None, strict: bool | None, place: str) -> str | dict[str, Any] | None:
    """The format of an answer: text (None), any JSON, or JSON of a schema. Raises RequestError for a wrong one."""
    if kind == "text":
        return None
    if kind == "json_object":
        return "json"
    if schema is None:
        raise RequestError(f"{place} is missing, and the type is json_schema")
    check_strict(strict, schema, place)
    return schema


def read_texts(value: Any, place: str, limit: int) -> Sequence[str | list[int]]:
    """The texts in a field: a text, token ids, or a list of at most `limit` of either. Raises RequestError for others."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise RequestError(f"{place} is neither a text nor a list of texts or token ids with at least 1 entry")
    texts = [value] if _is_ids(value) else value
    bounds.check_length(texts, place, limit)
    if not all(isinstance(each, str) for each in texts) and not all(_is_ids(each) for each in texts):
        raise RequestError(f"{place} is a list of mixed things, and must be texts, token ids, or lists of token ids")
    num_ids = sum(len(each) for each in texts if isinstance(each, list))
    if num_ids > bounds.MAX_IDS:
        raise RequestError(f"{place} has {num_ids:,} token ids, and may have {bounds.MAX_IDS:,}")
    return texts


def _is_ids(value: Any) -> bool:
    """Whether this is a list of integers only. Fast for a million of them."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError, with its number, for a tool that is not a named function or is too large."""
    bounds.check_tools_size(tools)
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if tool.get("type") != "function":
            raise RequestError(f"{place} has the type {bounds.show(tool.get('type'))}, and only 'function' is supported")
        function = tool.get("function") or {}
        if problem := find_problem(function, needs_parameters=False):
            raise RequestError(f"{place}.function{problem}")
        bounds.check_text(function["name"], f"{place}.function.name", bounds.MAX_NAME_CHARACTERS)
        bounds.check_schema(function.get("parameters"), f"{place}.function.parameters")
        check_strict(function.get("strict"), function.get("parameters"), f"{place}.function.parameters")


def choose_tool(choice: Any, tools: Sequence[Mapping[str, Any]], is_parallel: bool | None) -> ToolChoice:
    """The choice between these tools: a mode, or one of them by name, which is then called once. Raises RequestError."""
    if choice in (None, "auto", "none"):  # clients send these even without tools
        return ToolChoice("none" if choice == "none" else "auto", is_single=is_parallel is False)
    if not tools:
        raise RequestError("tool_choice is given without tools; it needs at least 1")
    if choice == "required":
        return ToolChoice("required", is_single=is_parallel is False)
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        known = "auto, none, required or a function's name"
        raise RequestError(f"tool_choice is {bounds.show(choice)}, and must be one of {known}")
    function = choice.get("function", choice)  # responses write the name beside the type
    name = function.get("name") if isinstance(function, Mapping) else None
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise RequestError(f"tool_choice is {bounds.show(name)}, and the tools are {', '.join(names)}")
    return ToolChoice("required", name, is_single=True)


def check_arguments(texts: Iterable[str], place: str) -> None:
    """Raise RequestError if the arguments of all earlier calls together are too long."""
    num_characters = sum(map(len, texts))
    if num_characters > bounds.MAX_ARGUMENTS_CHARACTERS:
        found = f"{num_characters:,} characters of arguments"
        raise RequestError(f"{place} has calls with {found}, and may have {bounds.MAX_ARGUMENTS_CHARACTERS:,}")


def read_arguments(text: str, place: str) -> dict[str, Any]:
    """The arguments of an earlier call, which clients send as JSON text; an empty text means none."""
    if not text.strip():
        return {}
    try:
        found = read_json(text.encode())
    except RequestError as error:
        raise RequestError(f"{place} is no JSON of at most {bounds.MAX_DEPTH} levels: {text[:80]!r}") from error
    if not isinstance(found, dict):
        raise RequestError(f"{place} is {_kind(found)}, and must be a JSON object")
    return found


def write_finish(finished: Finished) -> dict[str, Any]:
    """Why a choice ended. OpenAI has no word for an answer that repeats itself: it was cut off, and the details say why."""
    if finished.finish_reason == "loop":
        return {"finish_reason": "length", "finish_details": write_loop(finished)}
    return {"finish_reason": finished.finish_reason}


def write_loop(finished: Finished) -> dict[str, Any]:
    return {"type": "loop", "cycle_tokens": finished.completion.cycle_tokens}


def _kind(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


class ResponseHead:
    """The first fields of every object of one answer. The model has the name that the client used."""

    def __init__(self, prefix: str, model: str, digest: str) -> None:
        self._id = make_id(prefix)
        self._fields = {"created": int(time.time()), "model": model, "system_fingerprint": f"fp_{digest[:10]}"}

    def write(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": self._id, "object": kind, **self._fields, "choices": choices, **more}


def make_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


@dataclass(frozen=True)
class UsageCounts:
    """The tokens of one request: its prompts once, and those of all its choices."""

    prompt_tokens: int
    matched_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int

    def write(self) -> dict[str, Any]:
        no_prediction = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens, "audio_tokens": 0, **no_prediction},
        }


def count(*answers: Sequence[Finished]) -> UsageCounts:
    """The counts of some answers' choices. A prompt counts as its first choice found it: the others reuse its work."""
    prompts = [min(choices, key=lambda each: each.choice).completion.usage for choices in answers]
    num_tokens = [sum(each.completion.usage.completion_tokens for each in choices) for choices in answers]
    num_thinking = [sum(each.thinking_tokens for each in choices) for choices in answers]
    return UsageCounts(
        sum(each.prompt_tokens for each in prompts),
        sum(each.matched_tokens for each in prompts),
        sum(each.cached_tokens for each in prompts),
        sum(num_tokens),
        sum(map(min, num_tokens, num_thinking)),
    )
