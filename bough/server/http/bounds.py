"""Limits on the parts of a request body: all numbers in one place, and the checks that refuse larger parts.

A check costs little compared with what it refuses. Each refusal is a 400 that names the field, the number found and the
number allowed. Stop strings are bounded by `SamplingParams`, for the library too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import AfterValidator, BeforeValidator, Field

from bough.errors import RequestError
from bough.types import MAX_LOGIT_BIASES, MAX_STOP_CHARACTERS, MAX_STOPS

MAX_DEPTH = 64
MAX_VALUES = 1_100_000  # of a body: a prompt of `MAX_IDS` ids, and what stands beside it
MAX_PARTS = 250_000  # of a body: lists, objects, fields and fractions, which take ten times as long to read as other values
MAX_DIGITS = 100  # of a number: reading takes the square of them

MAX_MESSAGES = 10_000  # messages, or items of OpenAI's responses
MAX_CONTENT_PARTS = 10_000  # of one message
MAX_BLOCKS = 20_000  # of all messages of Anthropic's API, which are read on the event loop
MAX_TOOL_CALLS = 1_024  # of one message
MAX_IMAGES = 1_024  # of one message
MAX_ARGUMENTS_CHARACTERS = 4 * 2**20  # of all earlier tool calls that come as texts of JSON
MAX_IDS = 2**20  # of all prompts of a request
MAX_PROMPTS = 2_048
MAX_TEXTS = 8_192  # to embed; OpenAI takes 2,048, but some clients of Ollama send a whole corpus at once
MAX_DOCUMENTS = 2_000  # to rank, each of which is read together with the query
MAX_QUERY_CHARACTERS = 2**14
MAX_CHOICES = 64  # OpenAI takes 128, which is more than may wait for a lane here
MAX_ANSWERS = 2_048  # prompts times choices

MAX_TOOLS = 1_024
MAX_TOOLS_VALUES = 50_000  # of all tools together
MAX_SCHEMA_VALUES = 10_000
MAX_SCHEMA_CHARACTERS = 2**18
MAX_METADATA_VALUES = 64
MAX_METADATA_CHARACTERS = 2**16
MAX_INCLUDES = 64
MAX_TEMPLATE_CHARACTERS = 2**17  # of a chat template that a client gives
MAX_MODELFILE_CHARACTERS = 2**20  # what is made of it is a record of at most as many bytes
MAX_LICENSES = 64
MAX_NAME_CHARACTERS = 512  # of a model, a tool or a user
MAX_DURATION_CHARACTERS = 64

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class Size:
    """How much a JSON value holds: entries of lists and objects, and characters of texts and names of fields."""

    num_values: int
    num_characters: int


def measure(value: Any) -> Size:
    """The size of a JSON value. Costs its number of values."""
    num_values = num_characters = 0
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            num_characters += len(each)
        elif isinstance(each, Mapping):
            num_values += len(each)
            num_characters += sum(map(len, each))
            left.extend(each.values())
        elif isinstance(each, list):
            num_values += len(each)
            left.extend(each)
    return Size(num_values, num_characters)


def describe_excess(value: Any, max_values: int, max_characters: int | None = None) -> str:
    """In which way a JSON value is too large; an empty text if it is not."""
    size = measure(value)
    if size.num_values > max_values:
        return f"has {size.num_values:,} values, and may have {max_values:,}"
    if max_characters is not None and size.num_characters > max_characters:
        return f"has {size.num_characters:,} characters, and may have {max_characters:,}"
    return ""


def check_schema(schema: Any, place: str) -> None:
    """Raise RequestError for a JSON schema that is too large to be walked and compiled."""
    if excess := describe_excess(schema, MAX_SCHEMA_VALUES, MAX_SCHEMA_CHARACTERS):
        raise RequestError(f"{place} {excess}")


def check_tools_size(tools: Sequence[Any]) -> None:
    """Raise RequestError for too many tools, or for tools that are too large together."""
    check_length(tools, "tools", MAX_TOOLS)
    if excess := describe_excess(list(tools), MAX_TOOLS_VALUES):
        raise RequestError(f"tools {excess}")


def check_length(values: Sequence[Any], place: str, limit: int) -> None:
    """Raise RequestError for a list with too many entries."""
    if len(values) > limit:
        raise RequestError(f"{place} has {len(values):,} entries, and may have {limit:,}")


def check_text(text: str, place: str, limit: int) -> None:
    """Raise RequestError for a text that is too long."""
    if len(text) > limit:
        raise RequestError(f"{place} has {len(text):,} characters, and may have {limit:,}")


def at_most(limit: int) -> BeforeValidator:
    """Refuses a list or an object with more entries than this before any of them is validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"it has {len(value):,} entries, and may have {limit:,}")
        return value

    return BeforeValidator(check)


def no_longer_than(limit: int) -> BeforeValidator:
    """Refuses a text with more characters than this."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and len(value) > limit:
            raise ValueError(f"it has {len(value):,} characters, and may have {limit:,}")
        return value

    return BeforeValidator(check)


def no_larger_than(max_values: int, max_characters: int | None = None) -> AfterValidator:
    """Refuses a JSON value that holds more than this."""

    def check(value: Any) -> Any:
        if excess := describe_excess(value, max_values, max_characters):
            raise ValueError(f"it {excess}")
        return value

    return AfterValidator(check)


FAIL_FAST: Any = Field(fail_fast=True)
"""Only the first wrong entry of a list is reported: thousands of errors would cost more than the list."""

SHORT_NAME = no_longer_than(MAX_NAME_CHARACTERS)
SMALL_SCHEMA = no_larger_than(MAX_SCHEMA_VALUES, MAX_SCHEMA_CHARACTERS)
SMALL_TOOLS = no_larger_than(MAX_TOOLS_VALUES)
FEW_STOPS = at_most(MAX_STOPS)
FEW_BIASES = at_most(MAX_LOGIT_BIASES)
SHORT_STOP = no_longer_than(MAX_STOP_CHARACTERS)


def show(value: Any) -> str:
    """A value as an error message shows it: the beginning of a text, a number, or the size of a list or object."""
    if isinstance(value, str):
        return repr(value[:_SHOWN_CHARACTERS])
    if isinstance(value, list | Mapping):
        return f"{'a list' if isinstance(value, list) else 'an object'} with {len(value):,} entries"
    return f"{value!r:.{_SHOWN_CHARACTERS}}"
