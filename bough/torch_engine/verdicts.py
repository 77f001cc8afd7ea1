"""Verdicts of self-checks, kept as small JSON files: a check takes seconds, and its outcome depends on few things.

A file is written to a temporary name and renamed. One that cannot be read counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from bough.torch_engine.self_check import WAYS, Verdict

_FORMAT = 2  # raise it when the check itself changes
_NO_FEATURES = {"_name_or_path", "name_or_path", "transformers_version"}


class Verdicts:
    """The verdicts in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, key: str) -> Verdict | None:
        """The verdict kept under this key, or None."""
        try:
            fields = json.loads(self._file(key).read_text(encoding="utf-8"))
            verdict = Verdict(**fields)
            return verdict if verdict.way in WAYS and isinstance(verdict.differences, dict) else None
        except (OSError, ValueError, TypeError):
            return None

    def save(self, key: str, verdict: Verdict) -> None:
        """Keep a verdict. A folder that cannot be written to only means that the next load checks again."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(asdict(verdict), file, indent=1)
            Path(name).replace(self._file(key))

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def key_of(model: Any, wanted_attention: str) -> str:
    """A hash of all that a verdict depends on: versions, device, dtype, attention, and the configuration less its name."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NO_FEATURES}
    parameter = next(model.parameters())
    features = [
        _FORMAT,
        transformers.__version__,
        torch.__version__,
        parameter.device.type,
        str(parameter.dtype),
        wanted_attention,
        model.config._attn_implementation,
        type(model).__name__,
        config,
    ]
    return hashlib.sha256(json.dumps(features, sort_keys=True, default=str).encode()).hexdigest()[:32]
