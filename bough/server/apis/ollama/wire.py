"""Bodies of Ollama's API: messages, tools, options and durations, and how they become an ask. Bough's API takes them, too.

Always true of a body that was read: known options have the right type and fit in 64 bits, unknown ones have no effect; null
is the same as absent; `keep_alive` is a number of seconds, infinite for one that was negative; nothing is larger than
`bounds` says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from bough.errors import RequestError
from bough.models.chat.tools import find_problem
from bough.prompting.ask import Ask
from bough.sampling_params import PARAMETERS, TYPES, SamplingParams, unset_names
from bough.server.http import bounds
from bough.server.http.json_routes import Wire, with_fields
from bough.server.serving.catalog.overlay import sampling_of
from bough.server.serving.embedding import EmbedAsk
from bough.types import Message

MAX_TOP_LOGPROBS = 20
DEFAULTS: Mapping[str, int | float] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "repeat_penalty": 1.1,
    "repeat_last_n": 64,
}
_LONGEST_S = (2**63 - 1) / 1e9  # what a Go duration can hold
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION = re.compile(rf"([-+]?)((?:{_PART.pattern})+|0)")
_DEPTHS_OF_THOUGHT = ("low", "medium", "high", "max")


def write_time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """A duration as answers have it: never 0, which clients leave out."""
    return max(1, round(seconds * 1e9))


def parse_keep_alive(value: Any) -> float | None:
    """Seconds of a number or of a Go duration such as "1h30m"; negative ones are infinite. Raises ValueError for others."""
    if value is None:
        return None
    seconds = value
    if isinstance(value, str):
        found = _DURATION.fullmatch(value)
        if found is None:
            raise ValueError(f"{value[:40]!r} is no duration: give one such as '5m', '1h30m' or '300ms'")
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(found[2]))
        if seconds > _LONGEST_S:
            raise ValueError(f"{value[:40]!r} is longer than {_LONGEST_S:.0f} seconds")
        seconds = -seconds if found[1] == "-" else seconds
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        raise ValueError(f"{bounds.show(value)} is no time: give seconds, or a duration such as '5m'")
    return math.inf if seconds < 0 or seconds > _LONGEST_S else float(seconds)


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
    raise ValueError(f"{bounds.show(value)} must be true, false, 'low', 'medium', 'high' or 'max'")


def _check_schema(schema: dict[str, Any]) -> None:
    if excess := bounds.describe_excess(schema, bounds.MAX_SCHEMA_VALUES, bounds.MAX_SCHEMA_CHARACTERS):
        raise ValueError(f"the JSON schema {excess}")


def _to_format(value: Any) -> Any:
    if value is None or value == "":
        return None
    if isinstance(value, dict):
        _check_schema(value)
        return value
    if value == "json":
        return value
    raise ValueError(f"{bounds.show(value)} must be 'json' or a JSON schema object")


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "function"):
        raise ValueError(f"its type is {bounds.show(tool['type'])}, and must be 'function'")
    if problem := find_problem(tool.get("function"), needs_parameters=True):
        raise ValueError(f"function{problem}")
    _check_schema(tool["function"]["parameters"])
    return {**tool, "type": "function"}


def _to_ids(value: Any) -> Any:
    """Convert all ids in one pass: a validator per id would block the event loop for a second at a million ids."""
    return [_to_whole(each) for each in value] if isinstance(value, list) and float in set(map(type, value)) else value


Whole = Annotated[int, Field(ge=-(2**63), lt=2**63), BeforeValidator(_to_whole)]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), BeforeValidator(_to_whole)]
Real = Annotated[float, Field(allow_inf_nan=False)]
KeepAlive = Annotated[
    float | None,
    BeforeValidator(parse_keep_alive, json_schema_input_type=float | str | None),
    bounds.no_longer_than(bounds.MAX_DURATION_CHARACTERS),
]
Thought = Annotated[bool | None, BeforeValidator(_to_thought, json_schema_input_type=bool | str | None)]
Format = Annotated[str | dict[str, Any] | None, BeforeValidator(_to_format)]
Ids = Annotated[
    list[Annotated[int, Field(ge=-(2**63), lt=2**63)]],
    bounds.FAIL_FAST,
    BeforeValidator(_to_ids),
    bounds.at_most(bounds.MAX_IDS),
]
Stops = Annotated[list[Annotated[str, bounds.SHORT_STOP]], bounds.FAIL_FAST, bounds.FEW_STOPS]
Role = Annotated[
    Literal["system", "developer", "user", "assistant", "tool"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
]
Tools = Annotated[
    list[Annotated[dict[str, Any], AfterValidator(_check_tool)]],
    bounds.FAIL_FAST,
    bounds.SMALL_TOOLS,
    bounds.at_most(bounds.MAX_TOOLS),
]
Name = Annotated[str, Field(min_length=1), bounds.SHORT_NAME]
Images = Annotated[list[Any], bounds.at_most(bounds.MAX_IMAGES)]
_KINDS: Mapping[str, Any] = {
    "int": Whole,
    "int | None": Whole,
    "float": Real,
    "tuple[str, ...]": Annotated[Stops | None, BeforeValidator(to_list, json_schema_input_type=list[str] | str | None)],
}


class FunctionCall(Wire):
    """The name of a tool and its arguments, as an object."""

    name: Name
    arguments: dict[str, Any] | None = None


class MessageToolCall(Wire):
    """A call that an earlier answer made."""

    id: str | None = None
    function: FunctionCall

    def to_message(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments or {}}
        return {**({"id": self.id} if self.id else {}), "type": "function", "function": function}


class ChatMessage(Wire):
    """One message of a conversation."""

    role: Role
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[MessageToolCall], bounds.FAIL_FAST, bounds.at_most(bounds.MAX_TOOL_CALLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def to_message(self) -> Message:
        """The message as chat templates take it."""
        optional = {
            "reasoning_content": self.thinking,
            "tool_calls": [each.to_message() for each in self.tool_calls or ()],
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
        }
        given = {name: value for name, value in optional.items() if value}
        return {"role": self.role, "content": self.content or "", **given}


Messages = Annotated[list[ChatMessage], bounds.FAIL_FAST, bounds.at_most(bounds.MAX_MESSAGES)]


@with_fields({each.ollama: _KINDS[TYPES[name]] for name, each in PARAMETERS.items() if each.ollama})
class Options(Wire):
    """The parameters of sampling that Ollama has a name for, and other options.

    Those after the blank line are for Ollama's own engine, and are ignored here.
    """

    num_ctx: Whole | None = None

    typical_p: Real | None = None
    num_keep: Whole | None = None
    num_batch: Whole | None = None
    num_gpu: Whole | None = None
    main_gpu: Whole | None = None
    num_thread: Whole | None = None
    use_mmap: bool | None = None


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

    def to_ask(self, salt: str) -> Ask:
        """The ask without its prompt. Raises RequestError, with its value, for an option that is out of range."""
        context_tokens = self.options.num_ctx if self.options else None
        if context_tokens is not None and context_tokens < 1:
            raise RequestError(f"num_ctx is {context_tokens}, and must be at least 1")
        given = sampling_of(self.options.model_dump(exclude_none=True) if self.options else {})
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return Ask(
            self.model,
            params=SamplingParams(format=self.format, logprobs=logprobs, **{**DEFAULTS, **given}),
            unset=unset_names(given),
            think=self.think,
            context_tokens=context_tokens,
            truncates=self.truncate is not False,
            keep_alive_s=self.keep_alive,
            salt=salt,
        )

    def refuse_images(self, images: list[Any] | None, where: str) -> None:
        if images:
            raise RequestError(f"{where} has {len(images)} images, and {self.model} does not support images")


class OllamaChatRequest(AnswerRequest):
    """The body of /api/chat. Without messages it loads or unloads the model."""

    messages: Messages | None = None
    tools: Tools | None = None


class OllamaGenerateRequest(AnswerRequest):
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
            advice = "to use another, send the text of a whole prompt as raw"
            raise RequestError(f"{self.model} uses its own template: {advice}")
        self.refuse_images(self.images, "the request")


class NamedRequest(Wire):
    """A body that names a model, by the new or by the old name of the field."""

    model: Annotated[str, bounds.SHORT_NAME] | None = None
    name: Annotated[str, bounds.SHORT_NAME] | None = None

    @property
    def wanted(self) -> str:
        """The model's name. Raises RequestError if the body has none."""
        found = self.model or self.name
        if not found:
            raise RequestError("model is required")
        return found


Texts = Annotated[list[str], bounds.FAIL_FAST, bounds.at_most(bounds.MAX_TEXTS)]


class VectorRequest(NamedRequest):
    """The fields that both routes for vectors have."""

    options: Options | None = None
    keep_alive: KeepAlive = None


class EmbedRequest(VectorRequest):
    """The body of /api/embed. A `dimensions` of 0 means all of them."""

    input: Annotated[Texts | None, BeforeValidator(to_list, json_schema_input_type=list[str] | str | None)] = None
    truncate: bool | None = None
    dimensions: Annotated[Whole, Field(ge=0)] | None = None

    def to_ask(self, salt: str) -> EmbedAsk:
        truncates, dimensions = self.truncate is not False, self.dimensions or None
        return EmbedAsk(self.wanted, self.input or (), truncates, dimensions, keep_alive_s=self.keep_alive, salt=salt)


class OllamaEmbeddingsRequest(VectorRequest):
    """The body of /api/embeddings."""

    prompt: str | None = None

    def to_ask(self, salt: str) -> EmbedAsk:
        texts = [self.prompt] if self.prompt else []
        return EmbedAsk(self.wanted, texts, normalizes=False, keep_alive_s=self.keep_alive, salt=salt, field="prompt")


class PullRequest(NamedRequest):
    stream: bool | None = None


class CopyRequest(Wire):
    source: Name
    destination: Name
