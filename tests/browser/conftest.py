"""Chromium from the system, a real server with the default model, and pages that must leave no error behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from bough.models import ModelFiles
from tests.server.servers import Server, running

ANSWER_MS = 60_000  # a busy machine
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
)
MEANT = ("Failed to load resource", "net::ERR_")  # a browser's own words on a server that is away, or on a 401

OpenPage = Callable[..., Page]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


def find_chromium() -> str:
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "there is no chromium: install it (Debian: apt-get install chromium), or set CHROMIUM to its program"
    return program


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium. `make test-browser` installs it where it may."""
    expect.set_options(timeout=ANSWER_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(smollm2_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the default model, and a tree of its own."""
    with running("smollm2", tmp_path_factory.mktemp("browser"), lanes=4) as server:
        yield server


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens the page of a server in a browser that knows nothing yet. At the end no page may have reported an error."""
    problems: list[str] = []
    contexts = []

    def open_page(url: str, *, width: int = 1400, height: int = 900, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(ANSWER_MS)
        page.on("pageerror", lambda error: problems.append(f"page error: {error}"))
        page.on("console", lambda message: _note(problems, message))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def _note(problems: list[str], message: ConsoleMessage) -> None:
    if message.type in ("error", "warning") and not any(each in message.text for each in MEANT):
        problems.append(f"{message.type}: {message.text}")
