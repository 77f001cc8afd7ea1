"""The sampling defaults of a model: what its makers recommend, by the names of `SamplingParams`.

The first of these that says anything counts: `generation_config.json` in the model's folder; the metadata of a GGUF file;
our registry's entry for the file that the model was made from. When a folder is made from a GGUF file, the metadata go into
a `generation_config.json` there.

Always true: a value is one that `SamplingParams` accepts. Others are left out, and `problems` says so. A model that says
anything has a temperature.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bough.errors import RequestError, UnsupportedModel
from bough.models.fetching.registry import find_made_from
from bough.models.files import GENERATION_FILE, ModelFiles, read_json
from bough.models.gguf.contents import read_sampling
from bough.models.store import RECORD_FILE
from bough.types import SamplingParams

NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "repeat_last_n": 64,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop": (),
}
"""The parameters that a model may have defaults for, each with the value that changes nothing."""

_GENERATION_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",  # only in folders that were made from a GGUF file
    "stop_strings": "stop",
}


@dataclass(frozen=True)
class ModelDefaults:
    """What a model recommends; empty if nothing is known. `problems` are sentences about values that were left out."""

    values: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def fill(self, params: SamplingParams, unset: Collection[str]) -> SamplingParams:
        """The parameters with those in `unset` replaced by the model's own, or neutral where the model has none.

        A model without any defaults changes nothing. Defaults of two origins are never mixed: a temperature that was chosen
        for the whole distribution does not suit a top-k that somebody else chose.
        """
        if not self.values:
            return params
        return replace(params, **{name: self.values.get(name, NEUTRAL[name]) for name in unset})


def unset_names(given: Collection[str]) -> frozenset[str]:
    """The parameters that a model may have defaults for, without those that a request gives."""
    return frozenset(NEUTRAL.keys() - set(given))


def read_defaults(files: ModelFiles) -> ModelDefaults:
    """The defaults of a model. Files that are missing or malformed say nothing."""
    found = _read_generation_file(files.folder / GENERATION_FILE)
    if not found.values and files.is_gguf:
        found = _translate(read_sampling(files.weights[0]), found.problems)
    if not found.values and (known := find_made_from(_made_from(files))) is not None:
        found = replace(found, values=dict(known.sampling))
    return found


def _read_generation_file(file: Path) -> ModelDefaults:
    if not file.is_file():
        return ModelDefaults()
    try:
        return _translate(read_json(file))
    except UnsupportedModel as error:
        return ModelDefaults(problems=(str(error),))


def _translate(said: Mapping[str, Any], problems: tuple[str, ...] = ()) -> ModelDefaults:
    """The defaults in a generation configuration. One that never samples takes the likeliest token."""
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
    """What is wrong with a value; empty if nothing is."""
    try:
        SamplingParams(**{name: value})
    except RequestError as error:
        return f"the model's own {error}"
    return ""


def _made_from(files: ModelFiles) -> str:
    """The hash of the file that a model was made from, also if the model was loaded by the path of its folder."""
    if files.sha256 or not (files.folder / RECORD_FILE).is_file():
        return files.sha256
    try:
        return str(read_json(files.folder / RECORD_FILE).get("sha256", ""))
    except UnsupportedModel:
        return ""
