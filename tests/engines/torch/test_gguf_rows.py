"""Rows of GGUF files: read as the table names them, unpacked as gguf does, and nothing but an error from a shorter file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from bough.config import Settings
from bough.engines.torch.gguf_rows import read_rows, unpack_rows
from bough.engines.torch.model_loader import load_model
from bough.errors import UnsupportedModel
from bough.models.weights.packed import GgufPart, PackedFile, PackedTensor, RowRun
from tests.models.gguf.prepared import load_by_library, prepare_to
from tests.models.moe_gguf import write_moe_gguf
from tests.models.tiny_gguf import split_gguf, write_gguf
from tests.packed_models import unpack_model

SIZE = 40  # bytes of a row of 64 columns in Q4_1


@pytest.fixture
def parts(tmp_path: Path) -> tuple[GgufPart, ...]:
    random = np.random.default_rng(1)
    for name in "ab":
        (tmp_path / name).write_bytes(random.integers(0, 100, 4000, np.uint8).tobytes())
    return tuple(GgufPart(tmp_path / name, 4000, "") for name in "ab")


def rows_of(parts: tuple[GgufPart, ...], tensor: PackedTensor) -> list[bytes]:
    content = [part.path.read_bytes() for part in parts]
    starts = [(run.file, run.offset + run.step_bytes * each) for run in tensor.rows for each in range(run.count)]
    return [content[file][start : start + SIZE] for file, start in starts]


@pytest.mark.parametrize(
    "runs",
    [
        [RowRun(120, SIZE, 9)],
        [RowRun(120, 2 * SIZE, 9)],
        [RowRun(0, 2 * SIZE, 4), RowRun(SIZE, 2 * SIZE, 4), RowRun(800, SIZE, 3)],
        [RowRun(3000, SIZE, 2), RowRun(0, SIZE, 2), RowRun(3960, SIZE, 1)],
        [RowRun(0, SIZE, 3, file=1), RowRun(40, SIZE, 3), RowRun(400, 120, 3, file=1)],
    ],
)
def test_any_range_of_rows_is_read_as_the_table_names_them(parts: Any, runs: list[RowRun]) -> None:
    tensor = PackedTensor("Q4_1", (sum(run.count for run in runs), 64), tuple(runs))
    expected = rows_of(parts, tensor)
    for first in range(tensor.num_rows + 1):
        for last in range(first, tensor.num_rows + 1):
            found = read_rows(PackedFile(parts, {}), tensor, first, last)
            assert [bytes(row) for row in found.numpy()] == expected[first:last]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_unpacked_as_gguf_does(parts: Any, dtype: torch.dtype) -> None:
    tensor = PackedTensor("Q4_1", (2, 4, 64), (RowRun(0, 2 * SIZE, 4), RowRun(SIZE, 2 * SIZE, 4)))
    rows = np.frombuffer(b"".join(rows_of(parts, tensor)), np.uint8).reshape(8, SIZE)
    out = torch.empty(2, 4, 64, dtype=dtype)

    unpack_rows(PackedFile(parts, {}), tensor, out)

    assert torch.equal(out.view(8, 64), torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType.Q4_1)).to(dtype))


def test_a_file_that_was_truncated_since_is_an_error_with_the_numbers(parts: Any) -> None:
    tensor = PackedTensor("Q4_1", (4, 64), (RowRun(0, SIZE, 4),))
    parts[0].path.write_bytes(bytes(100))

    with pytest.raises(UnsupportedModel, match="ends at byte 100, and rows up to byte 160 are needed"):
        read_rows(PackedFile(parts, {}), tensor, 0, 4)
    parts[0].path.unlink()
    with pytest.raises(UnsupportedModel, match=r"cannot read .*No such file"):
        read_rows(PackedFile(parts, {}), tensor, 0, 4)


@pytest.mark.parametrize("settings", [{}, {"weights": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float16"}])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "moe", "split"])
def test_a_model_loads_from_its_file_as_transformers_reads_it(
    tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    file = tmp_path / "tiny.gguf"
    if architecture == "moe":
        write_moe_gguf(file, {"blk.0.attn_output.weight": gguf.GGMLQuantizationType.TQ2_0})
    elif architecture == "split":
        file, _ = split_gguf(tmp_path, ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"])
    else:
        write_gguf(file, gguf.GGMLQuantizationType.Q5_0, architecture=architecture)
    prepare_to(tmp_path / "made", file)
    expected = load_by_library(file)

    loaded = load_model(tmp_path / "made", Settings(device="cpu", **settings))

    found = unpack_model(loaded.model).state_dict()
    assert found.keys() == expected.keys()
    dtype = getattr(torch, settings.get("dtype", "float32"))
    for name, each in found.items():
        assert torch.equal(each, expected[name].to(dtype)), name


def test_a_table_that_does_not_fit_the_model_is_told_with_the_shapes(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    prepare_to(tmp_path / "made", tmp_path / "tiny.gguf")
    config = tmp_path / "made" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))

    with pytest.raises(UnsupportedModel, match=r"weights in .* are not those of the model, such as model\.layers\.1"):
        load_model(tmp_path / "made", Settings(device="cpu"))
