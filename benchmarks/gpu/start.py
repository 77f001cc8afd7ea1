"""Start: seconds from the start of a process to its first token and to the fast path, with a cold and a warm compile cache.

Two child processes, one after the other, share one folder for everything that compiling leaves behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.setup import GpuFigure, GpuSetup
from bough.bench.workload import random_prompts
from bough.engines.contract import Engine
from bough.errors import EngineError
from bough.runner import Runner
from bough.runtime import load_shape

READY_S = 400.0
"""How long a child waits for the fast path."""

_CHILD_S = 600.0
_PROMPT_TOKENS = 64
_LAST_LINES = 8  # of what a child that failed has said


def measure_start(setup: GpuSetup) -> Iterator[GpuFigure]:
    """Two starts, in figures of seconds."""
    with TemporaryDirectory(prefix="bough-gpu-") as folder:
        for cache in ("cold", "warm"):
            found = run_child("benchmarks.gpu.start", _describe_start(setup), compile_folder(Path(folder)))
            for name, label in _LABELS.items():
                yield GpuFigure(f"{cache} compile cache: {label}", found[name], "s", found if name == "ready_s" else {})


_LABELS = {"loaded_s": "engine loaded", "first_token_s": "first token", "ready_s": "fast path ready"}


def _describe_start(setup: GpuSetup) -> dict[str, Any]:
    return {"shape": dict(setup.shape), "settings": dict(setup.settings), "lanes": setup.num_lanes, "at_s": time.time()}


def compile_folder(folder: Path) -> dict[str, str]:
    """Variables by which a child keeps all that it compiles in a folder."""
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "BOUGH_CACHE_FOLDER": "bough"}
    return {variable: str(folder / name) for variable, name in names.items()}


def run_child(module: str, told: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """Run a module in a process of its own; returns the JSON of its last line. Raises EngineError if it fails."""
    command = [sys.executable, "-m", module, json.dumps(told)]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=_CHILD_S, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = " | ".join((done.stderr or done.stdout).splitlines()[-_LAST_LINES:])
        raise EngineError(f"{module} ended with {done.returncode}: {said}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def wait_until_ready(engine: Engine, timeout_s: float) -> bool:
    """Wait for an engine that warms up in the background; True at once for one that has nothing to warm up."""
    wait = getattr(engine, "wait_until_ready", None)
    return True if wait is None else bool(wait(timeout_s))


def _start(told: dict[str, Any]) -> dict[str, Any]:
    """What the child does: load, answer at once, wait for the fast path, answer again."""
    began_s = float(told["at_s"])  # of the parent's clock, which is this machine's
    with Runner(load_shape(told["shape"], lanes=told["lanes"], **told["settings"])) as runner:
        loaded_s, engine = time.time() - began_s, runner.runtime.engine
        (prompt,) = random_prompts(range(engine.vocab_size), _PROMPT_TOKENS, 1)
        next(iter(runner.stream(prompt, max_tokens=4, ignore_eos=True)))
        first_token_s, before = time.time() - began_s, engine.describe()
        is_ready = wait_until_ready(engine, READY_S)
        return {
            "loaded_s": round(loaded_s, 2),
            "first_token_s": round(first_token_s, 2),
            "ready_s": round(time.time() - began_s, 2),
            "is_ready": is_ready,
            "described_before": before,
            "described": engine.describe(),
        }


if __name__ == "__main__":
    print(json.dumps(_start(json.loads(sys.argv[1]))), flush=True)
