"""Prepares GGUF files in tests, and compares what was found in them with transformers' own loading."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

from bough.models.files import hash_file
from bough.models.gguf.prepare import fill, make_empty_model, prepare
from bough.models.weights.gguf_header import read_gguf
from bough.models.weights.packed import GgufPart, PackedFile, PackedTensor, read_packed
from bough.types import SilentProgress


def prepare_to(folder: Path, file: Path) -> PackedFile:
    """Prepare a file in `folder`, and return its table."""
    model = read_gguf(file)
    parts = [GgufPart(each.resolve(), each.stat().st_size, hash_file(each)) for each in model.files]
    prepare(model, parts, folder, SilentProgress())
    packed = read_packed(folder)
    assert packed is not None
    return packed


def load_by_library(file: Path) -> dict[str, torch.Tensor]:
    """The weights as transformers reads them from the file."""
    model = read_gguf(file)
    filled = fill(model, make_empty_model(model).float())
    return dict(filled.state_dict())


def unpack(packed: PackedFile, tensor: PackedTensor) -> np.ndarray:
    """The values of a weight, row by row from the bytes of the files."""
    content = [part.path.read_bytes() for part in packed.files]
    starts = [(run.file, run.offset + run.step_bytes * each) for run in tensor.rows for each in range(run.count)]
    rows = np.array([np.frombuffer(content[file], np.uint8, tensor.row_bytes, start) for file, start in starts])
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[tensor.type]).astype(np.float32).reshape(tensor.shape)


def assert_is_model(packed: PackedFile, weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in packed.tensors.items():
        np.testing.assert_array_equal(unpack(packed, tensor), weights[name].float().numpy(), err_msg=name)
