"""The types in which rows are kept: what is rounded, what is clipped, and which type a model gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bough.engines.torch.row_types import LARGEST_HALF, ROW_TYPES, ClippedNumbers, decode, encode, kept_width
from bough.errors import SettingsError
from tests.contract.driving import make_ids, new_lane, run
from tests.packed_models import has_kernels, load_packed, make_wide_model, save_model

CPU = torch.device("cpu")
NEEDS_KERNELS = pytest.mark.skipif(not has_kernels(), reason="there are no CPU kernels")


def rounded(rows: torch.Tensor, kv: str, clipped: ClippedNumbers | None = None) -> torch.Tensor:
    kept = torch.empty(*rows.shape[:-1], kept_width(ROW_TYPES[kv], rows.shape[-1]), dtype=ROW_TYPES[kv])
    encode(rows, kept, clipped or ClippedNumbers(CPU))
    return decode(kept, rows.shape[-1], torch.float32)


@pytest.mark.parametrize(("kv", "largest_error"), [("float16", 2**-11), ("bfloat16", 2**-8), ("int8", 0.51 / 127)])
@pytest.mark.parametrize("dim", [16, 32, 80, 128])
def test_rounding_moves_a_number_by_half_a_unit_at_most(kv: str, largest_error: float, dim: int) -> None:
    rows = torch.randn(2, 3, 5, dim, generator=torch.Generator().manual_seed(1))

    error = (rounded(rows, kv) - rows).abs()

    assert float((error / rows.abs().amax(-1, keepdim=True)).max()) <= largest_error


def test_a_row_is_rounded_for_itself() -> None:
    rows = torch.randn(1, 2, 9, 48, generator=torch.Generator().manual_seed(2))

    together = rounded(rows, "int8")

    for row in range(9):
        assert torch.equal(rounded(rows[:, :, row : row + 1], "int8"), together[:, :, row : row + 1])


def test_rows_of_zeros_and_of_tiny_numbers_stay_finite() -> None:
    rows = torch.tensor([[0.0] * 32, [1e-12] * 32, [1e-3] * 31 + [-1e-3]])

    assert torch.equal(rounded(rows, "int8")[0], torch.zeros(32))
    assert bool(rounded(rows, "int8").isfinite().all())


@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_numbers_that_are_too_large_are_clipped_counted_and_named_once(kv: str, caplog: pytest.LogCaptureFixture) -> None:
    clipped = ClippedNumbers(CPU)
    rows = torch.full((1, 32), 2.0 * LARGEST_HALF)

    found = rounded(rows, kv, clipped)
    clipped.log_once()
    clipped.log_once()

    assert float(found.max()) == pytest.approx(LARGEST_HALF, rel=1e-3)
    assert clipped.count == 32
    assert [record.message.count("kv=bfloat16") for record in caplog.records] == [1]


def make_folder(folder: Path, dtype: torch.dtype, gain: float = 1.0) -> Path:
    """A llama in a folder; its keys are larger by `gain`."""
    model = make_wide_model("llama")
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data *= gain
    return save_model(model, folder / "model", dtype)


@NEEDS_KERNELS
@pytest.mark.parametrize(("dtype", "kv"), [(torch.bfloat16, "float16"), (torch.float32, "float32")])
def test_auto_is_16_bits_beside_weights_of_16_bits(dtype: torch.dtype, kv: str, tmp_path: Path) -> None:
    engine = load_packed(make_folder(tmp_path, dtype), kv="auto")

    assert engine.describe()["kv"].startswith(f"{kv} (")
    assert engine.info.kv == ("" if kv == engine.info.dtype else kv)


@NEEDS_KERNELS
def test_auto_is_bfloat16_if_keys_are_too_large_for_float16(tmp_path: Path) -> None:
    engine = load_packed(make_folder(tmp_path, torch.bfloat16, gain=1e6), kv="auto")

    assert engine.describe()["kv"].startswith("bfloat16 (")


@NEEDS_KERNELS
def test_the_kernels_count_what_they_clip(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = load_packed(make_folder(tmp_path, torch.bfloat16, gain=1e6), kv="float16")

    run(engine, new_lane(engine, 8), make_ids(engine, 8), [8])

    assert engine.num_clipped > 0
    assert any("kv=bfloat16" in record.message for record in caplog.records)


@NEEDS_KERNELS
def test_a_token_takes_the_bytes_of_its_type(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, torch.bfloat16)
    sizes = {kv: sum(group.bytes_per_token for group in load_packed(folder, kv=kv).groups) for kv in ROW_TYPES}
    heads = sizes["float32"] // 4 // 16  # of 16 numbers each

    assert sizes == {"float32": 64 * heads, "float16": 32 * heads, "bfloat16": 32 * heads, "int8": 18 * heads}


def test_an_unknown_type_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="kv is 'int4', and must be auto, float32, float16, bfloat16 or int8"):
        load_packed(tmp_path, kv="int4")
