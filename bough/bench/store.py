"""`bough bench store`: a conversation on a machine that has never seen it, from a store that another has filled."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bough.bench.timing import answer, first_token_ms, median_ms, warm_up
from bough.bench.workload import random_prompts
from bough.errors import BoughError
from bough.runner import load
from bough.runtime.object_store import UrlStore

ANSWER_TOKENS = 4
START_WITHIN_S = 60.0


@dataclass(frozen=True)
class StoreFigures:
    """Medians in milliseconds of the first token of a prompt that another machine has computed."""

    tokens: int
    computed_ms: float  # without a store
    computed_while_sending_ms: float
    fetched_ms: float
    loading_ms: float  # part of fetched_ms
    fetched_tokens: int
    fetched_bytes: int
    sent_objects: int
    sent_bytes: int
    answers_equal: bool
    load_average: float
    setup: dict[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.computed_ms / self.fetched_ms


def measure_store(model: str | None, url: str, num_tokens: int, rounds: int = 3, **settings: Any) -> StoreFigures:
    """Compute prompts without a store, then on a machine that sends them; then answer them on one with an empty disk."""
    shared: dict[str, Any] = {"store": url, "store_secret": secrets.token_hex(16), "disk": 0}
    with tempfile.TemporaryDirectory(prefix="bough-store-") as folder:
        with load(model, cache_folder=folder, disk=0, **settings) as runner:
            warm_up(runner.runtime)
            vocabulary = range(3, runner.runtime.engine.vocab_size)
            prompts = random_prompts(vocabulary, num_tokens, rounds, 0)
            computed = [answer(runner.runtime, prompt, ANSWER_TOKENS) for prompt in prompts]
        with load(model, cache_folder=folder, **shared, **settings) as runner:
            warm_up(runner.runtime)
            sending = [answer(runner.runtime, prompt, ANSWER_TOKENS) for prompt in prompts]
            runner.cache.flush()
            sent = runner.cache.stats()
        with load(model, cache_folder=folder, **shared, **settings) as runner:
            warm_up(runner.runtime)
            fetched = [answer(runner.runtime, prompt, ANSWER_TOKENS) for prompt in prompts]
            setup = runner.runtime.engine.describe()
    return StoreFigures(
        tokens=num_tokens,
        computed_ms=first_token_ms(computed),
        computed_while_sending_ms=first_token_ms(sending),
        fetched_ms=first_token_ms(fetched),
        loading_ms=median_ms([each.timings.loading.load_s for each in fetched]),
        fetched_tokens=min(each.usage.cached_tokens for each in fetched),
        fetched_bytes=min(each.timings.loading.store_bytes for each in fetched),
        sent_objects=sent["store_sent"],
        sent_bytes=sent["store_sent_bytes"],
        answers_equal=[a.token_ids for a in computed] == [a.token_ids for a in fetched],
        load_average=round(os.getloadavg()[0], 1),
        setup=setup,
    )


@contextmanager
def temporary_folder() -> Iterator[str]:
    """The URL of a store in a folder that goes afterwards."""
    with tempfile.TemporaryDirectory(prefix="bough-store-") as folder:
        yield str(Path(folder) / "store")


@contextmanager
def local_s3() -> Iterator[str]:
    """The URL of a bucket on moto's S3 server, in a process of its own on this machine; needs the package moto."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    known = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "REGION": "us-east-1"}
    known |= {"ACCESS_KEY_ID": "bench", "SECRET_ACCESS_KEY": "bench"}
    before = dict(os.environ)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        os.environ.update({f"AWS_{name}": value for name, value in known.items()})
        _make_bucket(f"http://127.0.0.1:{port}/trees", server)
        yield "s3://trees"
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.terminate()
        server.wait()


def _make_bucket(url: str, server: subprocess.Popen[bytes]) -> None:
    """Make a bucket as soon as the server answers."""
    import httpx

    until_s = time.monotonic() + START_WITHIN_S
    while True:
        try:
            httpx.put(url, headers={"Authorization": "AWS4-HMAC-SHA256 Credential=bench/x/us-east-1/s3/aws4_request"})
            UrlStore("s3://trees").head("nothing")
            return
        except (httpx.TransportError, BoughError) as error:
            if server.poll() is not None or time.monotonic() > until_s:
                raise BoughError(f"moto's S3 server does not start: {error}; pip install 'moto[server]'") from error
            time.sleep(0.2)
