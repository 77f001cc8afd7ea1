"""`bough bench peers`: all workloads on all servers in turns, and what they come to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bough.bench.machine import read_load, read_machine
from bough.bench.peers.client import Peer, PeerError
from bough.bench.peers.measure import Measure
from bough.bench.peers.switching import SwitchRun, run_switching
from bough.bench.peers.workloads import Case, PeerSetup, Texts, make_cases, measure_tokens_per_word
from bough.errors import RequestError

OnStep = Callable[[str], None]
"""Called with the name of what was just measured."""


@dataclass
class PeerReport:
    """What was measured on each server. The first server is the one that the others are compared with."""

    peers: Sequence[Peer]
    setup: PeerSetup
    measures: list[Measure] = field(default_factory=list)
    load_at_start: float | None = field(default_factory=read_load)

    def as_dict(self) -> dict[str, Any]:
        first = self.peers[0].name
        return {
            "benchmark": "peers",
            "machine": read_machine().as_dict(),
            "load": {"start": self.load_at_start, "end": read_load()},
            "servers": [{"name": p.name, "url": p.url, "model": p.model, "notes": p.notes} for p in self.peers],
            "setup": asdict(self.setup),
            "measures": [each.as_dict(first) for each in self.measures],
        }


def count_steps(setup: PeerSetup) -> int:
    """How often `on_step` is called."""
    return setup.rounds * len(make_cases(setup)) + setup.switch.turns * setup.switch.conversations


def measure_peers(peers: Sequence[Peer], setup: PeerSetup, run: str, on_step: OnStep = lambda name: None) -> PeerReport:
    """Run every workload; a server that fails in one is left out of the rest of it. `run` makes the texts new."""
    names = [peer.name for peer in peers]
    if len(set(names)) < len(names):
        raise RequestError(f"two servers have one name among {', '.join(names)}: give them names, as in NAME=URL")
    for peer in peers:
        peer.stop_at_s = time.perf_counter() + setup.limit_s
    report = PeerReport(peers, setup)
    texts = Texts(run, _warm_up(peers))
    for case in make_cases(setup):
        report.measures.append(_measure_case(peers, case, texts, setup.rounds, on_step))
    report.measures += _switching_measures(run_switching(peers, setup.switch, run, lambda: on_step("switching")))
    return report


def _warm_up(peers: Sequence[Peer]) -> float:
    """Ask every server once, since first requests are slow; returns the tokens of a word as the first one counts."""
    found: list[float] = []
    for peer in peers:
        try:
            found.append(measure_tokens_per_word(peer))
        except PeerError as error:
            peer.note(f"failed at first: {error}")
    if not found:
        raise PeerError("no server answers: " + "; ".join(note for peer in peers for note in peer.notes))
    return found[0]


def _measure_case(peers: Sequence[Peer], case: Case, texts: Texts, rounds: int, on_step: OnStep) -> Measure:
    measure = Measure(case.name, case.unit, case.is_rate)
    for number in range(rounds):
        text = texts.make(case.context_tokens, f"{number} {case.name}")
        for peer in peers if number % 2 == 0 else [*reversed(peers)]:
            if peer.name not in measure.failures:
                _measure_once(peer, case, text, measure)
        on_step(case.name)
    return measure


def _measure_once(peer: Peer, case: Case, text: str, measure: Measure) -> None:
    try:
        found = case.measure(peer, text)
    except PeerError as error:
        measure.failures[peer.name] = str(error)
        return
    measure.add(peer.name, found.value)
    if found.prompt_tokens is not None:
        measure.prompt_tokens[peer.name] = found.prompt_tokens


def _switching_measures(runs: dict[str, SwitchRun]) -> list[Measure]:
    first = Measure("switching: first token of later turns", "ms", is_rate=False)
    cached = Measure("switching: cached", "%", is_rate=True)
    total = Measure("switching: all turns", "s", is_rate=False)
    for name, run in runs.items():
        for measure in (first, cached, total):
            if run.failure:
                measure.failures[name] = run.failure
        if run.failure or run.first_token_ms is None:
            continue
        first.add(name, run.first_token_ms)
        total.add(name, run.total_s)
        if run.cached_share is not None:
            cached.add(name, 100 * run.cached_share)
    return [first, cached, total]
