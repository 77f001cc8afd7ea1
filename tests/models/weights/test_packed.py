"""The table of packed weights: what is written is read again, and every damage is told with its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest

from bough.errors import UnsupportedModel
from bough.models.weights.packed import BLOCKS, GgufPart, PackedTensor, RowRun, read_packed, write_packed

TENSOR = PackedTensor("Q8_0", (4, 64), (RowRun(100, 136, 2), RowRun(168, 136, 2)))
FILE_BYTES = 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.gguf").write_bytes(b"x" * FILE_BYTES)
    write_packed(tmp_path, [GgufPart(Path("model.gguf"), FILE_BYTES, "b179")], {"a.weight": TENSOR})
    return tmp_path


def change(folder: Path, **changes: object) -> None:
    """Change the table, or with the keys of a tensor its one tensor."""
    table = json.loads((folder / "packed.json").read_text())
    for key, value in changes.items():
        holders = {
            **dict.fromkeys(("type", "shape", "rows"), "tensor"),
            **dict.fromkeys(("path", "num_bytes", "sha256"), "file"),
        }
        holder = holders.get(key)
        {"tensor": table["tensors"].get("a.weight"), "file": table["files"][0]}.get(holder, table)[key] = value
    (folder / "packed.json").write_text(json.dumps(table))


def test_sizes_of_blocks_are_those_of_gguf():
    known = {kind.name: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}  # its older versions know fewer types
    assert {name: known.get(name, sizes) for name, sizes in BLOCKS.items()} == BLOCKS
    assert len(BLOCKS.keys() & known.keys()) > 20


def test_what_was_written_is_read_again(folder):
    packed = read_packed(folder)

    assert packed is not None
    assert packed.files[0].path == folder / "model.gguf"
    assert packed.tensors == {"a.weight": TENSOR}
    assert (TENSOR.num_rows, TENSOR.row_bytes) == (4, 68)


def test_a_folder_without_a_table_has_no_packed_weights(folder):
    (folder / "packed.json").unlink()

    assert read_packed(folder) is None


def test_a_table_of_another_format_is_not_read(folder):
    change(folder, format=1, tensors="something else")

    assert read_packed(folder) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "../model.gguf"}, r"the file '\.\./model\.gguf' is neither in its folder nor an absolute path"),
        ({"path": None}, "a file is {'path': None"),
        ({"path": "other.gguf"}, r"its GGUF file .*/other\.gguf is not there"),
        ({"sha256": 1}, "'sha256': 1"),
        ({"num_bytes": 999}, r"model\.gguf has 1,000 bytes, and had 999"),
        ({"tensors": []}, "it has no list of files, or no tensors"),
        ({"tensors": {"a.weight": []}}, r"a\.weight: its shape is \[\], and must be two or three sizes"),
        ({"shape": [4]}, r"a\.weight: its shape is \[4\]"),
        ({"shape": [4, -64]}, r"its shape is \[4, -64\]"),
        ({"shape": [4, 0]}, r"its shape is \[4, 0\]"),
        ({"shape": [4, 48]}, "its rows have 48 columns, and blocks of Q8_0 hold 32"),
        ({"shape": [5, 64]}, r"it has 4 rows, and its shape \[5, 64\] needs 5"),
        ({"type": "Q2"}, "its type is 'Q2', and can be F32, F16"),
        ({"rows": [[100, 136]]}, "must be lists of offset, step, count and file"),
        ({"rows": [[100, 136, 4.0, 0]]}, "must be lists of offset, step, count and file"),
        ({"rows": [[100, 136, True, 0]]}, "must be lists of offset, step, count and file"),
        ({"rows": [[-100, 136, 4, 0]]}, "must be lists of offset, step, count and file"),
        (
            {"rows": [[100, 67, 4, 0]]},
            "4 rows of 68 bytes from byte 100, 67 apart, are not in file 0 of 1, which has 1,000 bytes",
        ),
        (
            {"rows": [[525, 136, 4, 0]]},
            "4 rows of 68 bytes from byte 525, 136 apart, are not in file 0 of 1, which has 1,000 bytes",
        ),
        ({"rows": [[10**30, 136, 4, 0]]}, "are not in file 0 of 1, which has 1,000 bytes"),
        ({"rows": [[100, 136, 4, 1]]}, "are not in file 1 of 1, which has 0 bytes"),
        ({"rows": [[100, 136, 4, 0], [9000, 136, 0, 0]]}, "0 rows of 68 bytes from byte 9,000"),
    ],
)
def test_a_damaged_table_is_told_with_its_numbers(folder, changes, said):
    change(folder, **changes)

    with pytest.raises(UnsupportedModel, match=said) as caught:
        read_packed(folder)

    assert str(folder) in str(caught.value)


def test_rows_that_end_with_the_file_are_in_it(folder):
    change(folder, rows=[[FILE_BYTES - 68 - 3 * 136, 136, 4, 0]])

    assert read_packed(folder) is not None


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1', "\0"])
def test_a_table_that_is_no_object_is_told_as_such(folder, content):
    (folder / "packed.json").write_text(content)

    with pytest.raises(UnsupportedModel, match=r"packed\.json"):
        read_packed(folder)


def test_a_truncated_file_is_told_with_both_sizes(folder):
    (folder / "model.gguf").write_bytes(b"x" * 999)

    with pytest.raises(UnsupportedModel, match=r"model\.gguf has 999 bytes, and had 1,000 when it was first used"):
        read_packed(folder)
