"""Tool calls that a client requires: the JSON schema that the answer must fit, made from the schemas of the tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bough.errors import RequestError
from bough.types import Tool


def schema_of_call(tools: Sequence[Tool], name: str | None = None) -> dict[str, Any]:
    """The JSON schema of a call of one of the tools, or of the named one. Raises RequestError if there is none."""
    wanted = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not wanted:
        names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        raise RequestError(f"a call of {name or 'a tool'} is asked for; the tools are: {names}")
    schemas = [_call_schema(function, f"tool_{number}") for number, function in enumerate(wanted)]
    definitions = {key: value for schema in schemas for key, value in schema.pop("$defs", {}).items()}
    forced = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {**forced, "$defs": definitions} if definitions else forced


def _call_schema(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The schema of a call. Parameters that refer to parts of themselves move into the definitions."""
    arguments: dict[str, Any] = {**(function.get("parameters") or {"properties": {}}), "type": "object"}
    moved = _refer_below(arguments, f"#/$defs/{place}")
    schema = {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    if moved == arguments:
        return schema
    schema["properties"] = {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/{place}"}}
    return {**schema, "$defs": {place: moved}}


def _refer_below(schema: Any, root: str) -> Any:
    """The schema with its references, which start at its own root, moved below another root."""
    if isinstance(schema, list):
        return [_refer_below(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _refer_below(value, root)
        for key, value in schema.items()
    }
