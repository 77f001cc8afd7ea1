"""What a JSON schema means for an answer: an object has the properties that its schema names, and no others.

JSON Schema itself allows any others, which a weak model then writes until it reaches its token limit. So an object with
`properties` is closed, unless its schema opens it with `additionalProperties` or `patternProperties`. Always true:
- parts that are joined (`allOf`, a `$ref` beside other keywords, `anyOf` beside `properties`) are closed around the names
  of all of them, so that a schema that can be satisfied still can;
- if one of them is open, so are the others;
- texts, numbers and everything else in the schema stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from bough.errors import RequestError

MAX_STEPS = 1_000_000
"""How many names may be looked at: each part that is joined with others looks at the names of all of them."""

_JOINED, _EITHER = ("allOf",), ("anyOf", "oneOf")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "additionalProperties", "additionalItems")


@dataclass(frozen=True)
class _Known:
    """What parts of a schema say about one object: the names of its properties, and whether it may have others."""

    names: tuple[str, ...] = ()
    is_open: bool = False


_NOTHING = _Known()


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with its objects closed. Raises RequestError if too many parts are joined with each other."""
    closer = _Closer(schema)
    closed: dict[str, Any] = closer.close(schema, _NOTHING)
    if closer.definitions:
        closed["$defs"] = {**closed.get("$defs", {}), **closer.definitions}
    return closed


class _Closer:
    """Closes the objects of one schema. `definitions` are those parts that a `$ref` joins with others, by new names."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.definitions: dict[str, Any] = {}
        self._root = root
        self._names: dict[tuple[str, frozenset[str], bool], str] = {}
        self._num_steps = 0

    def close(self, schema: Any, known: _Known) -> Any:
        """The schema with its objects closed. `known` is what the parts say that it is joined with."""
        if not isinstance(schema, Mapping):
            return [self.close(each, known) for each in schema] if isinstance(schema, list) else schema
        closed = {keyword: self._close_value(schema, keyword, known) for keyword in schema}
        properties, whole = closed.get("properties"), self._join([known, self._read(schema)])
        if isinstance(properties, dict) and "additionalProperties" not in schema and not whole.is_open:
            others = [name for name in whole.names if name not in properties]
            closed["properties"] = {**properties, **dict.fromkeys(others, True)}
            return {"type": "object", **closed, "additionalProperties": False}
        return closed

    def _close_value(self, schema: Mapping[str, Any], keyword: str, known: _Known) -> Any:
        value = schema[keyword]
        if keyword == "$ref":
            return self._refer(value, self._join([known, self._read(schema, without="$ref")]))
        if keyword in _SCHEMAS:
            return self.close(value, _NOTHING)
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            return {name: self.close(each, _NOTHING) for name, each in value.items()}
        if keyword in _EITHER and isinstance(value, list):
            beside = self._join([known, self._read(schema, without=keyword)])
            return [self.close(each, beside) for each in value]
        if keyword in _JOINED and isinstance(value, list):
            beside = self._join([known, self._read(schema, without=keyword)])
            others = [self._read(each) for each in value]
            return [self.close(each, self._join([beside, *others[:i], *others[i + 1 :]])) for i, each in enumerate(value)]
        return value

    def _refer(self, reference: Any, known: _Known) -> Any:
        """The reference, or one to a copy of its part that is closed around what is known, too."""
        part = self._find(reference)
        if part is None or known == _NOTHING:
            return reference
        key = (reference, frozenset(known.names), known.is_open)
        if key not in self._names:
            self._names[key] = name = f"joined-{len(self._names)}"
            self.definitions[name] = self.close(part, known)
        return f"#/$defs/{self._names[key]}"

    def _read(self, schema: Any, without: str = "", visited: frozenset[str] = frozenset()) -> _Known:
        """What a schema says about an object, without one of its keywords. References are followed once."""
        if not isinstance(schema, Mapping):
            return _NOTHING
        is_open = schema.get("additionalProperties", False) is not False or bool(schema.get("patternProperties"))
        parts = [each for keyword in (*_JOINED, *_EITHER) if keyword != without for each in _listed(schema.get(keyword))]
        found = [self._read(each, visited=visited) for each in parts]
        reference = schema.get("$ref")
        if without != "$ref" and isinstance(reference, str) and reference not in visited:
            found.append(self._read(self._find(reference), visited=visited | {reference}))
        return self._join([_Known(_names_of(schema), is_open), *found])

    def _join(self, parts: Sequence[_Known]) -> _Known:
        """What the parts say together. Raises RequestError if that has become too much."""
        self._num_steps += sum(1 + len(each.names) for each in parts)
        if self._num_steps > MAX_STEPS:
            raise RequestError(f"the schema joins too many parts: more than {MAX_STEPS:,} names would be looked at")
        names = dict.fromkeys(name for each in parts for name in each.names)
        return _Known(tuple(names), any(each.is_open for each in parts))

    def _find(self, reference: Any) -> Any:
        """The part of the schema that a reference names by a path from the root; None if there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self._root
        for name in reference[1:].split("/")[1:]:
            plain = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and plain.isdecimal() and int(plain) < len(found):
                found = found[int(plain)]
            elif isinstance(found, Mapping) and plain in found:
                found = found[plain]
            else:
                return None
        return found if isinstance(found, Mapping) else None


def _names_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The properties that a schema names, those that it only requires after the others."""
    properties, required = schema.get("properties"), schema.get("required")
    names = [*(properties if isinstance(properties, Mapping) else ()), *_listed(required)]
    return tuple(name for name in names if isinstance(name, str))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
