"""Schemas as Ollama reads them: objects without properties that nobody named."""

from __future__ import annotations

from typing import Any

import pytest

from bough.server.apis.ollama.format import close_objects

TEXT = {"type": "string"}


def named(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def closed(**properties: Any) -> dict[str, Any]:
    return {**named(**properties), "additionalProperties": False}


def test_an_object_has_the_properties_that_are_named():
    assert close_objects({**named(a=TEXT), "required": ["a"]}) == {**closed(a=TEXT), "required": ["a"]}


def test_objects_within_are_closed_wherever_they_are():
    schema = {
        "$defs": {"Pet": named(name=TEXT)},
        **named(
            pets={"type": "array", "items": {"$ref": "#/$defs/Pet"}},
            home={"anyOf": [named(street=TEXT), {"type": "null"}]},
            rest={"type": "object", "additionalProperties": named(a=TEXT)},
        ),
    }

    found = close_objects(schema)

    assert found["additionalProperties"] is False
    assert found["$defs"]["Pet"] == closed(name=TEXT)
    assert found["properties"]["home"]["anyOf"] == [closed(street=TEXT), {"type": "null"}]
    assert found["properties"]["rest"]["additionalProperties"] == closed(a=TEXT)


def test_properties_make_an_object():
    assert close_objects({"properties": {"a": TEXT}}) == closed(a=TEXT)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "string", "enum": ["properties"]},
        {**named(a=TEXT), "additionalProperties": True},
        {**named(a=TEXT), "patternProperties": {"^x": TEXT}},
        {**named(a=TEXT), "required": ["a", "b"]},
        {"const": {"properties": {"a": 1}}},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {}, "required": "a"},
    ],
)
def test_what_speaks_of_other_properties_or_of_none_stays_as_it_is(schema):
    assert close_objects(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [named(a=TEXT), named(b=TEXT)]},
        {**named(a=TEXT), "anyOf": [named(b=TEXT), named(c=TEXT)]},
        named(x={"$defs": {"A": named(a=TEXT)}, **named(b=TEXT), "$ref": "#/$defs/A"}),
    ],
)
def test_an_object_that_is_described_in_several_places_stays_open(schema):
    assert close_objects(schema) == schema


def test_a_single_part_of_all_is_closed():
    schema = {"$defs": {"A": named(a=TEXT)}, **named(x={"allOf": [{"$ref": "#/$defs/A"}], "description": "An A."})}

    assert close_objects(schema)["$defs"]["A"] == closed(a=TEXT)


def test_a_property_may_be_called_like_a_keyword():
    assert close_objects(named(properties=TEXT, items=named(a=TEXT))) == closed(properties=TEXT, items=closed(a=TEXT))


def test_the_schema_of_the_caller_is_not_changed():
    schema = named(a=named(b=TEXT))

    close_objects(schema)

    assert schema == named(a=named(b=TEXT))
