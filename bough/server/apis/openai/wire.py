"""What OpenAI's endpoints share: sampling fields and tools on the way in; usage, logprobs and errors on the way out.

Every error of ours names the field that is wrong at its beginning; that is what a client finds as `param`.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field

from bough.errors import RequestError
from bough.models.defaults import unset_names
from bough.server.http.bounds import (
    FEW_BIASES,
    MAX_ARGUMENTS_CHARACTERS,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_IDS,
    MAX_NAME_CHARACTERS,
    SHORT_NAME,
    SMALL_SCHEMA,
    check_length,
    check_schema,
    check_text,
    check_tools_size,
    show,
)
from bough.server.http.errors import HttpError, to_http_error
from bough.server.http.streaming import sse, sse_comment
from bough.server.http.wire import Wire, read_json
from bough.server.serving.ask import Finished, Progress, ScoredToken, ToolChoice, ToolMode
from bough.types import SamplingParams, Usage

DONE = sse("[DONE]")
LEAST_LOGPROB = -9999.0  # what OpenAI writes for a probability of nearly 0; JSON has no infinity
TOO_LONG = "context_length_exceeded"
MODES: dict[str, ToolMode] = {"auto": "auto", "none": "none", "required": "required"}

_PARAM = re.compile(r"([a-z]\w*(?:\.\w+|\[\d+\])*)(?=:| is | has | needs | cannot | \()")
_MAX_ID_DIGITS = 20
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}

Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
TopP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
NumTokens = Annotated[int, Field(ge=1)]
NumAlternatives = Annotated[int, Field(ge=0, le=20)]
Name = Annotated[str, Field(min_length=1), SHORT_NAME]


def format_error(http_error: HttpError) -> dict[str, Any]:
    """The body of an error in OpenAI's API. Some clients recognize a prompt that is too long by these words."""
    kind = _TYPES.get(http_error.status, "server_error" if http_error.status >= 500 else "invalid_request_error")
    code = http_error.code or _CODES.get(http_error.status)
    text = f"This model's maximum context length is exceeded: {http_error.text}" if code == TOO_LONG else http_error.text
    return {"error": {"message": text, "type": kind, "param": _param_of(http_error), "code": code}}


def _param_of(http_error: HttpError) -> str | None:
    if http_error.code is not None:
        return "model" if http_error.code == "model_not_found" else None
    found = _PARAM.match(http_error.text) if http_error.status == 400 else None
    return found[1] if found and found[1] != "body" else None


def error_event(error: Exception) -> str:
    """The last event of a stream that fails."""
    return sse(format_error(to_http_error(error)))


def progress_comment(progress: Progress) -> str:
    """A comment for the progress of a long prompt; empty at its end, where the answer begins."""
    if progress.done_tokens >= progress.total_tokens:
        return ""
    return sse_comment(f"prefill {progress.done_tokens}/{progress.total_tokens}")


class StreamOptions(Wire):
    """Whether a stream ends with the usage of the request."""

    include_usage: bool | None = None


class Sampling(Wire):
    """The fields that chats and plain completions share."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None
    stop: Any = None  # a text or several: `SamplingParams` checks it
    logit_bias: Annotated[dict[str, Any], FEW_BIASES] | None = None  # by token ids as texts
    ignore_eos: bool | None = None  # not OpenAI's; vLLM and llama.cpp have it

    @property
    def has_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def params(self, max_tokens: int | None, **more: Any) -> SamplingParams:
        """Sampling as asked for, with OpenAI's defaults. Raises RequestError for a value that is wrong."""
        return SamplingParams(
            max_tokens=max_tokens,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=self.seed,
            stop=self.stop,
            logit_bias=read_logit_bias(self.logit_bias),
            ignore_eos=bool(self.ignore_eos),
            **temperature_and_top_p(self.temperature, self.top_p),
            **more,
        )

    def unset(self) -> frozenset[str]:
        """The parameters that the request leaves to the model."""
        others = ("presence_penalty", "frequency_penalty", "stop")
        given = [name for name in others if getattr(self, name) is not None]
        return unset_names([*given, *given_of(self.temperature, self.top_p)])


def given_of(temperature: float | None, top_p: float | None) -> list[str]:
    """Which of the two a request gives; a top-p of 0 gives a temperature, too."""
    return [*(["temperature"] if temperature is not None or top_p == 0 else []), *(["top_p"] if top_p is not None else [])]


def read_logit_bias(given: Mapping[str, Any] | None) -> tuple[tuple[int, Any], ...]:
    """The biases by token ids, which JSON writes as texts. `SamplingParams` checks their values."""
    for text in given or ():
        if not (text.isascii() and text.isdecimal()) or len(text) > _MAX_ID_DIGITS:
            raise RequestError(f"logit_bias has the field {show(text)}, and must have token ids for fields")
    return tuple((int(text), bias) for text, bias in (given or {}).items())


def temperature_and_top_p(temperature: float | None, top_p: float | None) -> dict[str, Any]:
    """Temperature and top-p with OpenAI's defaults of 1; a top-p of 0 is greedy."""
    if top_p == 0:
        return {"temperature": 0.0}
    return {"temperature": 1.0 if temperature is None else temperature, "top_p": 1.0 if top_p is None else top_p}


class Schema(Wire):
    """A JSON schema with the name that clients must give it."""

    name: str | None = None
    schema_: Annotated[dict[str, Any], SMALL_SCHEMA] = Field(alias="schema")


def read_texts(value: Any, place: str, limit: int) -> Sequence[str | list[int]]:
    """The texts in a field: a text, token ids, or a list of at most `limit` of either. Raises RequestError for others."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise RequestError(f"{place} is neither a text nor a list of texts or token ids with at least 1 entry")
    if _is_ids(value):
        _check_num_ids(len(value), place)
        return [value]
    check_length(value, place, limit)
    if not all(isinstance(each, str) for each in value) and not all(_is_ids(each) for each in value):
        raise RequestError(f"{place} is a list of mixed things, and must be texts, token ids, or lists of token ids")
    _check_num_ids(sum(len(each) for each in value if isinstance(each, list)), place)
    return value


def _is_ids(value: Any) -> bool:
    """Whether this is a list of integers only. Fast for a million of them."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _check_num_ids(num_ids: int, place: str) -> None:
    if num_ids > MAX_IDS:
        raise RequestError(f"{place} has {num_ids:,} token ids, and may have {MAX_IDS:,}")


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError, with its number, for a tool that is not a named function or is too large."""
    check_tools_size(tools)
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if tool.get("type") != "function":
            raise RequestError(f"{place} has the type {show(tool.get('type'))}, and only 'function' is supported")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise RequestError(f"{place}.function is {_kind(function)}, and must be an object")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise RequestError(f"{place}.function.name is {show(name)}, and must be a text")
        check_text(name, f"{place}.function.name", MAX_NAME_CHARACTERS)
        if not isinstance(parameters, Mapping | None):
            raise RequestError(f"{place}.function.parameters is {_kind(parameters)}, and must be a JSON schema")
        check_schema(parameters, f"{place}.function.parameters")


def choose_tool(choice: Any, tools: Sequence[Mapping[str, Any]], is_parallel: bool | None) -> ToolChoice:
    """The choice between these tools: a mode, or one of them by name, which is then called once.

    Chats write a name into an object "function", responses beside the type. Raises RequestError for any other choice.
    """
    if choice in (None, "auto", "none"):  # clients send these even without tools
        return ToolChoice(MODES[choice or "auto"], is_single=is_parallel is False)
    if not tools:
        raise RequestError("tool_choice is given without tools; it needs at least 1")
    if choice == "required":
        return ToolChoice("required", is_single=is_parallel is False)
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise RequestError(f"tool_choice is {show(choice)}, and must be one of {', '.join(MODES)} or a function's name")
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise RequestError(f"tool_choice is {show(name)}, and the tools are {', '.join(names)}")
    return ToolChoice("required", name, is_single=True)


def check_arguments(texts: Iterable[str], place: str) -> None:
    """Raise RequestError if the arguments of all earlier calls together are too long."""
    num_characters = sum(map(len, texts))
    if num_characters > MAX_ARGUMENTS_CHARACTERS:
        found = f"{num_characters:,} characters of arguments"
        raise RequestError(f"{place} has calls with {found}, and may have {MAX_ARGUMENTS_CHARACTERS:,}")


def read_arguments(text: str, place: str) -> dict[str, Any]:
    """The arguments of an earlier call, which clients send as JSON text; an empty text means none."""
    if not text.strip():
        return {}
    try:
        found = read_json(text.encode())
    except RequestError as error:
        raise RequestError(f"{place} is no JSON of at most {MAX_DEPTH} levels: {text[:80]!r}") from error
    if not isinstance(found, dict):
        raise RequestError(f"{place} is {_kind(found)}, and must be a JSON object")
    return found


def write_finish(finished: Finished) -> dict[str, Any]:
    """Why a choice ended. OpenAI has no word for an answer that repeats itself: it was cut off, and the details say why."""
    if finished.finish_reason == "loop":
        return {"finish_reason": "length", "finish_details": write_loop(finished)}
    return {"finish_reason": finished.finish_reason}


def write_loop(finished: Finished) -> dict[str, Any]:
    """The details of an answer that repeated itself."""
    return {"type": "loop", "cycle_tokens": finished.completion.cycle_tokens}


def _kind(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


@dataclass(frozen=True)
class ResponseHead:
    """The first fields of every object of one answer."""

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def make(cls, prefix: str, model: str, digest: str) -> Self:
        """The head of a new answer, with the name that the client used for the model."""
        return cls(make_id(prefix), int(time.time()), model, f"fp_{digest[:10]}")

    def write(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        start = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**start, "system_fingerprint": self.fingerprint, "choices": choices, **more}


def make_id(prefix: str) -> str:
    """A new random identifier."""
    return f"{prefix}{secrets.token_hex(12)}"


@dataclass(frozen=True)
class Counts:
    """The tokens of one request: its prompt once, and those of all its choices."""

    prompt: Usage
    completion_tokens: int
    reasoning_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt.prompt_tokens + self.completion_tokens

    def __add__(self, other: Counts) -> Counts:
        """The counts of two prompts that came in one request."""
        prompt = Usage(
            self.prompt.prompt_tokens + other.prompt.prompt_tokens,
            self.prompt.matched_tokens + other.prompt.matched_tokens,
            self.prompt.cached_tokens + other.prompt.cached_tokens,
        )
        completion_tokens = self.completion_tokens + other.completion_tokens
        return Counts(prompt, completion_tokens, self.reasoning_tokens + other.reasoning_tokens)

    def write(self) -> dict[str, Any]:
        """The usage as chats and completions report it."""
        no_prediction = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        return {
            "prompt_tokens": self.prompt.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.prompt.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens, "audio_tokens": 0, **no_prediction},
        }


def count(choices: Sequence[Finished]) -> Counts:
    """The counts of an answer with these choices. The prompt counts as the first found it: others reuse its work."""
    first = min(choices, key=lambda each: each.choice)
    completion_tokens = sum(each.completion.usage.completion_tokens for each in choices)
    thinking_tokens = sum(each.thinking_tokens for each in choices)
    return Counts(first.completion.usage, completion_tokens, min(completion_tokens, thinking_tokens))


def write_logprobs(logprobs: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    """Tokens with their alternatives, as chats and responses report them."""
    return [{**_write_token(each), "top_logprobs": [_write_token(other) for other in each.top]} for each in logprobs]


def _write_token(token: ScoredToken) -> dict[str, Any]:
    return {"token": token.data.decode("utf-8", "replace"), "logprob": finite(token.logprob), "bytes": list(token.data)}


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(logprob, LEAST_LOGPROB)
