"""Text from tokens: whole characters, however the bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bough.generate.text import Detokenizer

FAMILY = "👩‍👩‍👧‍👦"


class Pieces:
    """A tokenizer whose i-th token is the i-th piece."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def detokenize(*pieces: bytes, **options: bool) -> list[str]:
    detokenizer = Detokenizer(Pieces(*pieces), **options)
    return [*(detokenizer.add(token_id) for token_id in range(len(pieces))), detokenizer.flush()]


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(each % (len(data) + 1) for each in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(borders)]


BYTES = st.one_of(
    st.binary(max_size=40),
    st.text(st.characters(codec="utf-8"), max_size=20).map(str.encode),
    st.lists(st.sampled_from([b"\xf0\x9f\x98\x80", b"\xe2\x80", b"\xff", b"\xed\xa0\x80", b"a", b"\xc3"])).map(b"".join),
)


@given(BYTES, st.lists(st.integers(0, 60)))
@example(b"\xed\xa0\x80\xed\xb0\x80", [1, 2, 3, 4, 5])
@example(FAMILY.encode(), [2, 5, 9, 13])
def test_the_pieces_joined_are_the_bytes_decoded_at_once(data: bytes, cuts: list[int]):
    assert "".join(detokenize(*cut(data, cuts))) == data.decode("utf-8", "replace")


@given(st.text(st.characters(codec="utf-8"), max_size=20), st.lists(st.integers(0, 60)))
@example("日本語のテキスト", list(range(24)))
@example(FAMILY, list(range(25)))
def test_every_piece_of_valid_text_is_made_of_its_characters(text: str, cuts: list[int]):
    remaining = text
    for piece in detokenize(*cut(text.encode(), cuts)):
        assert remaining.startswith(piece)
        remaining = remaining.removeprefix(piece)
    assert remaining == ""


def test_an_incomplete_character_is_held_back_until_its_last_byte():
    assert detokenize(b"a\xe6", b"\x97", b"\xa5b") == ["a", "", "日b", ""]


def test_an_emoji_with_joiners_comes_code_point_by_code_point():
    emoji = "👩‍🚀".encode()
    assert "".join(detokenize(*[bytes([byte]) for byte in emoji])) == "👩‍🚀"
    assert detokenize(emoji[:4], emoji[4:6], emoji[6:])[:3] == ["👩", "", "\u200d🚀"]


def test_invalid_bytes_become_replacements_as_soon_as_they_are_known_to_be_invalid():
    assert detokenize(b"a\xff", b"b") == ["a�", "b", ""]
    assert detokenize(b"\xe6\x97", b"b") == ["", "�b", ""]


def test_bytes_left_over_at_the_end_become_one_replacement():
    assert detokenize(b"a\xf0\x9f\x98") == ["a", "�"]


def test_nothing_is_left_after_a_flush():
    detokenizer = Detokenizer(Pieces(b"\xf0\x9f"))
    detokenizer.add(0)

    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


def test_a_token_without_bytes_shows_nothing():
    assert detokenize(b"", b"a", b"") == ["", "a", "", ""]


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b" Hello", b" world"], "Hello world"),
        ([b"", b" Hello"], "Hello"),  # a special token before it does not count
        ([b" ", b" a"], " a"),
        ([b"  a"], " a"),
        ([b"Hello", b" world"], "Hello world"),
    ],
)
def test_only_the_first_space_of_the_first_word_is_stripped(pieces: list[bytes], text: str):
    assert "".join(detokenize(*pieces, strip_leading_space=True)) == text


def test_a_leading_space_is_kept_unless_stripping_was_asked_for():
    assert "".join(detokenize(b" Hello")) == " Hello"
