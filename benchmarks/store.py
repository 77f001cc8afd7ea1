"""The first token after a restart, from disk, and on another machine, from a store, or computed."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.timing import answer, first_token_ms, median_ms
from bough.bench.alone import warm_up
from bough.bench.server import find_free_port
from bough.bench.workload import random_prompts
from bough.cli import options
from bough.cli.bench import BenchReport, Json, Model
from bough.errors import BoughError
from bough.runner import load
from bough.runtime.object_store import UrlStore

ANSWER_TOKENS = 4
START_WITHIN_S = 60.0


@dataclass(frozen=True)
class StoreFigures:
    """Medians in milliseconds of the first token of a prompt that was computed before a restart, or on another machine."""

    tokens: int
    computed_ms: float  # without disk and store
    computed_while_writing_ms: float
    restarted_ms: float
    reading_ms: float  # part of restarted_ms
    read_bytes: int
    computed_while_sending_ms: float
    fetched_ms: float
    loading_ms: float  # part of fetched_ms
    fetched_tokens: int
    fetched_bytes: int
    sent_objects: int
    sent_bytes: int
    answers_equal: bool
    setup: dict[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.computed_ms / self.fetched_ms


def measure_store(model: str | None, url: str, num_tokens: int, rounds: int = 3, **settings: Any) -> StoreFigures:
    """Compute prompts without disk and store, then with each of them; answer them after a restart and from the store."""
    with tempfile.TemporaryDirectory(prefix="bough-store-") as folder:
        secret = Path(folder) / "secret"
        secret.write_text(secrets.token_hex(16))
        shared: dict[str, Any] = {"store": url, "store_secret_file": secret, "disk": 0}
        with load(model, cache_folder=folder, disk=0, **settings) as runner:
            warm_up(runner.runtime)
            vocabulary = range(3, runner.runtime.engine.vocab_size)
            prompts = random_prompts(vocabulary, num_tokens, rounds, 0)
            computed = [answer(runner.runtime, prompt, ANSWER_TOKENS) for prompt in prompts]
        with load(model, cache_folder=folder, disk="64G", **settings) as runner:
            warm_up(runner.runtime)
            writing = [answer(runner.runtime, prompt, ANSWER_TOKENS) for prompt in prompts]
        with load(model, cache_folder=folder, disk="64G", **settings) as runner:
            warm_up(runner.runtime)
            restarted = [answer(runner.runtime, prompt, ANSWER_TOKENS) for prompt in prompts]
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
        computed_while_writing_ms=first_token_ms(writing),
        restarted_ms=first_token_ms(restarted),
        reading_ms=median_ms([each.timings.loading.load_s for each in restarted]),
        read_bytes=min(each.timings.loading.disk_bytes for each in restarted),
        computed_while_sending_ms=first_token_ms(sending),
        fetched_ms=first_token_ms(fetched),
        loading_ms=median_ms([each.timings.loading.load_s for each in fetched]),
        fetched_tokens=min(each.usage.cached_tokens for each in fetched),
        fetched_bytes=min(each.timings.loading.store_bytes for each in fetched),
        sent_objects=sent["store_sent"],
        sent_bytes=sent["store_sent_bytes"],
        answers_equal=len({tuple(each.token_ids for each in answers) for answers in (computed, restarted, fetched)}) == 1,
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
    port = find_free_port()
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


@options.with_flags(options.setting_flags("threads"))
def store(
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=512)] = 2000,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    url: Annotated[str | None, typer.Option(help="The store; not given: a folder that goes afterwards.")] = None,
    s3: Annotated[bool, typer.Option("--s3", help="Use moto's S3 server on this machine.")] = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """A conversation after a restart, and on a machine that has never seen it: read from disk or a store, or computed."""
    report = BenchReport("store", as_json)
    location = nullcontext(url) if url is not None else local_s3() if s3 else temporary_folder()
    with report.console.status("measuring"), location as chosen:
        figures = measure_store(model, chosen, tokens, rounds, **settings)
    rows = {
        "first token, computed": figures.computed_ms,
        "computed, while pages are written": figures.computed_while_writing_ms,
        "first token, after a restart": figures.restarted_ms,
        "of it reading": figures.reading_ms,
        "computed, while pages are sent": figures.computed_while_sending_ms,
        "first token, from the store": figures.fetched_ms,
        "of it loading": figures.loading_ms,
    }
    title = f"{figures.tokens:,} tokens, medians"
    report.table(title, ("", "ms"), [(label, f"{value:,.2f}") for label, value in rows.items()])
    report.line(
        f"{figures.fetched_tokens:,} tokens came as {figures.fetched_bytes / 2**20:,.1f} MiB · {figures.ratio:.1f}× sooner"
        f" · {figures.sent_objects:,} objects sent · answers equal: {figures.answers_equal}"
    )
    report.finish(asdict(figures))
