"""Python's types and functions as JSON schemas, and JSON as values of these types. pydantic does the work.

It is imported on first use, because most requests name no type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from bough.errors import BoughError, RequestError

Value = TypeVar("Value")


def make_schema(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type (a pydantic model, a dataclass, a TypedDict, `list[int]`), or of a function's arguments.

    Raises RequestError, with pydantic's reason, if there is none.
    """
    from pydantic import PydanticUserError, TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class WithoutTitles(GenerateJsonSchema):
        """A title repeats the name of its field, and would cost tokens of the prompt."""

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    try:
        return TypeAdapter[Any](kind).json_schema(schema_generator=WithoutTitles)
    except (PydanticUserError, NameError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise RequestError(f"{_name_of(kind)} cannot be described by a JSON schema: {reason}") from error


def describe_tool(function: Callable[..., Any]) -> dict[str, Any]:
    """A function, or a class whose fields are the arguments, as a tool of OpenAI's API, described by its docstring."""
    name, schema = _name_of(function), make_schema(function)
    if not name.isidentifier():
        raise RequestError(f"the function {name} cannot be a tool: it needs a name of its own")
    if schema.get("type") != "object":
        raise RequestError(f"{name} cannot be a tool: its arguments must have names, and are {schema.get('type')!r:.80}")
    description = {"description": inspect.cleandoc(function.__doc__)} if function.__doc__ else {}
    return {"type": "function", "function": {"name": name, **description, "parameters": schema}}


def parse_json(text: str, kind: type[Value]) -> Value:
    """The value of a type that JSON text describes. Raises BoughError, with the first reason, if it describes none."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = f" (at {'.'.join(map(str, first['loc']))})" if first["loc"] else ""
        raise BoughError(f"the answer is no {_name_of(kind)}: {first['msg']}{place}: {text[:80]!r}") from error


def _name_of(kind: Any) -> str:
    return str(getattr(kind, "__name__", None) or repr(kind))[:80]
