"""Options and markers that all tests share."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
import ssl
from pathlib import Path

import pytest

from bough.cache.residency.rates import Rates
from bough.config import limit_thread_spinning, load_settings
from bough.models import ModelFiles, pull
from bough.runtime import gguf_support, loading

TESTS = Path(__file__).parent
ALONE = (
    "server",
    "cli",
    "test_runner.py",
)  # servers and commands in processes of their own, which are run after the others

ssl.create_default_context = functools.cache(ssl.create_default_context)  # each client would read all certificates
limit_thread_spinning()  # before any test imports torch
os.environ["BOUGH_DISK"] = "0"  # no test leaves a tree behind, or finds one; those that want one say so
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with Ctrl-C ignored


def pytest_configure() -> None:
    """A busy machine fails no test: Hypothesis judges results, not how long they took."""
    if importlib.util.find_spec("hypothesis"):  # which tests on an accelerator do without
        from hypothesis import HealthCheck, settings

        settings.register_profile("bough", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("bough")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")
    parser.addoption("--packages", help="run the tests of the wheel and the sdist in this folder, too (make test-package)")


@pytest.hookimpl(tryfirst=True)  # before others choose by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in ALONE or item.path.name in ALONE or "model" in item.keywords:
            item.add_marker(pytest.mark.alone)
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: run with --slow"))
        if "package" in item.keywords and not config.getoption("--packages"):
            item.add_marker(pytest.mark.skip(reason="needs a wheel and an sdist: make test-package"))


def pytest_collection_finish() -> None:
    """Let the garbage collector look at what tests make, not at all modules: a collection takes 0.02 s instead of 0.5 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def all_versions_count_as_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make newest` runs tests with versions outside the range, which every load would name."""
    monkeypatch.setattr(loading, "find_untested", lambda *libraries: [])


@pytest.fixture
def reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on disk or in the store is read, however fast this machine computes and however slowly it reads."""
    monkeypatch.setattr(Rates, "note_prefill", lambda rates, start, end, seconds: None)  # what is unknown is not compared
    for name in ("STALLED_S", "UNKNOWN_S"):
        monkeypatch.setattr(f"bough.cache.residency.loading.{name}", 1e6)


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    """The default model in the user's own data folder: fetched and converted the first time, then found."""
    settings = load_settings()
    return pull("smollm2", settings, gguf_support(settings))
