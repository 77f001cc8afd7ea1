"""`python -m benchmarks llama-cpp`: Bough's engine beside llama.cpp's own benchmarks, on the same GGUF files, in turns.

Both sides compute on the same number of threads, never at the same time: Bough's engine stays loaded and rests while a
program of llama.cpp runs. The quickest round of each side counts. Sampling is not part of a step on either side. Lanes
share the prompt in their first rows (as with llama-batched-bench's -pps), since only the time of a step matters here.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bough.bench.report import read_load
from bough.cache.tree.state import Group, GroupSource, Item, Lane
from bough.cli.bench import BenchReport, Json, load_model, read_numbers
from bough.engines.contract import Engine
from bough.engines.self_check.checks import keep
from bough.errors import BoughError
from bough.models.files import hash_file

_UNTIMED_STEPS = 1

Rates = dict[int, float]
"""Tokens a second by the number of lanes, or by the length of a run."""


@dataclass(frozen=True)
class Size:
    """What both sides reached at one size, in tokens a second; the largest load of the machine before a round."""

    file: str
    what: str  # decode, by lanes; prefill, by tokens
    size: int
    depth: int
    bough: float
    llama_cpp: float
    load: float

    @property
    def ratio(self) -> float:
        return self.bough / self.llama_cpp


@dataclass(frozen=True)
class LlamaCpp:
    """The programs of llama.cpp in a folder, over one file."""

    tools: Path
    file: Path
    threads: int

    def decode(self, lanes: Sequence[int], depth: int, steps: int) -> Rates:
        """One lane is measured by llama-bench, too, which does less beside the steps: the better of the two counts."""
        prompt = max(depth, 1)
        context = prompt + max(lanes) * (steps + 8) + 64
        sizes = ["-c", context, "-npp", prompt, "-ntg", steps, "-npl", ",".join(map(str, lanes)), "-pps", "-kvu"]
        output = self._run("llama-batched-bench", *sizes, "-tb", self.threads, "--output-format", "jsonl")
        rates = {row["pl"]: row["speed_tg"] for row in map(json.loads, _lines_of_json(output))}
        if 1 in rates:
            alone = json.loads(self._run("llama-bench", "-p", 0, "-n", steps, "-d", depth, "-r", 2, "-o", "json"))
            rates[1] = max(rates[1], alone[0]["avg_ts"])
        return rates

    def prefill(self, tokens: Sequence[int], depth: int) -> Rates:
        counts = ",".join(map(str, tokens))
        rows = json.loads(self._run("llama-bench", "-p", counts, "-n", 0, "-d", depth, "-r", 1, "-o", "json"))
        return {row["n_prompt"]: row["avg_ts"] for row in rows}

    def _run(self, program: str, *options: Any) -> str:
        command = [self.tools / program, "-m", self.file, "-t", self.threads, *options]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode:
            raise BoughError(f"{program} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout


@dataclass(frozen=True)
class OwnEngine:
    """Bough's engine with one file."""

    engine: Engine

    def decode(self, lanes: Sequence[int], depth: int, steps: int) -> Rates:
        chance, rates = random.Random(1), Rates()
        with self._lanes(depth, max(lanes), steps + _UNTIMED_STEPS) as at_prompt:
            for count in lanes:
                chosen, times = at_prompt(count), list[float]()
                for _ in range(steps + _UNTIMED_STEPS):
                    ids = self._random_ids(chance, count)
                    times.append(_seconds(lambda chosen=chosen, ids=ids: self.engine.step(chosen, ids)))  # type: ignore[misc]
                rates[count] = count * steps / sum(times[_UNTIMED_STEPS:])
        return rates

    def prefill(self, tokens: Sequence[int], depth: int) -> Rates:
        chance, rates = random.Random(2), Rates()
        with self._lanes(depth, 1, max(tokens)) as at_prompt:
            for count in tokens:
                [lane], ids = at_prompt(1), self._random_ids(chance, count)
                rates[count] = count / _seconds(lambda lane=lane, ids=ids: self._evaluate(lane, ids))  # type: ignore[misc]
        return rates

    @contextmanager
    def _lanes(self, depth: int, count: int, room: int) -> Iterator[Callable[[int], list[Lane]]]:
        """Yields a function that returns some of the lanes, each at the end of the same prompt of `depth` tokens."""
        lanes = [self.engine.make_lane() for _ in range(count)]
        kept: dict[Group, GroupSource] = {group: GroupSource() for group in self.engine.groups}
        if depth:
            lanes[0].reserve(depth)
            self._evaluate(lanes[0], self._random_ids(random.Random(0), depth))
            kept = keep(lanes[0], self.engine.groups)

        def at_prompt(number: int) -> list[Lane]:
            for lane in lanes[:number]:
                lane.clear()
                lane.reserve(depth + room)
                lane.adopt(depth, kept)
            return lanes[:number]

        try:
            yield at_prompt
        finally:
            for source in kept.values():
                items: list[Item] = [*source.pages, *([source.state] if source.state else [])]
                for item in items:
                    self.engine.release(item)
            for lane in lanes:
                lane.clear()

    def _evaluate(self, lane: Lane, ids: Sequence[int]) -> None:
        for start in range(0, len(ids), self.engine.max_chunk_tokens):
            self.engine.evaluate(lane, ids[start : start + self.engine.max_chunk_tokens])

    def _random_ids(self, chance: random.Random, count: int) -> list[int]:
        return [chance.randrange(self.engine.vocab_size) for _ in range(count)]


def llama_cpp(
    files: Annotated[list[Path], typer.Argument(help="GGUF files.")],
    tools: Annotated[Path, typer.Option(help="The folder with llama-bench and llama-batched-bench.")],
    lanes: Annotated[str, typer.Option(help="Numbers of lanes in a step, separated by commas.")] = "1,2,4,8",
    tokens: Annotated[str, typer.Option(help="Lengths of runs of prompt tokens.")] = "64,256,512,2048",
    depths: Annotated[str, typer.Option("--depth", help="Rows of each lane before.")] = "0,500",
    steps: Annotated[int, typer.Option(min=1, help="Steps in a round.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="The quickest counts.")] = 2,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    activations: Annotated[str, typer.Option(help="Bough's: exact or int8.")] = "exact",
    as_json: Json = False,
) -> None:
    """Decoding and prefill of GGUF files, beside llama.cpp on the same machine."""
    report, found = BenchReport("llama-cpp", as_json), list[Size]()
    counts = {"decode": read_numbers(lanes), "prefill": read_numbers(tokens)}
    hashes = {file.name: hash_file(file) for file in files}
    for file in files:
        with load_model(str(file), None, threads=threads, activations=activations, cache=False) as runner:
            ours, theirs = OwnEngine(runner.runtime.engine), LlamaCpp(tools, file, threads)
            report.line(f"{file.name}: {runner.runtime.engine.describe()}")
            for depth in read_numbers(depths, least=0):
                found += _measure(ours, theirs, "decode", counts["decode"], depth, rounds, steps)
                found += _measure(ours, theirs, "prefill", counts["prefill"], depth, rounds)
    columns = ("file", "what", "size", "depth", "Bough, tok/s", "llama.cpp, tok/s", "ratio", "load")
    report.table("Bough beside llama.cpp", columns, map(_row, found))
    report.line(report.machine_line())
    setup = {"threads": threads, "activations": activations, "steps": steps, "rounds": rounds, "sha256": hashes}
    report.finish({"setup": setup, "figures": [asdict(each) | {"ratio": round(each.ratio, 3)} for each in found]})


def _measure(
    ours: OwnEngine, theirs: LlamaCpp, what: str, sizes: Sequence[int], depth: int, rounds: int, *more: int
) -> list[Size]:
    """All sizes at one depth; the sides take turns round by round."""
    seen: tuple[list[Rates], list[Rates]] = ([], [])
    loads = []
    for _ in range(rounds):
        for side, rates in zip((ours, theirs), seen, strict=True):
            loads.append(read_load())
            rates.append(getattr(side, what)(sizes, depth, *more))
    best = [{size: max(each[size] for each in rates) for size in sizes} for rates in seen]
    return [Size(theirs.file.name, what, size, depth, best[0][size], best[1][size], max(loads)) for size in sizes]


def _seconds(run: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def _lines_of_json(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("{")]


def _row(each: Size) -> tuple[str, ...]:
    rates = (f"{each.bough:,.1f}", f"{each.llama_cpp:,.1f}", f"{each.ratio:.2f}", f"{each.load:.1f}")
    return (each.file, each.what, f"{each.size:,}", f"{each.depth:,}", *rates)
