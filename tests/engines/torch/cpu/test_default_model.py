"""The default model with its weights in the blocks of its GGUF file: the same text as in float32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import bough
from bough.config import load_settings
from bough.engines.torch import TorchEngine
from bough.models import ModelFiles
from tests.contract.driving import new_lane, run

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("kernels")]

LOADS = """
import sys
from pathlib import Path
from bough.config import load_settings
from bough.engines.torch import TorchEngine
engine = TorchEngine.load(Path(sys.argv[1]), load_settings({"device": "cpu"}))
print(engine.describe()["weights"])
print(open("/proc/self/smaps").read())
"""
PROMPT = "Write a long story about a lighthouse keeper, a storm and a lost ship."


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells which pages of a mapping are in memory")
def test_nothing_of_the_file_stays_mapped(smollm2_files: ModelFiles) -> None:
    """A file that is truncated later must not end the process."""
    command = [sys.executable, "-c", LOADS, str(smollm2_files.folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert said.startswith("packed: Q4_1, Q8_0")
    assert ".gguf" not in said


@pytest.mark.slow
def test_a_thousand_greedy_tokens_are_those_of_float32(smollm2_files: ModelFiles) -> None:
    with bough.load(smollm2_files.folder, weights="float32") as plain:
        ids = plain.tokenize([{"role": "user", "content": PROMPT}])
    engines = [
        TorchEngine.load(smollm2_files.folder, load_settings({"device": "cpu", "weights": each}))
        for each in ("packed", "float32")
    ]

    packed, plain_ids = (decode_greedily(engine, list(ids), 1_000) for engine in engines)

    assert engines[0].describe()["step"].startswith("whole, in one call")
    assert packed == plain_ids


def decode_greedily(engine: TorchEngine, ids: list[int], num_tokens: int) -> list[int]:
    """Tokens after `ids`, on and on: also after the end of an answer."""
    lane = new_lane(engine, len(ids) + num_tokens)
    found = [int(run(engine, lane, ids, [len(ids)]).argmax())]
    while len(found) < num_tokens:
        (logits,) = engine.step([lane], [found[-1]])
        found.append(int(logits.argmax()))
    return found
