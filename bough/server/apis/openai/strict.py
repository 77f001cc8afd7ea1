"""What `strict: true` asks of a JSON schema: every object forbids other properties, and requires all that it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bough.errors import RequestError
from bough.server.http import bounds

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")


def check_strict(strict: Any, schema: Any, place: str) -> None:
    """Raise RequestError, with its place, for an object in the schema that is not as `strict: true` wants it."""
    if not isinstance(strict, bool | None):
        raise RequestError(f"{place} comes with strict {bounds.show(strict)}, which must be true or false")
    if strict:
        for path, each in _schemas_in(schema):
            if problem := _find_problem(each):
                raise RequestError(f"{place} {f'(at {path}) ' if path else ''}{problem}, because strict is true")


def _find_problem(schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties")
    if properties is None and schema.get("type") != "object":
        return ""
    if schema.get("additionalProperties") is not False:
        return "needs additionalProperties to be false"
    required = schema.get("required")
    missing = [name for name in properties or () if not isinstance(required, list) or name not in required]
    return f"needs {bounds.show(missing[0])} in required, as all of its properties" if missing else ""


def _schemas_in(schema: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schema and all within it, each with its path."""
    if not isinstance(schema, Mapping):
        return
    yield path, schema
    for keyword, value in schema.items():
        inner: Mapping[Any, Any] = {}
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            inner = {f"{keyword}.{name}": each for name, each in value.items()}
        elif keyword in _SCHEMA_LISTS and isinstance(value, list):
            inner = {f"{keyword}[{number}]": each for number, each in enumerate(value)}
        elif keyword == "items":
            inner = {keyword: value}
        for name, each in inner.items():
            yield from _schemas_in(each, f"{path}.{name}" if path else name)
