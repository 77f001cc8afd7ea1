"""Descriptions of tools, which come from users and clients, and whether a model can be offered them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NO_ARGUMENTS = '{"type": "object", "properties": {}}'
_SHOWN_CHARACTERS = 80


def find_problem(function: Any, *, needs_parameters: bool) -> str:
    """What is wrong with the `function` of a tool, as the end of a sentence that begins with its place; "" if nothing is.

    OpenAI's API alone lets a function without arguments leave out its `parameters`.
    """
    if not isinstance(function, Mapping):
        return f" is {_kind(function)}, and must be an object"
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        return f".name is {_show(name)}, and must be a text"
    if parameters is None and not needs_parameters:
        return ""
    if parameters is None:
        return f".parameters is missing, and must be a JSON schema; without arguments it is {_NO_ARGUMENTS}"
    if not isinstance(parameters, Mapping):
        return f".parameters is {_kind(parameters)}, and must be a JSON schema"
    if parameters.get("type", "object") != "object":
        return f".parameters.type is {_show(parameters['type'])}, and must be 'object'"
    return ""


def _kind(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def _show(value: object) -> str:
    return repr(value[:_SHOWN_CHARACTERS]) if isinstance(value, str) else f"{value!r:.{_SHOWN_CHARACTERS}}"
