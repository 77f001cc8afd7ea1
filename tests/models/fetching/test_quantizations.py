"""Which file of a GGUF repository is meant."""

from __future__ import annotations

import pytest

from bough.errors import ModelNotFound, UnsupportedModel
from bough.models.fetching.quantizations import choose_file, quantization_of
from bough.models.fetching.short_names import SHORT_NAMES, find_short_name
from bough.models.store import plain_name

FILES = [
    "README.md",
    "mmproj-Model-F16.gguf",
    "Model-F16.gguf",
    "Model-IQ3_M.gguf",
    "Model-Q4_K_M.gguf",
    "Model.Q8_0.gguf",
    "big/Model-BF16-00001-of-00002.gguf",
    "big/Model-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        ("", "Model-Q4_K_M.gguf"),
        ("Q4_K_M", "Model-Q4_K_M.gguf"),
        ("q8_0", "Model.Q8_0.gguf"),
        ("iq3_m", "Model-IQ3_M.gguf"),
        ("model-f16.gguf", "Model-F16.gguf"),
    ],
)
def test_the_tag_is_a_quantization_or_a_file_in_any_case(tag, file):
    assert choose_file("org/name", FILES, tag) == file


@pytest.mark.parametrize(
    ("there", "chosen"),
    [(["a-Q8_0", "a-Q4_0"], "a-Q4_0"), (["a-F16", "a-Q8_0"], "a-Q8_0"), (["a-F16", "a-IQ2_M"], "a-IQ2_M"), (["a"], "a")],
)
def test_without_a_tag_the_usual_quantization_is_taken(there, chosen):
    assert choose_file("org/name", [f"{name}.gguf" for name in there]) == f"{chosen}.gguf"


def test_a_quantization_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(ModelNotFound, match=r"org/name has no file with the quantization Q2_K; there are F16, IQ3_M, Q4"):
        choose_file("org/name", FILES, "Q2_K")


def test_split_files_are_refused():
    with pytest.raises(
        UnsupportedModel, match="BF16 of org/name is split into 2 files, which cannot be read; there are F16"
    ):
        choose_file("org/name", FILES, "BF16")
    with pytest.raises(UnsupportedModel, match="the 2 GGUF files of org/name are parts of split ones"):
        choose_file("org/name", FILES[-2:])


def test_quantizations_are_read_from_names():
    assert quantization_of("Llama-3.2-1B-Instruct-UD-Q4_K_XL.gguf") == "UD-Q4_K_XL"
    assert quantization_of("llama-3.2-1b-instruct-q4_k_m.gguf") == "Q4_K_M"
    assert quantization_of("model.gguf") == ""


def test_every_short_name_is_a_name_and_means_one_model():
    names = [name for short in SHORT_NAMES for name in short.names]

    assert len(names) == len(set(names))
    assert [plain_name(name) for name in names] == names
    assert all(find_short_name(name) in SHORT_NAMES for name in names)
    assert all(
        short.repository.count("/") == 1 for short in SHORT_NAMES if short.family != "smollm2" or "135m" not in short.name
    )
    assert all(short.license and short.download_bytes and short.num_parameters for short in SHORT_NAMES)


def test_a_name_without_a_tag_means_the_usual_size():
    assert find_short_name("qwen3") is find_short_name("Qwen3:4B") is not None
    assert find_short_name("qwen3:5b") is None
