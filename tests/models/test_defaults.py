"""The sampling that a model recommends: where it is read, what is left out, and how it meets what a request gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import GenerationConfig

from bough.models import ModelFiles, describe
from bough.models.defaults import read_defaults
from bough.models.fetching.registry import KNOWN
from bough.models.gguf import folder as gguf_folder
from bough.models.gguf import prepare as gguf_prepare
from bough.models.weights.gguf_header import read_gguf
from bough.sampling_params import NEUTRAL, ModelDefaults, unset_names
from bough.types import SamplingParams
from tests.models.gguf.prepared import prepare_to
from tests.models.tiny_gguf import write_gguf
from tests.models.web_server import Recorder

SMOLLM2 = KNOWN["smollm2"]


def read(folder: Path, said: Any, sha256: str = "") -> ModelDefaults:
    """The defaults of a folder with this generation configuration."""
    text = said if isinstance(said, str) else json.dumps(said)
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return read_defaults(ModelFiles("m", folder, sha256=sha256))


def test_the_generation_configuration_is_read_by_our_names(tmp_path: Path) -> None:
    said = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "stop_strings": ["END"]}

    found = read(tmp_path, said | {"eos_token_id": 2, "max_length": 99, "repetition_penalty": None})

    assert found == ModelDefaults({"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "stop": ["END"]})


@pytest.mark.parametrize(
    ("said", "values"),
    [
        ({}, {}),
        ({"eos_token_id": 2}, {}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"top_k": -1}, {"temperature": 1.0, "top_k": 0}),
        (
            {"repetition_penalty": 1.05},
            {"temperature": 1.0, "repeat_penalty": 1.05, "repeat_last_n": -1},
        ),  # of all tokens, as the library means it
    ],
)
def test_what_a_configuration_leaves_open(tmp_path: Path, said: dict[str, Any], values: dict[str, Any]) -> None:
    assert read(tmp_path, said).values == values


def test_values_that_make_no_sense_are_left_out_and_told(tmp_path: Path) -> None:
    found = read(tmp_path, {"temperature": 0.5, "top_p": 7, "min_p": "a little", "top_k": True})

    assert found.values == {"temperature": 0.5}
    assert [problem.split(",")[0] for problem in found.problems] == [
        "the model's own top_k is True",
        "the model's own top_p is 7",
        "the model's own min_p is 'a little'",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{", "nonsense"])
def test_a_configuration_that_is_no_json_says_nothing(tmp_path: Path, text: str) -> None:
    found = read(tmp_path, text)

    assert not found.values
    assert "generation_config.json" in found.problems[0]


def test_a_model_made_from_a_known_file_has_the_defaults_of_the_registry(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": 2}, SMOLLM2.gguf_sha256).values == {"temperature": 0.2, "top_p": 0.9}
    assert read(tmp_path, {"temperature": 0.6}, SMOLLM2.gguf_sha256).values == {"temperature": 0.6}
    assert not read(tmp_path, {}, "0" * 64).values


def test_a_known_model_is_recognised_by_the_path_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "bough.json").write_text(json.dumps({"sha256": SMOLLM2.gguf_sha256}), encoding="utf-8")

    assert read_defaults(ModelFiles("m", tmp_path)).values == SMOLLM2.sampling


def make_folder(file: Path, folder: Path, progress: Recorder) -> None:
    gguf_folder.make_folder(read_gguf(file), folder, progress)


def convert(file: Path, folder: Path, progress: Recorder) -> None:
    gguf_prepare.convert(read_gguf(file), folder, progress, "for a test")


def prepare(file: Path, folder: Path, progress: Recorder) -> None:
    prepare_to(folder, file)


@pytest.mark.parametrize("make", [convert, make_folder, prepare])
def test_what_a_gguf_file_recommends_survives_in_the_folder_made_from_it(tmp_path: Path, make: Any) -> None:
    file, folder = tmp_path / "tiny.gguf", tmp_path / "made"
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "penalty_repeat": 1.1, "penalty_last_n": 128}
    write_gguf(file, gguf.GGMLQuantizationType.F32, sampling=sampling)
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repeat_penalty": 1.1, "repeat_last_n": 128}

    make(file, folder, Recorder())

    assert read_defaults(ModelFiles("tiny", folder)).values == expected
    assert describe(ModelFiles("tiny", folder)).sampling == expected
    assert GenerationConfig.from_pretrained(folder).top_k == 20  # the library still reads the file
    if make is make_folder:  # as a folder that was made before: the file itself is asked
        (folder / "generation_config.json").unlink()
        assert read_defaults(ModelFiles("tiny", folder)).values == expected


def test_a_gguf_file_without_recommendations_has_none(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32)
    make_folder(tmp_path / "tiny.gguf", tmp_path / "made", Recorder())
    shutil.copytree(tmp_path / "made", tmp_path / "broken")
    (tmp_path / "broken" / "model.gguf").write_bytes(b"GGUF and nothing else")

    assert not read_defaults(ModelFiles("tiny", tmp_path / "made")).values
    assert not read_defaults(ModelFiles("tiny", tmp_path / "broken")).values


def test_what_a_request_gives_wins_and_the_rest_is_the_models_own_or_neutral() -> None:
    own = ModelDefaults({"temperature": 0.2, "top_p": 0.9})
    of_the_api = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repeat_penalty": 1.1}

    filled = own.fill(SamplingParams(**of_the_api | {"top_p": 0.5}, max_tokens=7, seed=3), unset_names(["top_p"]))

    assert filled == SamplingParams(temperature=0.2, top_p=0.5, max_tokens=7, seed=3)


def test_a_model_without_recommendations_leaves_the_defaults_of_the_api() -> None:
    params = SamplingParams(temperature=0.8, top_k=40)

    assert ModelDefaults().fill(params, unset_names([])) == params


def test_neutral_values_change_nothing() -> None:
    neutral = SamplingParams(**NEUTRAL)

    assert neutral == SamplingParams(temperature=1.0)
    assert not neutral.has_penalties
