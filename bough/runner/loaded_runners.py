"""From a name to a runner. Runners that are not closed are closed at the end of the process, so that trees are saved."""

from __future__ import annotations

import atexit
import logging
import weakref
from pathlib import Path
from typing import Unpack

from bough.config import load_settings
from bough.models import Announce
from bough.runner.options import LoadOptions
from bough.runner.runner import Runner
from bough.runtime import Advise, EncoderRuntime, Runtime, find_model, load_any
from bough.types import Progress

log = logging.getLogger(__name__)

_open_runtimes: weakref.WeakSet[Runtime | EncoderRuntime] = weakref.WeakSet()


def load(
    name_or_path: str | Path | None = None,
    *,
    progress: Progress | None = None,
    announce: Announce | None = None,
    advise: Advise | None = None,
    **settings: Unpack[LoadOptions],
) -> Runner:
    """Load a model by name, hub id, Hugging Face folder or GGUF file; without one, the default model.

    A known name or hub id that is not on this machine is fetched first; `announce` is called before, and may raise to
    prevent it. `advise` is called with advice on the model: that it runs without reuse, or could be faster here; by default
    advice is logged. `cache=False` runs without reuse.
    """
    chosen = load_settings(dict(settings))
    files = find_model(str(name_or_path or chosen.model), chosen, progress, announce)
    runtime = load_any(files, chosen, progress, advise)
    _open_runtimes.add(runtime)
    return Runner(runtime)


@atexit.register
def _close_all() -> None:
    """Save the trees of runners that were not closed, before the interpreter stops their threads."""
    for runtime in list(_open_runtimes):
        try:
            runtime.close()
        except Exception as error:  # the others must be closed, too
            log.error("%s was not closed at the end of the process: %s", runtime.name, error)
