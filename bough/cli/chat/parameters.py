"""Sampling parameters that the user has set, by name: the flags of `bough run`, and the arguments of `/set`.

Those that are not set are the model's own.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from bough.config import parse_switch
from bough.errors import RequestError
from bough.types import SamplingParams

_NOTHING = ("none", "default")


def read_format(text: str) -> str | dict[str, Any]:
    """Return "json" unchanged, or the JSON schema in the file of that name. Raises RequestError if it cannot be read."""
    if text == "json":
        return text
    try:
        schema = json.loads(Path(text).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(
            f'format is {text!r}, and must be "json" or a file with a JSON schema: {error.strerror}'
        ) from error
    except ValueError as error:
        raise RequestError(f"{text} is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise RequestError(f"{text} contains a {type(schema).__name__}, but a JSON schema is an object")
    return schema


_Reader = Callable[[str], Any]
_READERS: dict[str, tuple[_Reader, str]] = {
    "int": (int, "a whole number"),
    "int | None": (int, "a whole number, or none"),
    "float": (float, "a number"),
    "bool": (parse_switch, "on or off"),
    "tuple[str, ...]": (shlex.split, "one or more texts, in quotes if they contain spaces"),
    "str | dict[str, Any] | None": (read_format, 'none, "json" or a file with a JSON schema'),
}
_FIELDS: dict[str, Field[Any]] = {
    each.name: each for each in fields(SamplingParams) if each.name != "logprobs" and str(each.type) in _READERS
}  # a chat cannot show logprobs
NAMES = tuple(_FIELDS)


def check(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that were set, without those that are None. Raises RequestError for a wrong name or value."""
    values = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(set(values) - set(NAMES))
    if unknown:
        raise RequestError(f"unknown parameter {unknown[0]!r}; the parameters are {', '.join(NAMES)}")
    SamplingParams(**values)
    return values


def set_parameter(given: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """Set one parameter from text; after "none" or "default" it is the model's own again. Raises RequestError."""
    if name not in _FIELDS:
        raise RequestError(f"unknown parameter {name!r}; the parameters are {', '.join(NAMES)}")
    if text.lower() in _NOTHING:
        return {each: value for each, value in given.items() if each != name}
    read, wanted = _READERS[str(_FIELDS[name].type)]
    try:
        value = read(text)
    except (ValueError, KeyError) as error:
        raise RequestError(f"{name} is {text!r}, and must be {wanted}") from error
    return check({**given, name: value})


def describe_given(given: Mapping[str, Any]) -> dict[str, str]:
    """The parameters that were set, as text."""
    writers: dict[type, Callable[[Any], str]] = {list: shlex.join, tuple: shlex.join, dict: json.dumps}
    return {name: writers.get(type(value), str)(value) for name, value in given.items()}
