"""Bodies as they come over the wire: what is read, and what is refused before any route sees it."""

from __future__ import annotations

import pytest

from bough.errors import RequestError
from bough.server.http.bounds import MAX_DEPTH
from bough.server.http.json_routes import read_json


def test_half_of_a_pair_of_surrogates_becomes_the_replacement_character() -> None:
    assert read_json(b'{"a": "x\\ud800y", "\\udc00": 1, "b": "\\ud83d\\ude00"}') == {
        "a": "x\ufffdy",
        "\ufffd": 1,
        "b": "😀",
    }


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2), f"deeper than {MAX_DEPTH} levels"),
        (b"[" * 100_000, "deeper than"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "cannot be read"),
        (b'{"a": NaN}', "not finite"),
        (b'{"a": [1e999]}', "not finite"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(body: bytes, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        read_json(body)
