"""Reads the sampling defaults of a model, recommended by its makers, by the names of `SamplingParams`.

The first of these that has any counts: `generation_config.json` in the model's folder; the metadata of a GGUF file; the
registry's entry for the file that the model was made from. When a folder is made from a GGUF file, the metadata go into a
`generation_config.json` there.

Always true: `SamplingParams` accepts every value. Others are left out, and `problems` says so. Defaults, if there are any,
include a temperature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.errors import RequestError, UnsupportedModel
from bough.models.fetching.registry import find_made_from
from bough.models.files import GENERATION_FILE, ModelFiles, read_json
from bough.models.gguf.folder import read_sampling
from bough.models.store import RECORD_FILE
from bough.sampling_params import NEUTRAL, PARAMETERS, ModelDefaults, SamplingParams

_GENERATION_NAMES = {each.generation: name for name, each in PARAMETERS.items() if each.generation}


def read_defaults(files: ModelFiles) -> ModelDefaults:
    """The defaults of a model. Files that are missing or malformed have none."""
    found, file = ModelDefaults(), files.folder / GENERATION_FILE
    if file.is_file():
        try:
            found = _translate(read_json(file))
        except UnsupportedModel as error:
            found = ModelDefaults(problems=(str(error),))
    if not found.values and files.is_gguf and not files.is_packed:
        found = _translate(read_sampling(files.weights[0]), found.problems)
    if not found.values and (known := find_made_from(_made_from(files))) is not None:
        found = replace(found, values=dict(known.sampling))
    return found


def _translate(said: Mapping[str, Any], problems: tuple[str, ...] = ()) -> ModelDefaults:
    """The defaults in a generation configuration. Without sampling, the temperature is 0."""
    given = {ours: said[name] for name, ours in _GENERATION_NAMES.items() if said.get(name) is not None}
    if isinstance(given.get("top_k"), int):
        given["top_k"] = max(0, given["top_k"])  # below 0 is another way to say all
    wrong = {name: problem for name, value in given.items() if (problem := _problem_of(name, value))}
    values = {name: value for name, value in given.items() if name not in wrong}
    if said.get("do_sample") is False:
        values.setdefault("temperature", 0.0)
    if values or said.get("do_sample"):
        values.setdefault("temperature", NEUTRAL["temperature"])
    if values.get("repeat_penalty", 1) != 1:
        values.setdefault("repeat_last_n", -1)  # the library's penalty is for all tokens so far
    return ModelDefaults(values, (*problems, *wrong.values()))


def _problem_of(name: str, value: Any) -> str:
    try:
        SamplingParams(**{name: value})
    except RequestError as error:
        return f"the model's own {error}"
    return ""


def _made_from(files: ModelFiles) -> str:
    """The hash of the file that a model was made from, even if the model was loaded by the path of its folder."""
    if files.sha256 or not (files.folder / RECORD_FILE).is_file():
        return files.sha256
    try:
        return str(read_json(files.folder / RECORD_FILE).get("sha256", ""))
    except UnsupportedModel:
        return ""
