"""Packed tokens: what is text, what is not, and what a range of them keeps."""

from __future__ import annotations

from bough.tokens import NO_TOKENS, Tokens

PICTURE = Tokens.of([-7, -8, -9]).key
"""Keys of three places that are not text."""


def with_picture() -> Tokens:
    """Two tokens of text, three places of a picture that are fed as the token 5, and one token of text."""
    picture = Tokens(PICTURE, Tokens.of([5, 5, 5]).input, (range(3),))
    return Tokens.of([1, 2]) + picture + Tokens.of([3])


def test_the_key_and_the_input_of_text_are_the_same_bytes() -> None:
    tokens = Tokens.of([1, 2, 3])

    assert tokens.key is tokens.input and tokens.spans == ()
    assert tokens.ids == list(tokens) == [1, 2, 3] and len(tokens) == 3 and tokens[-1] == 3


def test_packed_ids_are_not_packed_again() -> None:
    tokens = Tokens.of([1, 2, 3])

    assert Tokens.of(tokens) is tokens
    assert Tokens.of(tokens.key).key is tokens.key


def test_a_range_has_its_own_keys_inputs_and_parts_of_spans() -> None:
    tokens = with_picture()

    assert tokens.ids == [1, 2, 5, 5, 5, 3] and tokens.spans == (range(2, 5),)
    assert tokens[3:] == Tokens(PICTURE[4:] + Tokens.of([3]).key, Tokens.of([5, 5, 3]).input, (range(2),))
    assert tokens[:2] == Tokens.of([1, 2])
    assert tokens[-1:] == Tokens.of([3])


def test_no_tokens_are_nothing_before_others() -> None:
    assert not NO_TOKENS and NO_TOKENS + with_picture() == with_picture()
