"""Stores of objects by their URL: S3 and what speaks like it, Google's, Azure's, a folder, or memory, through obstore.

Every call ends within a bounded time: it is tried once more at most, because a store that is slow is of no use to a
request that could compute. Credentials come from where obstore looks for them, the environment above all.

In a folder only plain files in plain folders are objects. obstore follows links, out of the folder too, and opens pipes,
which waits for ever: so each key is looked at first. Who can write the folder could still put a link there in between.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bough.cache.store import Listed, NotPlain, Stored, StoreError
from bough.cache.tree.state import Buffer
from bough.errors import SettingsError
from bough.system.distribution import install_command

if TYPE_CHECKING:
    from obstore.store import ObjectStore as AnyStore

TIMEOUT_S = 10
CONNECT_S = 3

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
}


class UrlStore:
    """The objects below a URL."""

    def __init__(self, url: str, **options: Any) -> None:
        try:
            import obstore
            from obstore import exceptions
        except ImportError as error:
            raise SettingsError(f"store is {url!r}, and needs the package obstore: {install_command('store')}") from error
        self._api, self._errors = obstore, exceptions
        self._not_found = (FileNotFoundError, exceptions.NotFoundError)
        try:
            self._folder = _find_folder(url)
            self._store = _open(url, self._folder, options)
        except Exception as error:  # whatever it raises for a URL that it does not know
            raise SettingsError(f"store is {url!r}, which cannot be opened: {_first_line(error)}") from error

    def get(self, key: str, max_bytes: int) -> Stored | None:
        with self._translating():
            self._require_plain(key)
            try:
                found = self._api.get(self._store, key)
                meta = found.meta
                content: Buffer = memoryview(found.bytes()) if meta["size"] <= max_bytes else b""
            except self._not_found:
                return None
            tag = meta["e_tag"] or meta["version"] or ""
            return Stored(content, meta["size"], meta["last_modified"].timestamp(), tag)

    def head(self, key: str) -> Listed | None:
        with self._translating():
            self._require_plain(key)
            try:
                return _listed(self._api.head(self._store, key))
            except self._not_found:
                return None

    def put(self, key: str, content: Buffer) -> None:
        with self._translating():
            self._require_plain(key)
            self._api.put(self._store, key, content, use_multipart=False)

    def put_new(self, key: str, content: Buffer) -> bool:
        with self._translating():
            self._require_plain(key)
            try:
                self._api.put(self._store, key, content, mode="create", use_multipart=False)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                return False
            return True

    def replace(self, key: str, content: Buffer, tag: str) -> bool:
        with self._translating():
            self._require_plain(key)
            try:
                self._api.put(self._store, key, content, mode={"e_tag": tag}, use_multipart=False)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                return False
            except (NotImplementedError, self._errors.NotSupportedError):  # a folder has no conditional writes
                held = self.get(key, 0)
                if held is None or held.tag != tag:
                    return False
                self.put(key, content)
            return True

    def list(self, prefix: str) -> Iterator[Sequence[Listed]]:
        with self._translating():
            for page in self._api.list(self._store, prefix.rstrip("/"), chunk_size=1000):
                yield [_listed(meta) for meta in page if self._find_obstacle(meta["path"]) is None]

    def delete(self, keys: Sequence[str]) -> None:
        with self._translating():
            for key in keys:
                self._require_plain(key)
            try:
                self._api.delete(self._store, list(keys))
            except self._not_found:
                for key in keys:
                    with contextlib.suppress(*self._not_found):
                        self._api.delete(self._store, key)

    def _require_plain(self, key: str) -> None:
        if obstacle := self._find_obstacle(key):
            raise NotPlain(obstacle)

    def _find_obstacle(self, key: str) -> str | None:
        """What is not a plain file, or not a plain folder above it, on the way to a key in a folder; None if all is."""
        if self._folder is None:
            return None
        path, parts = self._folder, key.split("/")
        for number, part in enumerate(parts, start=1):
            path, wanted = path / part, stat.S_IFREG if number == len(parts) else stat.S_IFDIR
            try:
                kind = stat.S_IFMT(os.lstat(path).st_mode)
            except FileNotFoundError:
                return None
            if kind != wanted:
                return f"{path} is {_KINDS.get(kind, 'a device or a socket')}, and must be {_KINDS[wanted]}"
        return None

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        """Turn whatever fails into StoreError."""
        try:
            yield
        except (self._errors.BaseError, OSError, ValueError, NotImplementedError) as error:
            raise StoreError(_first_line(error)) from error


def _find_folder(url: str) -> Path | None:
    """The folder that a URL or a path names; None for a URL of another kind. Raises ValueError for neither."""
    if not url.startswith("file://") and "://" in url:
        return None
    if "://" not in url and re.match("[A-Za-z][A-Za-z0-9+]+:", url):
        raise ValueError("a URL has :// after its first word, and a folder whose name has a colon ./ before it")
    return Path(url.removeprefix("file://")).expanduser().absolute()


def _open(url: str, folder: Path | None, options: dict[str, Any]) -> AnyStore:
    from obstore.store import LocalStore, from_url

    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # whoever shall read it too is let in by its owner
        return LocalStore(folder)
    if url.startswith("memory:"):
        return from_url(url)
    retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=TIMEOUT_S)}
    client = {"timeout": f"{TIMEOUT_S}s", "connect_timeout": f"{CONNECT_S}s", "allow_http": True}
    return from_url(url, client_options=client, retry_config=retries, **options)  # type: ignore[call-overload, no-any-return]


def _listed(meta: Any) -> Listed:
    return Listed(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _first_line(error: BaseException) -> str:
    """What went wrong, without what obstore adds for its developers."""
    return str(error).strip().partition("\n")[0] or repr(error)
