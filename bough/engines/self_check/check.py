"""The self-check of a model at load: from the differences that checks find to a verdict.

A candidate is one model to check, the real one or a small copy of it. Each has its own tolerance, because only its engine
knows how far rounding alone moves its logits.

Verdicts are kept as small JSON files, so that a model is checked only once. A file that cannot be read counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from bough.cache.tree.state import Group, Kind
from bough.config import Settings
from bough.engines.contract import ReportProgress
from bough.engines.self_check import checks
from bough.engines.self_check.reference import Reference
from bough.engines.shared.compute import Compute, GroupCompute, PlainCompute, RunMode, Verdict
from bough.errors import ModelError, UnsupportedModel
from bough.system.folders import write_private

COPY_TOKENS = 150
COPY_WINDOW = 24  # rows; of the small random copies of a model
COPY_SEED = 5
COPY_GAIN = 1.6  # at the usual size of random weights, attention and states hardly reach the logits
_REAL_TOKENS = 40
_MOST_TOKENS = 1200
_SLIGHTLY_OFF = 100  # times the tolerance: a step that is off by its own clamping, not by another's state

Result = TypeVar("Result")

RUN_CHECKS: dict[str, Callable[[Compute[Any, Any], Reference], float]] = {
    "one-shot": checks.one_shot,
    "stepped": checks.stepped,
    "chunked": checks.chunked,
}
REUSE_CHECKS: dict[str, Callable[[GroupCompute[Any, Any], Reference], float]] = {
    "restored": checks.restored,
    "rewound": checks.rewound,
    "branched": checks.branched,
}


@dataclass(frozen=True)
class CheckedModel:
    """One model to check. `compute` makes a way of running it on lanes, with steps in batches or without."""

    forward: Any  # the engine's own
    layout: Any  # the engine's own
    compute: Callable[[bool], GroupCompute[Any, Any]]
    reference: Reference
    tolerance: float
    label: str = ""
    is_coarse: bool = False  # rounding hides small mistakes


class SelfCheck:
    """Runs checks on candidates. An error that `is_out_of_memory` recognises is raised: it gives no verdict."""

    def __init__(self, is_out_of_memory: Callable[[BaseException], bool]) -> None:
        self._is_out_of_memory = is_out_of_memory
        self.why_no_lanes = "steps after a prompt come out differently"

    def check_lanes(self, attention: str, candidates: Sequence[CheckedModel], can_batch: bool) -> Verdict | None:
        """What Bough's lanes can do, or None if they cannot even continue a prompt. `can_batch`: also try batches."""
        verdict = Verdict(attention)
        for candidate in candidates:
            checked = self._check_candidate(verdict, candidate)
            if checked is None:
                return None
            verdict = checked
        can_batch = can_batch and all(
            self.measure(checks.batched, each.compute(True), each.reference) <= each.tolerance for each in candidates
        )
        return replace(verdict, can_batch=can_batch)

    def check_plain(self, attention: str, real: CheckedModel, unknown: str) -> Verdict:
        """The verdict without lanes: with the model's own cache if that is right, else with none.

        `unknown` is what the probe did not recognise, if anything. Raises UnsupportedModel if neither is right.
        """
        why = unknown or f"its state cannot be kept in lanes: {self.why_no_lanes}"
        found = self._run_checks(PlainCompute(real.forward, keeps_cache=True), real.reference)
        if max(found["one-shot"], found["stepped"]) <= real.tolerance:
            can_chunk = found["chunked"] <= real.tolerance and not real.is_coarse
            reason = f"{why}; it runs with its own cache, without reuse"
            return Verdict(attention, RunMode.LIBRARY, can_chunk, False, False, reason, found)
        difference = self.measure(checks.one_shot, PlainCompute(real.forward, keeps_cache=False), real.reference)
        if difference > real.tolerance:
            name = type(real.forward.model).__name__
            raise UnsupportedModel(f"{name} gives different answers to one prompt ({difference:.1e})")
        reason = f"{why}; every token is computed from the start: slow, but right"
        return Verdict(attention, RunMode.RECOMPUTE, True, False, False, reason, {"one-shot": difference})

    def _check_candidate(self, verdict: Verdict, candidate: CheckedModel) -> Verdict | None:
        """The verdict, less what this candidate cannot do; None if it cannot continue a prompt."""
        compute = candidate.compute(False)
        found = self._run_checks(compute, candidate.reference)
        if found["one-shot"] > candidate.tolerance or found["stepped"] > _SLIGHTLY_OFF * candidate.tolerance:
            return None
        can_chunk = verdict.can_chunk and found["chunked"] <= candidate.tolerance
        can_reuse = verdict.can_reuse and can_chunk and found["stepped"] <= candidate.tolerance
        if can_reuse:
            found |= {check: self.measure(run, compute, candidate.reference) for check, run in REUSE_CHECKS.items()}
            can_reuse = all(difference <= candidate.tolerance for difference in found.values())
        labelled = {f"{check}{candidate.label}": difference for check, difference in found.items()}
        return replace(
            verdict,
            can_chunk=can_chunk,
            can_reuse=can_reuse,
            reason=_reason(found, candidate) or verdict.reason,
            differences=verdict.differences | labelled,
        )

    def _run_checks(self, compute: Compute[Any, Any], reference: Reference) -> dict[str, float]:
        return {check: self.measure(run, compute, reference) for check, run in RUN_CHECKS.items()}

    def measure(self, run: Callable[[Any, Reference], float], compute: Compute[Any, Any], reference: Reference) -> float:
        """The largest difference, or infinity if the check fails."""
        found = self.attempt(lambda: run(compute, reference))
        return found if found is not None else float("inf")

    def attempt(self, run: Callable[[], Result]) -> Result | None:
        """The result of `run`, or None if it fails."""
        try:
            return run()
        except Exception as error:  # a model may fail in any way when it is used as its authors did not
            if self._is_out_of_memory(error):
                raise ModelError(f"too little memory is free to check what this model can do: {error}") from error
            self.why_no_lanes = f"{type(error).__name__}: {error}"
            return None


def drop_unproven(verdict: Verdict, candidates: Sequence[CheckedModel]) -> Verdict:
    """The same verdict, less what was only checked coarsely: runs and reuse of windows and states, if there is no copy."""
    real = candidates[0]
    if not (real.is_coarse and len(candidates) == 1 and _has_windows_or_states(real.layout.groups) and verdict.can_chunk):
        return verdict
    reason = (
        "half precision hides small mistakes in its windows or states, and no small copy of it could be built to find them"
    )
    return replace(verdict, can_chunk=False, can_reuse=False, reason=reason)


def needs_copy(groups: Sequence[Group], is_coarse: bool) -> bool:
    """Whether a short prompt on the real weights shows too little: rounding, windows, states."""
    return bool(groups) and (is_coarse or _has_windows_or_states(groups))


def _has_windows_or_states(groups: Sequence[Group]) -> bool:
    return any(group.kind is not Kind.FULL for group in groups)


def reference_tokens(groups: Sequence[Group], is_coarse: bool, has_copy: bool) -> int:
    """The length of the prompt for the real weights: longer than every window, unless a copy checks windows and states."""
    if has_copy or not needs_copy(groups, is_coarse):
        return _REAL_TOKENS
    return min(max([COPY_TOKENS, *(group.window + _REAL_TOKENS for group in groups)]), _MOST_TOKENS)


def _reason(found: dict[str, float], candidate: CheckedModel) -> str:
    worst = max(found, key=lambda check: found[check])
    if found[worst] <= candidate.tolerance:
        return ""
    by = (
        f"differ from those of one forward pass by {found[worst]:.1e}"
        if found[worst] < float("inf")
        else "could not be computed"
    )
    return f"its logits, {worst}{candidate.label}, {by}"


def find_verdict(settings: Settings, key: str, check: Callable[[], Verdict], progress: ReportProgress | None) -> Verdict:
    """The verdict kept under this key, or the one that `check` finds now, which is then kept."""
    file = settings.cache_folder / "self_checks" / f"{key}.json"
    verdict = read_verdict(file)
    if verdict is None:
        if progress:
            progress("checking what this model can do")
        verdict = check()
        with contextlib.suppress(OSError):  # in a folder that cannot be written, the next load checks again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_private(file, json.dumps(asdict(verdict), indent=1))
    return verdict


def read_verdict(file: Path) -> Verdict | None:
    """The verdict in a file, or None if it has none."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        verdict = Verdict(**fields | {"way": RunMode(fields["way"])})
        return verdict if isinstance(verdict.differences, dict) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def hash_features(features: Sequence[Any]) -> str:
    """A key made of all that a verdict depends on."""
    return hashlib.sha256(json.dumps(features, sort_keys=True, default=str).encode()).hexdigest()[:32]
