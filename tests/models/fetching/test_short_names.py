"""Short names: what each stands for, and which models fit into a machine's memory."""

from __future__ import annotations

import pytest

from bough.models.fetching.short_names import SHORT_NAMES, find_short_name, list_catalogue
from bough.models.store import plain_name

GB = 10**9


def test_every_short_name_is_a_name_and_means_one_model():
    names = [name for short in SHORT_NAMES for name in short.names]

    assert len(names) == len(set(names))
    assert [plain_name(name) for name in names] == names
    assert all(find_short_name(name) in SHORT_NAMES for name in names)
    for short in SHORT_NAMES:
        sources = [short.source(prefers_gguf) for prefers_gguf in (True, False)]
        assert short.license and short.num_parameters and all(source.download_bytes for source in sources)
        assert all(source.repository.count("/") == (short.name != "smollm2:135m") for source in sources)


def test_a_name_without_a_tag_means_the_usual_size():
    assert find_short_name("qwen3") is find_short_name("Qwen3:4B") is not None
    assert find_short_name("qwen3:5b") is None


def test_a_name_means_a_quantized_file_where_weights_stay_quantized_and_16_bits_elsewhere():
    (gguf,) = (each for each in list_catalogue(8 * GB, prefers_gguf=True) if each.name == "qwen3:4b")
    (whole,) = (each for each in list_catalogue(8 * GB, prefers_gguf=False) if each.name == "qwen3:4b")

    assert (gguf.repository, gguf.weights, gguf.fits) == ("Qwen/Qwen3-4B-GGUF", "Q4_K_M", "yes")
    assert (whole.repository, whole.weights, whole.fits) == ("Qwen/Qwen3-4B", "16 bits", "no")
    assert gguf.download_bytes < whole.download_bytes / 3


def test_a_model_whose_scaled_rotation_is_not_read_from_gguf_files_is_fetched_whole():
    found = {each.name: each.weights for each in list_catalogue(8 * GB, prefers_gguf=True)}

    assert {found[name] for name in ("llama3.2:3b", "gemma3:4b", "phi4-mini:3.8b")} == {"16 bits"}


@pytest.mark.parametrize(
    ("memory_gb", "name", "fits"),
    [
        (8, "qwen3:4b", "yes"),
        (8, "qwen3:8b", "tight"),
        (8, "qwen3:14b", "no"),
        (16, "qwen3:8b", "yes"),
        (34, "qwen3:30b", "yes"),
        (34, "gpt-oss:20b", "no"),  # its weights are unpacked to 16 bits
    ],
)
def test_a_model_fits_if_weights_state_and_program_leave_a_quarter_to_others(memory_gb, name, fits):
    (found,) = (each for each in list_catalogue(memory_gb * GB, prefers_gguf=True) if each.name == name)

    assert found.fits == fits
