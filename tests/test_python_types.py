"""Types and functions of Python, as JSON schemas and as tools, and values of them in JSON text."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from bough import BoughError, Completion, RequestError, SamplingParams
from bough.python_types import describe_tool, make_schema


class Person(BaseModel):
    """Somebody."""

    name: str
    born: date


@dataclass
class Place:
    name: str
    people: list[Person]


def weather(city: str, days: Annotated[int, Field(description="how many")] = 3, *, unit: Literal["C", "F"] = "C") -> str:
    """Tell the weather.

    Unlike a clock.
    """
    return f"{city} {days} {unit}"


async def clock() -> str:
    return ""


class House:
    def ring(self, times: int) -> None:
        """Ring."""


def test_a_function_becomes_a_tool_by_its_signature_and_docstring():
    function = describe_tool(weather)["function"]
    assert (function["name"], function["description"]) == ("weather", "Tell the weather.\n\nUnlike a clock.")
    parameters = function["parameters"]
    assert parameters["required"] == ["city"] and parameters["additionalProperties"] is False
    assert parameters["properties"]["city"] == {"type": "string"}
    assert parameters["properties"]["days"] == {"type": "integer", "default": 3, "description": "how many"}
    assert parameters["properties"]["unit"]["enum"] == ["C", "F"]


def test_a_function_without_arguments_or_docstring_a_method_and_a_class_become_tools():
    assert describe_tool(clock)["function"] == {
        "name": "clock",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    assert describe_tool(House().ring)["function"]["parameters"]["required"] == ["times"]
    assert describe_tool(Person)["function"]["parameters"]["required"] == ["name", "born"]


def positional(a: int, /) -> None: ...
def several(a: int, *others: int) -> None: ...


@pytest.mark.parametrize("function", [lambda a: a, positional, several, partial(weather, "Oslo"), list[int]])
def test_what_cannot_be_called_by_names_is_no_tool(function: Any):
    with pytest.raises(RequestError, match=r"cannot be"):
        describe_tool(function)


@pytest.mark.parametrize("kind", [Person, Place, list[int], Literal["a", "b"], weather])
def test_a_type_is_kept_as_its_schema_among_the_sampling_parameters(kind: Any):
    assert SamplingParams(format=kind).format == make_schema(kind)


def test_a_type_without_a_schema_is_refused_with_the_reason():
    with pytest.raises(RequestError, match="House cannot be described by a JSON schema: Unable to generate"):
        SamplingParams(format=House)  # type: ignore[arg-type]


def test_an_answer_is_parsed_as_the_type_that_was_its_format():
    text = '{"name": "Oslo", "people": [{"name": "Ada", "born": "1990-12-10"}]}'
    place = Completion(text, (), "stop").parse(Place)
    assert place == Place("Oslo", [Person(name="Ada", born=date(1990, 12, 10))])


@pytest.mark.parametrize(
    ("text", "reason"), [('{"name": "Os', "EOF"), ('{"name": 5, "people": []}', r"string \(at name\)")]
)
def test_an_answer_that_was_cut_off_or_is_something_else_is_an_error_with_the_reason(text: str, reason: str):
    with pytest.raises(BoughError, match=f"the answer is no Place: .*{reason}"):
        Completion(text, (), "length").parse(Place)
