"""The default model, killed while it answers: the next start is clean, right, and reuses what was flushed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bough
from bough.models import ModelFiles
from tests.crash.model_worker import NUM_CONVERSATIONS, NUM_TOKENS, SETTINGS, conversation
from tests.crash.nursery import ROOT
from tests.crash.recovery import verify

pytestmark = [pytest.mark.model, pytest.mark.slow]  # tests/server/test_kill.py kills a server with this model every time

NUM_KILLS = 10


def kill_one(model: Path, cache: Path, seed: int, delay_s: float) -> set[int]:
    """Start a worker and kill it, the first not before it has flushed; returns the conversations that it has flushed."""
    command = [sys.executable, "-m", "tests.crash.model_worker", str(model), str(cache), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as worker:
        assert worker.stdout is not None and json.loads(worker.stdout.readline()) == "ready"
        first = worker.stdout.readline() if seed == 0 else ""
        time.sleep(delay_s)
        assert worker.poll() is None
        worker.kill()
        lines = (first + worker.stdout.read()).splitlines(keepends=True)
    return {json.loads(line) for line in lines if line.endswith("\n")}


def test_killed_ten_times_it_answers_as_without_a_cache(smollm2_files: ModelFiles, tmp_path: Path) -> None:
    model, cache, chance = smollm2_files.folder, tmp_path / "cache", random.Random(0)
    flushed: set[int] = set()
    for seed in range(NUM_KILLS):
        flushed |= kill_one(model, cache, seed, chance.uniform(0, 2.5))
        (tree,) = (cache / "trees").iterdir()
        num_files = verify(tree)
    assert flushed and num_files

    with bough.load(model, cache=False) as plain:
        expected = [plain.generate(conversation(n), max_tokens=NUM_TOKENS).text for n in range(NUM_CONVERSATIONS)]
    with bough.load(model, cache_folder=cache, **SETTINGS) as runner:
        for number in flushed:
            ids = runner.tokenize(conversation(number))
            assert runner.runtime.prefix_cache.count_reusable(ids) == len(ids) - 1
        answers = [runner.generate(conversation(n), max_tokens=NUM_TOKENS) for n in range(NUM_CONVERSATIONS)]
    assert [answer.text for answer in answers] == expected
    assert answers[0].usage.cached_tokens > 0
