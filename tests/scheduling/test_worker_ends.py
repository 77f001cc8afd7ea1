"""The end of the engine's thread: what is released, what is raised, and what a fork of the process may do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from bough.errors import ShuttingDown
from bough.generate.request import Request
from bough.scheduling.worker import Limits, Worker
from bough.tokens import Tokens
from bough.types import SamplingParams
from tests.scheduling.concert import Client, Concert
from tests.scheduling.test_worker import holding
from tests.waiting import BOUND_S, wait_until


def make_worker(concert: Concert, on_close: Callable[[], None]) -> Worker:
    return Worker(concert.scheduler, Limits(), take_stats=dict, on_idle=lambda: False, on_close=on_close)


def test_what_the_thread_has_used_is_released_on_it_after_the_last_request_has_ended() -> None:
    concert, released = Concert(), list[tuple[str, int]]()
    worker = make_worker(concert, lambda: released.append((threading.current_thread().name, concert.cache.lanes.num_busy)))
    client = Client()
    worker.submit(concert.prepare(Request(Tokens.of([1, 2, 3]), SamplingParams(max_tokens=500, ignore_eos=True)), client))
    wait_until(lambda: client.tokens)
    worker.close()
    worker.close()

    assert client.is_done
    assert released == [("bough-engine", 0)]


def test_an_error_while_releasing_is_raised_by_who_closes_once() -> None:
    worker = make_worker(Concert(), lambda: 1 // 0)  # type: ignore[arg-type, return-value]

    with pytest.raises(ZeroDivisionError):
        worker.close()
    worker.close()


def test_closing_soon_waits_for_nothing_and_the_thread_ends_by_itself() -> None:
    concert, is_released = Concert(), threading.Event()
    worker = make_worker(concert, is_released.set)
    with holding(worker):
        worker.close_soon()
        assert not is_released.is_set()
        with pytest.raises(ShuttingDown):
            worker.call(int)

    assert is_released.wait(BOUND_S)
    worker.close()


FORKING = """
import os, threading
from bough.errors import RequestError
from bough.generate.request import Request
from bough.scheduling.worker import Limits, Worker
from bough.tokens import Tokens
from bough.types import SamplingParams
from bough.scheduling.job import Job
from tests.scheduling.concert import Client, Concert

concert = Concert()
worker = Worker(concert.scheduler, Limits(), take_stats=dict, on_idle=lambda: False, on_close=lambda: print("released"))
job = concert.prepare(Request(Tokens.of([1, 2, 3]), SamplingParams()), Client())
worker._wakes.acquire()  # as another thread might hold it at the moment of the fork
child = os.fork()
if child == 0:
    def use_in_child():
        for use in (lambda: worker.submit(job), lambda: worker.call(int), lambda: worker.run_in_slices(lambda: iter(()))):
            try:
                use()
            except RequestError as error:
                print(error)
        worker.close_soon()
        worker.close()
        print("done", flush=True)

    using = threading.Thread(target=use_in_child)
    using.start()
    using.join(20)
    os._exit(using.is_alive())
worker._wakes.release()
assert os.waitpid(child, 0)[1] == 0, "the child hangs"
assert worker.call(lambda: 7).result(20) == 7
worker.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_is_refused_with_the_reason_and_the_first_one_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    *refused, end, released = done.stdout.splitlines()
    assert len(refused) == 3 and all("a forked process must load it for itself" in each for each in refused)
    assert (end, released) == ("done", "released")
