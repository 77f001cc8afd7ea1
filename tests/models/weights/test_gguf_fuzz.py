"""Damaged headers of GGUF files: each is read, or refused in one line. Nothing else is raised."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import pytest

from bough.errors import UnsupportedModel
from bough.models.weights.gguf_header import read_gguf, require_model_keys
from tests.models.tiny_gguf import write_gguf

NUMBERS = [0, 1, 2, 7, 8, 9, 31, 255, 2**16, 2**31, 2**32 - 1, 2**48, 2**63, 2**64 - 1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, gguf.GGMLQuantizationType.Q8_0)
    return file.read_bytes()


def damage(whole: bytes, chance: random.Random) -> bytes:
    """The file with some bytes changed, removed, repeated or cut off, mostly in its header."""
    content = bytearray(whole)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(min(chance.choice([64, 2000, len(whole)]), len(content)))
        way = chance.randrange(5)
        if way == 0:
            content[at] = chance.randrange(256)
        elif way == 1:
            size = chance.choice([1, 4, 8])
            content[at : at + size] = (chance.choice(NUMBERS) % 2 ** (8 * size)).to_bytes(size, "little")
        elif way == 2:
            del content[max(1, at) : max(1, at) + chance.randint(1, 40)]
        elif way == 3:
            content[at:at] = content[at : at + chance.randint(1, 40)]
        else:
            del content[max(1, at) :]
    return bytes(content)


def check_damaged(folder: Path, whole: bytes, seeds: range) -> int:
    """How many of the files were refused."""
    file, refused = folder / "bad.gguf", 0
    for seed in seeds:
        file.write_bytes(damage(whole, random.Random(seed)))
        try:
            model = read_gguf(file)
            require_model_keys(file, model.header)
            size = file.stat().st_size
            assert all(each.offset + each.num_bytes <= size for each in model.header.tensors), seed
        except UnsupportedModel as error:
            assert "\n" not in str(error), seed
            assert len(str(error)) < 600, seed
            refused += 1
    return refused


def test_a_damaged_header_is_read_or_refused_in_one_line(tmp_path, whole):
    assert check_damaged(tmp_path, whole, range(300)) > 100


@pytest.mark.slow
def test_many_damaged_headers_are_read_or_refused_in_one_line(tmp_path, whole):
    assert check_damaged(tmp_path, whole, range(1000, 41_000)) > 10_000
