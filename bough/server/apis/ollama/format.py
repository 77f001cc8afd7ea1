"""JSON schemas as Ollama reads them: objects have only the properties that their schema names, unless it says otherwise.

JSON Schema itself allows more, and most schemas that clients make of classes do not forbid it: a weak model would go on
with properties of its own until its budget ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # keywords with schemas by name,
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")  # in a list,
_SINGLE = ("items", "additionalProperties")  # and alone
_OTHERS = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
)  # they say which other properties are allowed
_BESIDE = ("$ref", "anyOf", "oneOf", "allOf", "if", "dependentSchemas")  # they may name more properties of the same object


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its objects closed; as it is if the properties of one object are named in several places."""
    return schema if any(map(_is_composed, _walk(schema))) else _close(schema)


def _close(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    changed = {**schema, **_change(schema, _close)}
    return {"type": "object", **changed, "additionalProperties": False} if _is_open(schema) else changed


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Whether this is an object that names its properties, all required ones too, and says nothing about others."""
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list) or any(each in schema for each in _OTHERS):
        return False
    return all(each in named for each in required if isinstance(each, str))


def _change(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The keywords of a schema that have schemas in them, with those changed."""
    named = {key: {name: change(each) for name, each in schema[key].items()} for key in _held(schema, _NAMED, dict)}
    listed = {key: [change(each) for each in schema[key]] for key in _held(schema, _LISTED, list)}
    return {**named, **listed, **{key: change(schema[key]) for key in _held(schema, _SINGLE, dict)}}


def _held(schema: Mapping[str, Any], keys: tuple[str, ...], kind: type) -> list[str]:
    return [key for key in keys if isinstance(schema.get(key), kind)]


def _walk(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and all that are in it."""
    if isinstance(schema, dict):
        yield schema
        parts: list[Any] = []
        _change(schema, parts.append)
        for part in parts:
            yield from _walk(part)


def _is_composed(schema: Mapping[str, Any]) -> bool:
    all_of = schema.get("allOf")
    is_several = isinstance(all_of, list) and len(all_of) > 1
    return is_several or ("properties" in schema and any(each in schema for each in _BESIDE))
