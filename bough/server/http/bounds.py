"""Limits on the parts of a request body: all numbers in one place, and the checks that refuse larger parts.

A check costs little compared with what it refuses. Each refusal is a 400 that names the field, the number found and the
number allowed. Stop strings are bounded by `SamplingParams`, for the library too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import AfterValidator, BeforeValidator, Field

from bough.errors import RequestError
from bough.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_CHARACTERS, MAX_STOPS

MAX_DEPTH = 64
MAX_VALUES = 1_100_000  # of a body: a prompt of `MAX_IDS` ids, and the other fields
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


def _excess(count: int, noun: str, limit: float) -> str:
    """How a count exceeds its limit, as errors say it; "" if it does not."""
    return f"has {count:,} {noun}, and may have {limit:,}" if count > limit else ""


def describe_excess(value: Any, max_values: int, max_characters: float = math.inf) -> str:
    """How a JSON value exceeds these limits; "" if it does not. Costs its number of values.

    Values are the entries of its lists and objects. Characters are those of its texts and names of fields.
    """
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
    return _excess(num_values, "values", max_values) or _excess(num_characters, "characters", max_characters)


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
    if excess := _excess(len(values), "entries", limit):
        raise RequestError(f"{place} {excess}")


def check_text(text: str, place: str, limit: int) -> None:
    if excess := _excess(len(text), "characters", limit):
        raise RequestError(f"{place} {excess}")


def _refuse(find_excess: Callable[[Any], str]) -> Callable[[Any], Any]:
    """A validator for pydantic that refuses values in which `find_excess` finds something."""

    def check(value: Any) -> Any:
        if excess := find_excess(value):
            raise ValueError(f"it {excess}")
        return value

    return check


def at_most(limit: int) -> BeforeValidator:
    """Refuses a list or an object with more entries than this before any of them is validated."""
    return BeforeValidator(
        _refuse(lambda value: _excess(len(value), "entries", limit) if isinstance(value, list | dict) else "")
    )


def no_longer_than(limit: int) -> BeforeValidator:
    """Refuses a text with more characters than this."""
    return BeforeValidator(
        _refuse(lambda value: _excess(len(value), "characters", limit) if isinstance(value, str) else "")
    )


def no_larger_than(max_values: int, max_characters: float = math.inf) -> AfterValidator:
    """Refuses a JSON value that holds more than this."""
    return AfterValidator(_refuse(lambda value: describe_excess(value, max_values, max_characters)))


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
