"""Downloads against a real server: whole, broken off, resumed, damaged and refused."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bough.errors import DownloadError
from bough.models.fetching.download import Download, download, make_client
from tests.models.web_server import Recorder, Site, serving

BODY = bytes(range(256)) * 4_000


@pytest.fixture
def site() -> Iterator[Site]:
    with serving(Site(files={"/file": BODY})) as site:
        yield site


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with make_client(timeout_s=5) as client:
        yield client


def wanted(site: Site, folder: Path, sha256: str | None = None) -> Download:
    sha256 = sha256 or hashlib.sha256(BODY).hexdigest()
    return Download(f"{site.url}/file", folder / "down" / "file", sha256, num_attempts=4, pause=lambda _: None)


def test_a_whole_download_is_in_place_and_counted(site, client, tmp_path):
    progress = Recorder()

    file = download(wanted(site, tmp_path), client, progress)

    assert file.read_bytes() == BODY
    assert progress.totals == [len(BODY)]
    assert progress.done == [len(BODY)]
    assert progress.num_finished == 1
    assert list(file.parent.iterdir()) == [file]


def test_a_dropped_connection_is_resumed_where_it_broke(site, client, tmp_path):
    site.drops = [300_000, 100_000]
    progress = Recorder()

    file = download(wanted(site, tmp_path), client, progress)

    assert file.read_bytes() == BODY
    assert len(site.asked) == 3
    assert site.asked[1] == "GET /file bytes=300000-"
    assert progress.done == [len(BODY)]


def test_a_part_from_an_earlier_run_is_used(site, client, tmp_path):
    part = wanted(site, tmp_path).part
    part.parent.mkdir()
    part.write_bytes(BODY[:1000])
    progress = Recorder()

    file = download(wanted(site, tmp_path), client, progress)

    assert file.read_bytes() == BODY
    assert site.asked == ["GET /file bytes=1000-"]
    assert progress.done == [len(BODY)]


def test_a_part_that_is_whole_already_needs_no_more_bytes(site, client, tmp_path):
    part = wanted(site, tmp_path).part
    part.parent.mkdir()
    part.write_bytes(BODY)

    assert download(wanted(site, tmp_path), client).read_bytes() == BODY


def test_a_server_that_ignores_ranges_is_read_from_the_start(site, client, tmp_path):
    site.honours_ranges = False
    site.drops = [300_000]
    progress = Recorder()

    file = download(wanted(site, tmp_path), client, progress)

    assert file.read_bytes() == BODY
    assert progress.done == [len(BODY)]


def test_a_server_that_sends_another_range_is_asked_again_from_the_start(site, client, tmp_path):
    site.shifts_ranges = True
    site.drops = [300_000]

    assert download(wanted(site, tmp_path), client).read_bytes() == BODY
    assert site.asked[-1] == "GET /file"


@pytest.mark.parametrize("part", [b"\0" * 1000, BODY + b"more"], ids=["other bytes", "too long"])
def test_a_part_of_another_file_is_thrown_away(site, client, tmp_path, part):
    place = wanted(site, tmp_path).part
    place.parent.mkdir()
    place.write_bytes(part)

    assert download(wanted(site, tmp_path), client).read_bytes() == BODY


def test_wrong_bytes_are_deleted_and_both_hashes_told(site, client, tmp_path):
    expected = "0" * 64

    with pytest.raises(DownloadError, match=expected) as caught:
        download(wanted(site, tmp_path, expected), client)

    assert hashlib.sha256(BODY).hexdigest() in str(caught.value)
    assert list((tmp_path / "down").iterdir()) == []


def test_a_damaged_target_is_fetched_again(site, client, tmp_path):
    target = wanted(site, tmp_path).target
    target.parent.mkdir()
    target.write_bytes(b"damaged")

    assert download(wanted(site, tmp_path), client).read_bytes() == BODY


def test_a_right_target_is_not_fetched_again(site, client, tmp_path):
    download(wanted(site, tmp_path), client)

    download(wanted(site, tmp_path), client)

    assert len(site.asked) == 1


def test_a_connection_that_keeps_dropping_gives_up_and_keeps_what_came(site, client, tmp_path):
    site.drops = [1000] * 4

    with pytest.raises(DownloadError, match="broke off 4 times; 4,000 bytes are kept"):
        download(wanted(site, tmp_path), client)

    assert wanted(site, tmp_path).part.read_bytes() == BODY[:4000]


def test_an_http_error_is_told_with_its_status(site, client, tmp_path):
    missing = Download(f"{site.url}/missing", tmp_path / "file", "0" * 64)

    with pytest.raises(DownloadError, match="answered 404"):
        download(missing, client)


def test_no_network_is_told_at_once(client, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/file"

    with pytest.raises(DownloadError, match=r"cannot reach 127\.0\.0\.1.*is there a network"):
        download(Download(url, tmp_path / "file", "0" * 64, pause=pytest.fail), client)
