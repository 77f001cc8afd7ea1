"""Which file of a GGUF repository is meant."""

from __future__ import annotations

import pytest

from bough.errors import ModelNotFound, UnsupportedModel
from bough.models.fetching.hub import choose_files, quantization_of

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
    assert choose_files("org/name", FILES, tag) == [file]


@pytest.mark.parametrize(
    ("there", "chosen"),
    [(["a-Q8_0", "a-Q4_0"], "a-Q4_0"), (["a-F16", "a-Q8_0"], "a-Q8_0"), (["a-F16", "a-IQ2_M"], "a-IQ2_M"), (["a"], "a")],
)
def test_without_a_tag_the_usual_quantization_is_taken(there, chosen):
    assert choose_files("org/name", [f"{name}.gguf" for name in there]) == [f"{chosen}.gguf"]


def test_a_quantization_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(
        ModelNotFound, match=r"org/name has no file with the quantization Q2_K; there are BF16, F16, IQ3_M, Q4"
    ):
        choose_files("org/name", FILES, "Q2_K")


def test_all_parts_of_a_split_file_are_taken_in_order():
    assert choose_files("org/name", FILES[::-1], "BF16") == FILES[-2:]
    assert choose_files("org/name", FILES[-2:]) == FILES[-2:]


def test_a_part_that_the_repository_lacks_is_told():
    with pytest.raises(UnsupportedModel, match=r"org/name lacks 1 of the 2 parts of .*, such as big/.*00002-of-00002"):
        choose_files("org/name", FILES[:-1], "BF16")


def test_quantizations_are_read_from_names():
    assert quantization_of("Llama-3.2-1B-Instruct-UD-Q4_K_XL.gguf") == "UD-Q4_K_XL"
    assert quantization_of("llama-3.2-1b-instruct-q4_k_m.gguf") == "Q4_K_M"
    assert quantization_of("model.gguf") == ""
