"""Structured output: whatever a model chooses among the allowed tokens, the answer is what was asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bough.errors import RequestError
from bough.generate.constraints import Constraint, ConstraintFactory

END, TURN_END, TOOL = 0, 1, 2
VOCAB_SIZE = 503  # more than the tokenizer has, and no multiple of 8
TEXTS = [
    '{"name": "Ada", "age": 36, "tags": ["red", "blue"]}',
    '{\n    "is_new": true,\n        "x": null\n}',
    "日本語 😀 é",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|turn_end|>", "<|tool|>"],
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")


@pytest.fixture(scope="module")
def factory(tokenizer: PreTrainedTokenizerFast) -> ConstraintFactory:
    assert len(tokenizer) < VOCAB_SIZE
    return ConstraintFactory(tokenizer, VOCAB_SIZE, [END, TURN_END])


def make(factory: ConstraintFactory, format: str | dict[str, Any]) -> Constraint:
    constraint = factory.make(format)
    assert constraint is not None
    return constraint


def allowed_ids(constraint: Constraint) -> list[int]:
    mask = constraint.allowed()
    return [token_id for token_id in range(len(mask) * 8) if mask[token_id // 8] >> (token_id % 8) & 1]


def can_write(constraint: Constraint, tokenizer: PreTrainedTokenizerFast, text: str) -> bool:
    """Take the text token by token as far as it is allowed; tells whether that was all of it."""
    for token_id in tokenizer.encode(text):
        if token_id not in allowed_ids(constraint):
            return False
        constraint.accept(token_id)
    return True


def walk(constraint: Constraint, tokenizer: PreTrainedTokenizerFast, seed: int) -> str:
    """An answer of random allowed tokens, the longer it gets the more those that close something."""
    source = random.Random(seed)
    chosen: list[int] = []
    while not constraint.is_done:
        choices = allowed_ids(constraint)
        if END in choices:
            break
        closing = [each for each in choices if tokenizer.decode([each])[:1] in ('"', "}", "]")]
        token_id = source.choice(closing if closing and source.random() < len(chosen) / 40 else choices)
        constraint.accept(token_id)
        chosen.append(token_id)
        assert len(chosen) < 500
    return tokenizer.decode(chosen)


def obj(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False, **more}


def is_tree(value: Any) -> bool:
    return set(value) == {"label", "children"} and isinstance(value["label"], str) and all(map(is_tree, value["children"]))


TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {"tree": obj({"label": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}})},
}

SCHEMAS: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "enum": (
        obj({"color": {"enum": ["red", "日本", 3]}}),
        lambda v: set(v) == {"color"} and v["color"] in ("red", "日本", 3),
    ),
    "const": (obj({"kind": {"const": "point"}}), lambda v: v == {"kind": "point"}),
    "anyOf": (
        obj({"value": {"anyOf": [{"type": "integer"}, {"type": "null"}, {"enum": ["none"]}]}}),
        lambda v: v["value"] is None or v["value"] == "none" or type(v["value"]) is int,
    ),
    "oneOf": (
        {"oneOf": [obj({"a": {"type": "boolean"}}), obj({"b": {"type": "boolean"}})]},
        lambda v: set(v) in ({"a"}, {"b"}) and all(type(each) is bool for each in v.values()),
    ),
    "oneOf that overlaps": (
        {"oneOf": [{"type": "boolean"}, {"enum": [True, "maybe"]}]},
        lambda v: v in (True, False, "maybe"),
    ),
    "array": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
        lambda v: 1 <= len(v) <= 4 and all(type(each) is bool for each in v),
    ),
    "nested objects": (
        obj({"outer": obj({"inner": obj({"deep": {"type": "string"}})})}),
        lambda v: isinstance(v["outer"]["inner"]["deep"], str) and set(v) == {"outer"} and set(v["outer"]) == {"inner"},
    ),
    "$ref and $defs": (TREE, is_tree),
    "bounded string": (
        obj({"name": {"type": "string", "minLength": 2, "maxLength": 5}}),
        lambda v: set(v) == {"name"} and 2 <= len(v["name"]) <= 5,
    ),
    "optional property": (
        {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
            "additionalProperties": False,
        },
        lambda v: v == {} or (set(v) == {"n"} and v["n"] in range(1, 10)),
    ),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SCHEMAS)
def test_random_tokens_make_json_that_keeps_to_the_schema(
    factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast, name: str, seed: int
):
    schema, is_right = SCHEMAS[name]
    assert is_right(json.loads(walk(make(factory, schema), tokenizer, seed)))


@pytest.mark.parametrize("seed", range(10))
def test_random_tokens_make_a_json_object_when_json_is_asked_for(
    factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast, seed: int
):
    assert isinstance(json.loads(walk(make(factory, "json"), tokenizer, seed)), dict)


@pytest.mark.parametrize("text", ['{"日本語": "😀 é \\n \\" \\\\"}', '{"a": [1, -2.5e3, true, null, {"b": {}}]}', "{}"])
def test_any_object_can_be_written_when_json_is_asked_for(
    factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast, text: str
):
    constraint = make(factory, "json")
    assert can_write(constraint, tokenizer, text)
    assert constraint.is_done


@pytest.mark.parametrize("text", ["[1]", '"a"', "1", " {", "{'a'", '{"a" "b"', '{"a": <|tool|>', '{"a": "<|end|>'])
def test_what_is_no_json_object_cannot_be_written(
    factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast, text: str
):
    assert not can_write(make(factory, "json"), tokenizer, text)


def test_a_property_that_the_schema_does_not_name_cannot_be_written(
    factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast
):
    schema = obj({"a": {"type": "integer"}})
    assert can_write(make(factory, schema), tokenizer, '{"a": 1}')
    assert not can_write(make(factory, schema), tokenizer, '{"a": 1, "b": 2}')
    assert not can_write(make(factory, schema), tokenizer, "{}")


# Closed objects

POINT: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
NAMED: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
LIST = {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"x": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}}}}}
BOTH = {"allOf": [{"$ref": "#/$defs/p"}, NAMED], "$defs": {"p": POINT}}
NESTED = {"properties": {"at": {"$ref": "#/$defs/p"}}, "allOf": [{"properties": {"to": POINT}}], "$defs": {"p": POINT}}


@pytest.mark.parametrize(
    ("schema", "fits", "has_more"),
    [
        (POINT, '{"x": 1}', '{"x": 1, "y": 2}'),
        ({"type": "array", "items": POINT}, '[{"x": 1}]', '[{"x": 1, "y": 2}]'),
        ({"properties": {"at": {"anyOf": [POINT, {"type": "null"}]}}}, '{"at": {"x": 1}}', '{"at": {"x": 1, "y": 2}}'),
        (LIST, '{"x": 1, "next": {"x": 2}}', '{"x": 1, "next": {"y": 2}}'),
        ({"allOf": [POINT, NAMED]}, '{"x": 1, "name": "a"}', '{"x": 1, "name": "a", "y": 2}'),
        (BOTH, '{"x": 1, "name": "a"}', '{"x": 1, "name": "a", "y": 2}'),
        (NESTED, '{"at": {"x": 1}, "to": {"x": 2}}', '{"at": {"x": 1, "to": 2}}'),
        ({"$ref": "#/$defs/p", **NAMED, "$defs": {"p": POINT}}, '{"x": 1, "name": "a"}', '{"x": 1, "y": 2}'),
        ({**NAMED, "anyOf": [POINT, {"properties": {"y": {}}}]}, '{"name": "a", "y": 1}', '{"name": "a", "y": 1, "x": 2}'),
        ({"oneOf": [POINT, NAMED]}, '{"name": "a"}', '{"name": "a", "x": 1}'),
        ({"properties": {}}, "{}", '{"x": 1}'),
        ({**POINT, "required": ["x", "y"]}, '{"x": 1, "y": 2}', '{"x": 1, "y": 2, "z": 3}'),
    ],
)
def test_an_object_has_the_properties_that_its_schema_names_and_no_others(
    factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast, schema: dict[str, Any], fits: str, has_more: str
):
    constraint = make(factory, schema)
    assert can_write(constraint, tokenizer, fits)
    assert END in allowed_ids(constraint)
    assert not can_write(make(factory, schema), tokenizer, has_more)


@pytest.mark.parametrize(
    "schema",
    [
        {**POINT, "additionalProperties": True},
        {**POINT, "additionalProperties": {"type": "integer"}},
        {**POINT, "patternProperties": {"^y": {"type": "integer"}}},
        {"allOf": [POINT, {"additionalProperties": True}]},
        {"type": "object"},
        {"required": ["x"]},
    ],
)
def test_a_schema_can_open_its_object_and_one_without_properties_is_open(
    factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast, schema: dict[str, Any]
):
    assert can_write(make(factory, schema), tokenizer, '{"x": 1, "y": 2}')


@pytest.mark.parametrize(
    ("schema", "start", "repeated", "other"),
    [
        ("json", '{"ab": 1, ', '"ab"', '"abc": 2}'),
        ("json", '{"ab": 1, "', 'ab"', 'a": 2}'),
        ("json", '{"ab": [{"c": {"ab": 1}}, {"c": 2, ', '"c"', '"ab": 2}]}'),
        ("json", '{"a\\"b": "ab", "a\\', '"b"', '"c": 2}'),
        ("json", '{"日本": 1, "日', '本"', '本語": 1}'),
        ("json", '{"": 1, ', '""', '"a": 2}'),
        ({**POINT, "additionalProperties": {"type": "integer"}}, '{"x": 1, "y": 1, "', 'y"', 'z": 1}'),
        (
            {"type": "object", "patternProperties": {"^a+$": True}, "additionalProperties": False},
            '{"a": 1, "',
            'a"',
            'aa": 1}',
        ),
    ],
)
def test_no_key_is_written_twice_in_one_object(
    factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast, schema: Any, start: str, repeated: str, other: str
):
    assert not can_write(make(factory, schema), tokenizer, start + repeated)
    constraint = make(factory, schema)
    assert can_write(constraint, tokenizer, start + other)
    assert constraint.is_done


def test_a_key_is_repeated_where_the_schema_allows_no_other(factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast):
    schema = {"type": "object", "patternProperties": {"^a$": {"type": "integer"}}, "additionalProperties": False}
    assert can_write(make(factory, schema), tokenizer, '{"a": 1, "a": 2}')


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_repeat_no_key(factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast, seed: int):
    def no_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    keys = {"type": "object", "patternProperties": {"^[ab]+$": {"enum": [1]}}, "additionalProperties": False}
    schema = {**keys, "minProperties": 3}
    json.loads(walk(make(factory, schema), tokenizer, seed), object_pairs_hook=no_repetition)


def test_properties_make_an_object(factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast):
    assert not can_write(make(factory, {"properties": {"x": {"type": "integer"}}}), tokenizer, "1")


def test_a_property_may_be_called_like_a_keyword(factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast):
    schema = {"properties": {"properties": {"type": "string"}, "items": POINT, "$ref": {"type": "string"}}}
    assert can_write(make(factory, schema), tokenizer, '{"properties": "a", "items": {"x": 1}, "$ref": "b"}')
    assert not can_write(make(factory, schema), tokenizer, '{"properties": "a", "items": {"x": 1, "y": 2}')


def test_what_only_looks_like_a_schema_stays_as_it_is(factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast):
    value = {"properties": {"x": 1}}
    assert can_write(make(factory, {"enum": [value]}), tokenizer, json.dumps(value))


def test_the_schema_of_the_caller_is_not_changed(factory: ConstraintFactory):
    schema = {"properties": {"at": POINT}, "allOf": [NAMED]}
    before = json.dumps(schema)
    factory.make(schema)
    assert json.dumps(schema) == before


def test_a_schema_that_joins_too_many_parts_is_refused(factory: ConstraintFactory):
    names = {f"p{number}": {} for number in range(3_000)}
    with pytest.raises(RequestError, match="joins too many parts"):
        factory.make({"properties": names, "anyOf": [{"properties": {}}] * 3_000})


# The end


def test_every_end_token_is_allowed_exactly_where_the_answer_is_complete(
    factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast
):
    constraint = make(factory, "json")
    for token_id in tokenizer.encode('{"a": [{"b": 1}, 2]}'):
        assert not {END, TURN_END} & set(allowed_ids(constraint))
        assert not constraint.is_done
        constraint.accept(token_id)

    assert allowed_ids(constraint) == [END, TURN_END]
    assert constraint.is_done


def test_an_answer_that_may_end_or_go_on_is_not_done(factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast):
    constraint = make(factory, {"type": "integer"})
    assert can_write(constraint, tokenizer, "12")

    assert {END, TURN_END, *tokenizer.encode("3")} <= set(allowed_ids(constraint))
    assert not constraint.is_done


def test_after_the_end_token_the_answer_is_done(factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast):
    constraint = make(factory, {"type": "integer"})
    assert can_write(constraint, tokenizer, "12")
    constraint.accept(TURN_END)

    assert constraint.is_done


# Blanks


def test_indented_json_can_be_written(factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast):
    text = json.dumps({"a": [1, {"b": [2, 3]}], "c": {"d": "e"}}, indent=2)
    assert can_write(make(factory, "json"), tokenizer, text)


@pytest.mark.parametrize("before", ["{", '{"a":', '{"a": 1', '{"a": 1,', '{"a": ['])
def test_blanks_between_json_tokens_come_to_an_end(
    factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast, before: str
):
    for blanks in ("  ", "\n\n", "\t", "\r\n\r", "\n" + 17 * " ", "\n" + 5 * "\t", "\n \t"):
        assert not can_write(make(factory, "json"), tokenizer, before + blanks)


def test_a_schema_cannot_ask_for_blanks_without_end(factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast):
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": r"\s*"}}
    assert not can_write(make(factory, schema), tokenizer, "{" + " " * 25)


# Masks


def test_a_mask_covers_the_vocabulary_of_the_model_and_never_allows_what_the_tokenizer_lacks(
    factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast
):
    constraint = make(factory, "json")
    assert can_write(constraint, tokenizer, '{"')

    assert len(constraint.allowed()) == (VOCAB_SIZE + 7) // 8
    assert len(allowed_ids(constraint)) > 100 and max(allowed_ids(constraint)) < len(tokenizer)


def test_a_model_with_fewer_logits_than_the_tokenizer_has_tokens_gets_a_mask_of_its_own_size(
    tokenizer: PreTrainedTokenizerFast,
):
    constraint = make(ConstraintFactory(tokenizer, 200, [END]), "json")
    assert len(constraint.allowed()) == 25


def test_special_tokens_are_never_allowed_inside_a_string(factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast):
    constraint = make(factory, "json")
    assert can_write(constraint, tokenizer, '{"a": "')
    assert not {END, TURN_END, TOOL} & set(allowed_ids(constraint))


def test_constraints_of_one_factory_do_not_touch_each_other(factory: ConstraintFactory, tokenizer: PreTrainedTokenizerFast):
    first, second = make(factory, "json"), make(factory, "json")
    before = second.allowed()
    can_write(first, tokenizer, '{"a": 1')

    assert second.allowed() == before
    assert first.allowed() != before


# What cannot be served


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        ("yaml", "'yaml'"),
        ("", '"json" or a JSON schema'),
        ({"type": "nonsense"}, "nonsense"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "https://example.com/schema.json"}, "not fetch"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": 5}, "properties"),
        ({"allOf": 5}, "allOf"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "Unsatisfiable"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"enum": {1, 2}}, "not JSON serializable"),
    ],
)
def test_a_format_that_cannot_be_kept_is_refused_with_the_reason(factory: ConstraintFactory, format: Any, reason: str):
    with pytest.raises(RequestError, match=reason):
        factory.make(format)


def test_a_token_that_is_not_allowed_is_an_error_and_never_an_early_end(factory: ConstraintFactory):
    constraint = make(factory, "json")
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot be followed") as caught:
            constraint.accept(END)
        assert "<state>" not in str(caught.value)
    with pytest.raises(RequestError, match="cannot be followed"):
        constraint.allowed()
