"""Verdicts of self-checks, kept as small JSON files so that a model is checked only once.

A file is written to a temporary name and renamed. One that cannot be read counts as absent. What a verdict depends on
differs by engine: each makes its own keys, out of `hash_features`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bough.config import Settings
from bough.engines.contract import ReportProgress
from bough.engines.shared.compute import Verdict, Way
from bough.system.folders import write_private


class Verdicts:
    """The verdicts in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, key: str) -> Verdict | None:
        """The verdict kept under this key, or None."""
        try:
            fields = json.loads(self._file(key).read_text(encoding="utf-8"))
            verdict = Verdict(**fields | {"way": Way(fields["way"])})
            return verdict if isinstance(verdict.differences, dict) else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def save(self, key: str, verdict: Verdict) -> None:
        """Keep a verdict. A folder that cannot be written to only means that the next load checks again."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_private(self._file(key), json.dumps(asdict(verdict), indent=1))

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def find_verdict(settings: Settings, key: str, check: Callable[[], Verdict], progress: ReportProgress | None) -> Verdict:
    """The verdict kept under this key, or the one that `check` finds now, which is then kept."""
    verdicts = Verdicts(settings.cache_folder / "self_checks")
    verdict = verdicts.load(key)
    if verdict is None:
        if progress:
            progress("checking what this model can do")
        verdict = check()
        verdicts.save(key, verdict)
    return verdict


def hash_features(features: Sequence[Any]) -> str:
    """A key made of all that a verdict depends on."""
    return hashlib.sha256(json.dumps(features, sort_keys=True, default=str).encode()).hexdigest()[:32]
