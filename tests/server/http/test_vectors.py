"""Vectors on the wire: exact numbers, in pieces of bounded size."""

from __future__ import annotations

import base64
import json
import math
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.server.http.vectors import _write_list, write_base64, write_numbers

NUMBERS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False))


@given(NUMBERS)
def test_numbers_are_written_with_all_their_digits(numbers: list[float]) -> None:
    read = json.loads(write_numbers(numbers))

    assert array("f", read) == array("f", numbers)


@given(NUMBERS)
def test_base64_holds_the_numbers_in_4_bytes_each(numbers: list[float]) -> None:
    packed = base64.b64decode(json.loads(write_base64(numbers)))

    assert list(struct.unpack(f"<{len(numbers)}f", packed)) == numbers


@pytest.mark.parametrize("num_entries", [0, 1, 3, 5_000])
def test_a_long_list_comes_in_pieces_of_bounded_size(num_entries: int) -> None:
    entries = [write_numbers([number / 7] * 8) for number in range(num_entries)]
    pieces = list(_write_list({"model": 'a "b"', "usage": {"n": 1}}, "data", iter(entries)))

    whole = json.loads("".join(pieces))
    assert whole == {"model": 'a "b"', "usage": {"n": 1}, "data": [json.loads(entry) for entry in entries]}
    assert len(pieces) == math.ceil(max(1, sum(map(len, entries))) / 2**16)
    assert max(map(len, pieces)) < 2**16 + 200
