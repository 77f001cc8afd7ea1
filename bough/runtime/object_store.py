"""Object stores by their URL, through obstore: S3 and compatible ones, Google's, Azure's, a folder, or memory.

Every call ends within a bounded time and is retried at most once, because a slow store is of no use to a request that could
compute. obstore finds the credentials, above all in the environment.

In a folder only plain files in plain folders are objects. obstore follows links, even out of the folder, and opens pipes,
which waits for ever: so each key is checked first. Whoever can write the folder could still add a link in between.
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

from bough.cache.store import ListedObject, NotPlain, StoredObject, StoreError
from bough.cache.tree.state import Buffer
from bough.errors import SettingsError
from bough.system.distribution import install_command

if TYPE_CHECKING:
    from obstore.store import ObjectStore as AnyStore

TIMEOUT_S = 10
CONNECT_S = 3

_KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a named pipe"}


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
        self._conflicts = (exceptions.AlreadyExistsError, exceptions.PreconditionError)
        try:
            self._folder = _find_folder(url)
            self._store = _open(url, self._folder, options)
        except Exception as error:  # whatever it raises for a URL that it does not know
            raise SettingsError(f"store is {url!r}, which cannot be opened: {_first_line(error)}") from error

    def get(self, key: str, max_bytes: int) -> StoredObject | None:
        with self._translating(key):
            try:
                found = self._api.get(self._store, key)
                meta = found.meta
                content: Buffer = memoryview(found.bytes()) if meta["size"] <= max_bytes else b""
            except self._not_found:
                return None
            tag = meta["e_tag"] or meta["version"] or ""
            return StoredObject(content, meta["size"], meta["last_modified"].timestamp(), tag)

    def head(self, key: str) -> ListedObject | None:
        with self._translating(key):
            try:
                return _listed(self._api.head(self._store, key))
            except self._not_found:
                return None

    def put(self, key: str, content: Buffer) -> None:
        with self._translating(key):
            self._api.put(self._store, key, content, use_multipart=False)

    def put_new(self, key: str, content: Buffer) -> bool:
        with self._translating(key):
            try:
                self._api.put(self._store, key, content, mode="create", use_multipart=False)
            except self._conflicts:
                return False
            return True

    def replace(self, key: str, content: Buffer, tag: str) -> bool:
        with self._translating(key):
            try:
                self._api.put(self._store, key, content, mode={"e_tag": tag}, use_multipart=False)
            except self._conflicts:
                return False
            except (NotImplementedError, self._errors.NotSupportedError):  # a folder has no conditional writes
                held = self.get(key, 0)
                if held is None or held.tag != tag:
                    return False
                self.put(key, content)
            return True

    def list(self, prefix: str) -> Iterator[Sequence[ListedObject]]:
        with self._translating():
            for page in self._api.list(self._store, prefix.rstrip("/"), chunk_size=1000):
                yield [_listed(meta) for meta in page if self._find_obstacle(meta["path"]) is None]

    def delete(self, keys: Sequence[str]) -> None:
        with self._translating(*keys):
            try:
                self._api.delete(self._store, list(keys))
            except self._not_found:
                for key in keys:
                    with contextlib.suppress(*self._not_found):
                        self._api.delete(self._store, key)

    def _find_obstacle(self, key: str) -> str | None:
        """The first part of the path of a key that is not a plain file or folder, in words; None if there is none."""
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
    def _translating(self, *keys: str) -> Iterator[None]:
        """Translate every error to StoreError. Raises NotPlain for a key that is no plain file in plain folders."""
        try:
            for obstacle in filter(None, map(self._find_obstacle, keys)):
                raise NotPlain(obstacle)
            yield
        except (self._errors.BaseError, OSError, ValueError, NotImplementedError) as error:
            raise StoreError(_first_line(error)) from error


def _find_folder(url: str) -> Path | None:
    """The folder of a URL or path; None for a URL of another kind. Raises ValueError for neither."""
    if not url.startswith("file://") and "://" in url:
        return None
    if "://" not in url and re.match("[A-Za-z][A-Za-z0-9+]+:", url):
        raise ValueError("a URL has :// after its first word, and a folder whose name has a colon ./ before it")
    return Path(url.removeprefix("file://")).expanduser().absolute()


def _open(url: str, folder: Path | None, options: dict[str, Any]) -> AnyStore:
    from obstore.store import LocalStore, from_url

    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # its owner grants others access
        return LocalStore(folder)
    if url.startswith("memory:"):
        return from_url(url)
    retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=TIMEOUT_S)}
    client = {"timeout": f"{TIMEOUT_S}s", "connect_timeout": f"{CONNECT_S}s", "allow_http": True}
    return from_url(url, client_options=client, retry_config=retries, **options)  # type: ignore[call-overload, no-any-return]


def _listed(meta: Any) -> ListedObject:
    return ListedObject(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or repr(error)
