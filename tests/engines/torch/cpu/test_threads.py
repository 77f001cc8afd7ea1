"""The kernels' own threads: engines at the same time, forked processes, more threads than cores, and Ctrl-C."""

from __future__ import annotations

import _thread
import itertools
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bough.cache.tree.state import Lane
from bough.engines.torch import TorchEngine
from bough.engines.torch.cpu import library
from bough.engines.torch.cpu.library import load_kernels
from tests.contract.driving import make_ids, new_lane, rewind, run
from tests.packed_models import load_packed, make_wide_model, save_model

pytestmark = pytest.mark.usefixtures("kernels")

NUM_TOKENS = 150
SECONDS = 60  # after which a child counts as stuck


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_wide_model("llama"), tmp_path_factory.mktemp("threads") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> TorchEngine:
    return load_packed(folder, threads=3)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Tensor:
    return decode(load_packed(folder, threads=1))


def decode(engine: TorchEngine, seed: int = 0) -> Tensor:
    """The logits after many steps of one token."""
    ids = make_ids(engine, NUM_TOKENS, seed)
    lane = new_lane(engine, NUM_TOKENS)
    logits: Tensor = run(engine, lane, ids, [1] * NUM_TOKENS)
    return logits


def test_engines_in_several_threads_do_not_disturb_each_other(folder: Path, engine: TorchEngine, wanted: Tensor) -> None:
    engines = [engine, load_packed(folder, threads=3), load_packed(folder, threads=5)]
    with ThreadPoolExecutor(len(engines)) as pool:
        found = [each.result(SECONDS) for each in [pool.submit(decode, one) for one in engines]]

    assert all(torch.equal(each, wanted) for each in found)


def test_the_kernels_compute_the_same_with_torchs_threads_and_with_their_own(folder: Path, wanted: Tensor) -> None:
    engine = load_packed(folder, threads=3)  # which takes torch's, where there is one runtime of them
    kernels = load_kernels()

    with_torchs = decode(engine)
    kernels.share_threads(None)
    with_own = decode(engine)
    kernels.share_threads(library.find_parallel())

    assert torch.equal(with_torchs, wanted)
    assert torch.equal(with_own, wanted)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other runtimes")
def test_torchs_runtime_is_found_once_torch_has_loaded_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = library._MAPS.read_text().splitlines(keepends=True)
    torchs = [line for line in lines if str(Path(torch.__file__).parent) in line]  # other tests load other runtimes, too

    monkeypatch.setattr(library, "_MAPS", tmp_path / "maps")
    assert library.find_parallel() is None  # no such file
    (tmp_path / "maps").write_text("".join(torchs))
    assert library.find_parallel()
    (tmp_path / "maps").write_text("".join([*torchs, "7f02-7f03 r-xp 0 0 0 /b/libgomp-1.so.1\n"]))
    assert library.find_parallel() is None  # two runtimes


def test_many_more_threads_than_cores_end_under_load(folder: Path, wanted: Tensor) -> None:
    engine = load_packed(folder, threads=40)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        assert torch.equal(decode(engine), wanted)
    finally:
        for each in busy:
            each.kill()
            each.wait()


def fork_and_decode(engine: TorchEngine, wanted: Tensor) -> int:
    """The exit status of a child that decodes: 0 if its logits are right."""
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        try:
            os._exit(0 if torch.equal(decode(engine), wanted) else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_threads_of_its_own(engine: TorchEngine, wanted: Tensor) -> None:
    decode(engine)

    assert [fork_and_decode(engine, wanted) for _ in range(2)] == [0, 0]
    assert torch.equal(decode(engine), wanted)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_in_the_middle_of_a_step_of_another_thread_does_not_wait_for_it(
    folder: Path, engine: TorchEngine, wanted: Tensor
) -> None:
    other, stop = load_packed(folder, threads=3), threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            decode(other)

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        assert [fork_and_decode(engine, wanted) for _ in range(3)] == [0] * 3
    finally:
        stop.set()
        thread.join()


def test_ctrl_c_between_steps_leaves_a_lane_that_goes_on(engine: TorchEngine, wanted: Tensor) -> None:
    ids = make_ids(engine, NUM_TOKENS)
    lane = new_lane(engine, NUM_TOKENS)
    run(engine, lane, ids, [1] * 50)

    for number in range(10):
        with pytest.raises(KeyboardInterrupt):
            step_until_interrupted(engine, lane, 50, ids[50], number)

    rewind(engine, lane, 50, {})
    assert torch.equal(run(engine, lane, ids, [1] * (NUM_TOKENS - 50)), wanted)


def step_until_interrupted(engine: TorchEngine, lane: Lane, offset: int, token_id: int, num_steps: int) -> None:
    """One token on the lane, again and again at the same offset; Ctrl-C comes at some moment after so many steps."""
    for number in itertools.count():
        if number == num_steps:
            threading.Thread(target=_thread.interrupt_main).start()
        rewind(engine, lane, offset, {})
        engine.step([lane], [token_id])
