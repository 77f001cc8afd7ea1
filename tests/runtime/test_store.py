"""Two machines share their trees through a real store: a folder, and an S3 server on this machine. The library's names."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import bough
from bough.cache.store import NotPlain, StoreError
from bough.cache.store.format import DELETED, PAGE_KEY, PREFIX
from bough.cache.store.sweeping import clear_model, sweep
from bough.config import Settings, load_settings, read_cluster_secret
from bough.errors import SettingsError
from bough.runtime.object_store import UrlStore
from tests.tiny_models import make_folder

pytestmark = pytest.mark.usefixtures("reading_pays")

KINDS = ("llama", "gemma3_text", "qwen3_next", "mamba2")  # full, window, hybrid and recurrent state
SECRET = "a secret of a few words"
chance = random.Random(5)
PROMPT = [chance.randrange(3, 90) for _ in range(600)]
AGAIN = [*PROMPT, *(chance.randrange(3, 90) for _ in range(300))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@contextmanager
def s3_server() -> Iterator[tuple[str, int]]:
    """An S3 server of this process with an empty bucket "trees", which the environment names: its host and port."""
    moto = pytest.importorskip("moto.server")
    import boto3

    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    known = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint, **known).create_bucket(Bucket="trees")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ENDPOINT_URL", endpoint), ("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test")):
            patch.setenv(f"AWS_{name}", value)
        patch.setenv("AWS_REGION", "us-east-1")
        yield host, port
    server.stop()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of an empty bucket on an S3 server of this process."""
    with s3_server():
        yield "s3://trees/below"


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "folder" else request.getfixturevalue("bucket")


def load(name: str, folders: Path, cache_folder: Path, url: str, **settings: Any) -> bough.Runner:
    if not (folders / name).exists():
        make_folder(name, folders / name)
    (secret := folders / "secret").write_text(SECRET)
    options = {"disk": "1GB", "disk_free": 0, "store": url, "store_secret_file": secret} | settings
    return bough.load(folders / name, cache_folder=cache_folder, threads=1, **options)


def ask(runner: bough.Runner, prompt: list[int], **options: Any) -> bough.Completion:
    return runner.generate(prompt, max_tokens=4, ignore_eos=True, **options)


def roots(url: str) -> set[str]:
    """The roots that a store has something of."""
    keys = [each.key for page in UrlStore(url).list(PREFIX) for each in page]
    return {key.rpartition("/")[0] for key in keys if PAGE_KEY.fullmatch(key)}


@pytest.mark.parametrize("name", KINDS)
def test_a_machine_with_an_empty_disk_answers_from_the_store_as_without_it(
    name: str, url: str, folders: Path, tmp_path: Path
) -> None:
    with load(name, folders, tmp_path / "first", url) as runner:
        ask(runner, PROMPT)
        expected = ask(runner, AGAIN, keep_state=False)
    with load(name, folders, tmp_path / "second", url, disk=0) as runner:
        found = ask(runner, AGAIN)
        stats = runner.cache.stats()
    assert found.token_ids == expected.token_ids
    assert found.usage.cached_tokens == 512
    assert found.timings.loading.store_bytes == stats["store_loaded_bytes"] > 0


def test_clearing_deletes_in_the_store_too(url: str, folders: Path, tmp_path: Path) -> None:
    with load("llama", folders, tmp_path / "first", url) as runner:
        ask(runner, PROMPT, salt="a")
        ask(runner, PROMPT, salt="b")
        assert runner.cache.flush()
        held = roots(url)
        runner.cache.clear("a")
        assert len(roots(url)) == len(held) - 1
        runner.cache.clear("b")
        assert len(roots(url)) == len(held) - 2


def test_other_things_in_the_same_place_survive_sweeps_and_clears(url: str) -> None:
    objects, mark = UrlStore(url), "ab" * 32
    others = ["_deleted/2025/report.pdf", f"photos/{'0' * 32}/{'1' * 32}", f"{mark}/{'0' * 32}/{'1' * 32}"]
    ours = PREFIX + others[-1]
    for key in (*others, ours):
        objects.put(key, b"content")
    sweep(objects, time.time() + 10**6, 0, 1.0)
    clear_model(objects, mark, "0" * 16, time.time)
    assert objects.head(ours) is None
    assert all(objects.head(key) is not None for key in others)
    objects.delete([*others, f"{DELETED}{mark}/all/{'0' * 16}"])


def test_objects_are_written_read_replaced_listed_and_deleted(url: str) -> None:
    objects = UrlStore(url)
    assert objects.get("a/b/c", 100) is None and objects.head("a/b/c") is None
    assert objects.put_new("a/b/c", b"one") and not objects.put_new("a/b/c", b"two")
    held, head = objects.get("a/b/c", 100), objects.head("a/b/c")
    assert held is not None and bytes(held.content) == b"one"
    assert head is not None and head.nbytes == 3 and abs(head.modified - held.modified) < 2
    assert objects.replace("a/b/c", b"three", held.tag) and not objects.replace("a/b/c", b"four", held.tag)
    objects.put("a/bb/c", memoryview(b"five"))
    assert [(each.key, each.nbytes) for page in objects.list("a/b/") for each in page] == [("a/b/c", 5)]
    objects.delete(["a/b/c", "a/b/c", "a/bb/c", "nothing"])
    assert [each for page in objects.list("a/") for each in page] == []


def test_an_object_that_is_too_large_is_not_read(url: str) -> None:
    objects = UrlStore(url)
    for content, found in ((bytes(10), bytes(10)), (bytes(11), b"")):
        objects.put("large", content)
        held = objects.get("large", 10)
        assert held is not None and bytes(held.content) == found and held.nbytes == len(content)
    objects.delete(["large"])


@pytest.fixture
def hostile(tmp_path: Path) -> UrlStore:
    """A folder store in which a pipe, a link to a file and a link to a folder lie where objects should."""
    folder, outside = tmp_path / "store", tmp_path / "outside"
    objects = UrlStore(str(folder))
    outside.mkdir()
    (outside / "private").write_text("private")
    objects.put("a/object", b"content")
    os.mkfifo(folder / "a" / "pipe")
    (folder / "a" / "link").symlink_to(outside / "private")
    (folder / "b").symlink_to(outside)
    return objects


@pytest.mark.parametrize(
    ("key", "what"),
    [("a/pipe", "a named pipe"), ("a/link", "a symbolic link"), ("b/private", "a symbolic link"), ("a", "a folder")],
)
def test_pipes_links_and_folders_are_no_objects_and_are_left_as_they_are(
    hostile: UrlStore, tmp_path: Path, key: str, what: str
) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: hostile.get(key, 100),
        lambda: hostile.head(key),
        lambda: hostile.put(key, b"new"),
        lambda: hostile.put_new(key, b"new"),
        lambda: hostile.replace(key, b"new", "tag"),
        lambda: hostile.delete([key]),
    ]
    for call in calls:
        with pytest.raises(NotPlain, match=f"is {what}, and must be a "):
            call()
    assert [each.key for prefix in ("a/", "b/") for page in hostile.list(prefix) for each in page] == ["a/object"]
    assert (tmp_path / "outside" / "private").read_text() == "private"
    assert sorted(path.name for path in (tmp_path / "store" / "a").iterdir()) == ["link", "object", "pipe"]


def test_a_pipe_in_place_of_a_page_costs_that_page_alone(folders: Path, tmp_path: Path) -> None:
    url = tmp_path / "store"
    with load("llama", folders, tmp_path / "first", str(url)) as runner:
        expected = ask(runner, PROMPT)
        assert runner.cache.flush()
    pages = sorted(
        (page for page in url.rglob("*") if PAGE_KEY.fullmatch(str(page.relative_to(url)))),
        key=lambda p: p.stat().st_mtime_ns,
    )
    pages[-1].unlink()
    os.mkfifo(pages[-1])
    with load("llama", folders, tmp_path / "second", str(url), disk=0) as runner:
        found = ask(runner, PROMPT)
        stats = runner.cache.stats()
    assert found.token_ids == expected.token_ids
    assert found.usage.cached_tokens == 256 and not stats["store_is_failing"]
    assert stats["store_misses"] == 1


def test_a_server_that_is_not_there_is_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENDPOINT_URL", "http://127.0.0.1:9"), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(StoreError):
        UrlStore("s3://nowhere").get("a", 100)


def test_a_store_that_is_gone_costs_no_answer(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("ENDPOINT_URL", "http://127.0.0.1:9"), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with load("llama", folders, tmp_path, "s3://nowhere") as runner:
        assert ask(runner, PROMPT).usage.computed_tokens == 600
        stats = runner.cache.stats()
    assert stats["store_is_failing"] and stats["store_errors"] > 0 and stats["store_problem"]
    assert [each for each in caplog.messages if "answers go on without it" in each]


def test_a_store_needs_a_secret_and_a_url_that_is_known(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="needs a secret"):
        Settings(store="s3://bucket")
    for url in ("gopher://x", "s3:/bucket", "s3:bucket/path", "file:/trees"):  # none of which is a folder
        with pytest.raises(SettingsError, match="cannot be opened"):
            UrlStore(url)
    file = tmp_path / "secret"
    settings = load_settings({"store": "s3://bucket", "store_secret_file": file})
    with pytest.raises(SettingsError, match="cannot be read"):
        read_cluster_secret(settings)
    file.write_text("short")
    with pytest.raises(SettingsError, match="has 5 characters, and must have 16"):
        read_cluster_secret(settings)
    file.write_text(SECRET)
    secret = read_cluster_secret(settings)
    file.write_text(f"{SECRET}\n")
    assert read_cluster_secret(settings) == secret != b""


def test_a_folder_that_is_made_for_a_store_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "store"
    UrlStore(str(folder)).put("a", b"tokens of somebody")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    UrlStore(str(folder)).put("b", b"tokens that a group shares")
    assert folder.stat().st_mode & 0o777 == 0o770
