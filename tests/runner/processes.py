"""Ends of whole processes, each in a child of this script: forks with a loaded model, and exits without `close`.

    python -m tests.runner.processes MODEL_FOLDER CACHE_FOLDER

Each function below runs in a process of its own, with a tree of its own on disk, and leaves by the usual way out. The last
line of the output is a JSON object that says of each how its process ended: "exit 0", "signal 2", or "hangs".
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, LlamaForCausalLM

import bough
from bough import RequestError, Runner
from bough.engines.torch import TorchEngine

IMPORTED = (AutoTokenizer, LlamaForCausalLM, TorchEngine)  # so that the children need not import them one by one
BOUND_S = 100
PROMPT = list(range(3, 90))
ENDLESS: Any = {"max_tokens": 30_000, "ignore_eos": True}
Load = Callable[[], Runner]


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a child that then leaves through `sys.exit`; returns its process id."""
    child = os.fork()
    if child == 0:
        work()
        sys.exit(0)
    return child


def wait_for(child: int) -> str:
    """How a child ended. One that does not end in time is killed."""
    is_killed = threading.Event()

    def kill() -> None:
        is_killed.set()
        os.kill(child, signal.SIGKILL)

    killer = threading.Timer(BOUND_S, kill)
    killer.start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    killer.cancel()
    if is_killed.is_set():
        return "hangs"
    return f"exit {code}" if code >= 0 else f"signal {-code}"


def must_refuse(call: Callable[[], object]) -> None:
    try:
        call()
    except RequestError as error:
        assert "a forked process must load it for itself" in str(error), error
    else:
        raise AssertionError("a forked process was answered")


def use_in_a_fork(load: Load) -> None:
    """A child uses everything of its parent's runner; the parent, with a stream open, goes on afterwards."""
    runner = load()
    chat, stream, unbegun = runner.chat(), runner.stream(PROMPT, **ENDLESS), runner.stream(PROMPT, **ENDLESS)
    next(stream)
    cache = runner.cache

    def use() -> None:
        calls: list[Callable[[], object]] = [
            lambda: next(stream),
            lambda: next(unbegun),
            lambda: runner.generate(PROMPT),
            lambda: runner.batch([PROMPT]),
            lambda: runner.warm(PROMPT),
            lambda: asyncio.run(runner.agenerate(PROMPT)),
            lambda: chat.send("Hello"),
            lambda: runner.cache.stats(),
            lambda: cache.clear(),
        ]
        for call in calls:
            must_refuse(call)
        runner.close()

    assert wait_for(fork(use)) == "exit 0"
    next(stream)
    stream.close()
    assert runner.generate(PROMPT, max_tokens=1).usage.cached_tokens == len(PROMPT) - 1
    runner.close()


def fork_before_the_first_request(load: Load) -> None:
    runner = load()
    assert wait_for(fork(lambda: must_refuse(lambda: runner.generate(PROMPT)))) == "exit 0"
    runner.generate(PROMPT, max_tokens=1)


def fork_and_drop(load: Load) -> None:
    """A child that only ends, with the runner as garbage; and one that is forked while other threads ask."""
    runner = load()
    runner.generate(PROMPT, max_tokens=1)
    asking = [threading.Thread(target=runner.generate, args=(PROMPT,), kwargs={"max_tokens": 300}) for _ in range(4)]
    for each in asking:
        each.start()
    holder = [runner]
    del runner

    def drop() -> None:
        holder.clear()
        gc.collect()

    children = [fork(drop) for _ in range(2)]
    assert [wait_for(child) for child in children] == ["exit 0"] * 2
    for each in asking:
        each.join()
    holder[0].close()


def exit_without_close(load: Load) -> None:
    load().generate(PROMPT, max_tokens=1)


def exit_with_requests_under_way(load: Load) -> None:
    runner = load()
    stream = runner.stream(PROMPT, **ENDLESS)
    next(stream)
    globals()["kept until the modules are cleared"] = stream
    threading.Thread(target=runner.generate, args=(PROMPT,), kwargs=ENDLESS, daemon=True).start()


def exit_after_the_runner_was_dropped(load: Load) -> None:
    runner = load()
    runner.generate(PROMPT, max_tokens=1)
    del runner
    gc.collect()


def exit_by_ctrl_c(load: Load) -> None:
    runner = load()
    runner.generate(PROMPT, max_tokens=1)
    engine = runner.runtime.engine
    step, num_steps = engine.step, itertools.count()

    def interrupted(lanes: Any, ids: Any) -> Any:
        if next(num_steps) == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return step(lanes, ids)

    engine.step = interrupted
    try:
        runner.generate(PROMPT, **ENDLESS)
    except KeyboardInterrupt:
        sys.exit(130)


def exit_from_a_loop_that_raises(load: Load) -> None:
    runner = load()

    async def ask() -> None:
        stream = runner.astream(PROMPT, **ENDLESS)
        await anext(stream)  # it has a lane before the others do
        tasks = [asyncio.ensure_future(runner.agenerate(PROMPT, **ENDLESS)) for _ in range(3)]
        await anext(stream)
        assert tasks
        sys.exit(5)

    asyncio.run(ask())


ENDS: list[Callable[[Load], None]] = [
    use_in_a_fork,
    fork_before_the_first_request,
    fork_and_drop,
    exit_without_close,
    exit_with_requests_under_way,
    exit_after_the_runner_was_dropped,
    exit_by_ctrl_c,
    exit_from_a_loop_that_raises,
]


def load_from(model_folder: Path, cache_folder: Path) -> Runner:
    return bough.load(model_folder, engine="torch", threads=1, lanes=2, disk="1G", cache_folder=cache_folder)


def main(model_folder: Path, cache_folder: Path) -> None:
    """Run all at the same time, each in a child, and print how they ended. This process loads nothing: it can be forked."""
    gc.freeze()  # children end sooner if they do not look for garbage among the modules
    children = {}
    for end in ENDS:
        load = partial(load_from, model_folder, cache_folder / end.__name__)
        children[end.__name__] = fork(partial(end, load))
    print(json.dumps({name: wait_for(child) for name, child in children.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
