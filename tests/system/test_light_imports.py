"""What a process of the command imports and looks up until it has an answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tests.server.servers import make_chat_folder

UNUSED = {
    "matplotlib",
    "pandas",
    "scipy",
    "sklearn",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
}

RUN = """
import contextlib, json, socket, sys

looked_up = []
def refuse(*args, **kwargs):
    looked_up.append(str(args))
    raise OSError("no network here")
socket.getaddrinfo = socket.gethostbyname = socket.create_connection = socket.socket.connect = refuse

from bough.cli.main import main
with contextlib.suppress(SystemExit):
    main()

modules = sorted(sys.modules)
import transformers.masking_utils
transformers.masking_utils.TransformGetItemToIndex()  # a class of the compiler
print(json.dumps({"modules": modules, "late": "torch._dynamo" in sys.modules, "looked_up": looked_up}), file=sys.stderr)
"""


@dataclass(frozen=True)
class Found:
    """What came of one `bough run`: its answer, and what the process tells about itself."""

    answer: str
    told: dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """One run with a tiny model, in a process of its own."""
    folder, cache = make_chat_folder(tmp_path_factory.mktemp("model") / "tiny"), tmp_path_factory.mktemp("cache")
    words = ["run", "--local", "--device", "cpu", "--max-tokens", "2", "--model", str(folder), "Hello there"]
    environment = {**os.environ, "BOUGH_CACHE_FOLDER": str(cache), "BOUGH_DATA_FOLDER": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return Found(done.stdout, json.loads(done.stderr.splitlines()[-1]))


def test_a_run_on_a_cpu_imports_neither_the_compiler_nor_distributed_tensors(found: Found) -> None:
    assert found.answer
    assert {"torch", "transformers.modeling_utils"} <= set(found.told["modules"])
    assert not UNUSED & set(found.told["modules"])


def test_a_run_of_a_model_in_a_folder_looks_up_no_name(found: Found) -> None:
    assert found.told["looked_up"] == []


def test_the_compiler_is_imported_when_it_is_used(found: Found) -> None:
    assert found.told["late"]
