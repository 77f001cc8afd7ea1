"""API keys, and the salts that keep the trees of different keys apart.

The salt of a key is a keyed hash (HMAC) of it: the key cannot be found from the salt, nor the salt without the key.
"""

from __future__ import annotations

import codecs
import hashlib
import hmac
import logging
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bough.errors import SettingsError

log = logging.getLogger(__name__)

_SECRET_BYTES = 32


@dataclass(frozen=True)
class Key:
    """One key. Its text never appears in a log or an error; its name is for people."""

    text: bytes = field(repr=False)
    name: str
    digest: bytes = field(repr=False)


class ApiKeys:
    """The keys in a file, one per line, with or without a space and a name behind it. `#` begins a comment.

    The file is read again when it has changed. While it cannot be read, no key is valid, and the log says so once.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: tuple[int, ...] = ()
        self._keys = tuple[Key, ...]()
        self._problem = ""
        try:
            self._refresh()
        except OSError as error:
            raise SettingsError(f"cannot read the keys in {file}: {error.strerror or error}") from error
        names: dict[bytes, str] = {}
        for key in self._keys:  # two clients with one key would share a tree without knowing it
            if key.text in names:
                raise SettingsError(f"{names[key.text]!r} and {key.name!r} are the same key in {file}: delete one of them")
            names[key.text] = key.name

    def find(self, given: bytes) -> Key | None:
        """The key with this text, or None. A wrong key takes as long as a right one."""
        problem = ""
        try:
            self._refresh()
        except (OSError, SettingsError) as error:
            self._keys, self._seen, problem = (), (), str(error)
            if problem != self._problem:
                log.error("no key is valid: cannot read the keys in %s: %s", self._file, problem)
        self._problem = problem
        digest = hashlib.sha256(given).digest()
        found = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        return found[-1] if found else None

    def _refresh(self) -> None:
        """Read the file if it has changed. Raises OSError, or SettingsError if it is no file of keys."""
        status = self._file.stat()
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen == self._seen:
            return
        self._keys = _read_keys(self._file, self._file.read_bytes())
        self._seen = seen
        if stat.S_IMODE(status.st_mode) & 0o077:
            log.warning("others can read the keys in %s: chmod 600 %s", self._file, self._file)


def _read_keys(file: Path, content: bytes) -> tuple[Key, ...]:
    """The keys of a file's content. Raises SettingsError if it is not text or has no key."""
    content = content.removeprefix(codecs.BOM_UTF8)
    text = content.decode("utf-8", "surrogateescape")  # bytes that are no UTF-8 become characters that are not printable
    if not all(each.isprintable() or each in "\t\r\n\f\v" for each in text):
        raise SettingsError(f"{file} is not a text file: write one key on each line")
    keys: list[Key] = []
    for line in content.splitlines():
        words = line.split(maxsplit=1)
        if words and not words[0].startswith(b"#"):
            name = words[1].decode("utf-8").lstrip("# ").rstrip() if len(words) > 1 else f"key {len(keys) + 1}"
            keys.append(Key(words[0], name, hashlib.sha256(words[0]).digest()))
    if not keys:
        raise SettingsError(f"there is no key in {file}: write one on a line of its own")
    return tuple(keys)


def read_secret(file: Path) -> bytes:
    """The secret of this server, made at the first start; servers that start at once share one. Raises SettingsError."""
    try:
        if not file.exists():
            _make_secret(file)
        found = file.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot have a secret in {file}: {error.strerror or error}") from error
    if len(found) != _SECRET_BYTES:
        raise SettingsError(f"{file} has {len(found)} bytes, and must have {_SECRET_BYTES}: delete it to get a new one")
    return found


def _make_secret(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".server_secret.")  # readable by its owner alone
    try:
        with suppress(FileExistsError), os.fdopen(descriptor, "wb") as output:
            output.write(secrets.token_bytes(_SECRET_BYTES))
            output.flush()
            os.fsync(descriptor)
            os.link(name, file)  # atomic, and never replaces the file of another server
    finally:
        Path(name).unlink()


def derive_salt(secret: bytes, key: Key, refinement: str) -> str:
    """The salt of a key. With a refinement it is KEY_SALT/HASH, which only this key reaches; `tenant_of` reads KEY_SALT."""
    own = _sign(secret, key.text)
    return f"{own}/{_sign(secret, key.text + bytes(1) + refinement.encode())}" if refinement else own


def _sign(secret: bytes, message: bytes) -> str:
    return hmac.digest(secret, message, "sha256").hex()
