"""`python -m bough.bench.gpu.shape_server JSON`: Bough's server over a model of random weights.

The application, the service and the engine's thread are the real ones. Only weights and tokenizer are made up. The process
ends with its parent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bough.bench.gpu.made_model import load_made_model
from bough.bench.gpu.sampling import ThreadSampler
from bough.bench.gpu.start import READY_S, wait_until_ready
from bough.config import Settings, load_settings
from bough.models.files import ModelFiles
from bough.runtime import Runtime

MODEL = "random-weights"
SAMPLE, SAMPLES = "sample", "samples.json"
_LOOK_S = 0.05


def make_files(folder: Path, shape: dict[str, Any]) -> ModelFiles:
    """Files for the server's catalog, which wants to see some weights. Nothing is loaded from them."""
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    save_file({"none": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return ModelFiles(MODEL, folder)


def serve(told: dict[str, Any]) -> None:
    """Serve until a signal comes."""
    from bough.server.app import make_app
    from bough.server.http.listening import bind, host
    from bough.server.serving.catalog import Catalog
    from bough.server.serving.loaded import LoadedModels
    from bough.server.serving.service import Service

    files = make_files(Path(told["folder"]), told["shape"])
    settings = load_settings(told["settings"] | {"model": MODEL, "port": told["port"], "disk": 0, "keep_alive": -1})

    def start(_: ModelFiles, __: Settings) -> Runtime:
        runtime = load_made_model(told["shape"], told["settings"], files)
        wait_until_ready(runtime.engine, READY_S)
        return runtime

    catalog = Catalog(settings, files)
    service = Service(settings, LoadedModels(settings, catalog, start=start), catalog)
    host(make_app(settings, service), settings, service, bind(settings.host, settings.port), lambda: None)


def sample_on_demand(folder: Path) -> None:
    """Sample this process while there is a file `SAMPLE` in a folder, then leave the result there in `SAMPLES`."""

    def watch() -> None:
        _wait_for(folder / SAMPLE, exists=True)
        sampler = ThreadSampler()
        sampler.start()
        _wait_for(folder / SAMPLE, exists=False)
        temporary = folder / f"{SAMPLES}.tmp"
        temporary.write_text(json.dumps(sampler.stop()), encoding="utf-8")
        temporary.replace(folder / SAMPLES)

    threading.Thread(target=watch, name="bough-bench-watch", daemon=True).start()


def _wait_for(file: Path, *, exists: bool) -> None:
    while file.exists() is not exists:
        time.sleep(_LOOK_S)


def end_with_parent() -> None:
    """Stop this process, as a signal would, when its standard input ends, and so with its parent."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="bough-bench-parent", daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    asked = json.loads(sys.argv[1])
    sample_on_demand(Path(asked["folder"]))
    serve(asked)
