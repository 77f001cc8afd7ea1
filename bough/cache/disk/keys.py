"""Keyed hashes of salts, prefixes and files.

The key is the secret of the tree or store, so that a reader of its names and index can neither test a guessed salt nor
compare it with another tree.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b
from itertools import accumulate

from bough.cache.tree.address import Address
from bough.cache.tree.state import Buffer
from bough.tokens import TOKEN_BYTES

HASH_BYTES = 16
SECRET_BYTES = 32

_NUMBERS = struct.Struct("<iqqHHI")  # group, start, end; lengths of root, before and tokens


class PageKeys:
    """Hashes under one secret, for one fingerprint and page size."""

    def __init__(self, secret: bytes, fingerprint: str, page_tokens: int) -> None:
        self.fingerprint, self.page_tokens = fingerprint, page_tokens
        self._secret = secret
        encoded = fingerprint.encode()
        self._named = blake2b(key=secret, digest_size=HASH_BYTES, person=b"bough name")
        self._named.update(len(encoded).to_bytes(4, "little") + encoded)

    def root(self, salt: str) -> bytes:
        return self._hash(b"bough root", salt.encode())

    def first(self, root: bytes) -> bytes:
        """The digest of no tokens at all below a root."""
        return self._hash(b"bough first", root)

    def after(self, before: bytes, page: bytes) -> bytes:
        """The digest of the tokens behind `before` and one whole page more."""
        return self._hash(b"bough chain", before + page)

    def digests(self, root: bytes, tokens: bytes) -> list[bytes]:
        """Element k stands for all tokens before page k; there is one more than there are whole pages."""
        step = self.page_tokens * TOKEN_BYTES
        pages = (tokens[at : at + step] for at in range(0, len(tokens) - step + 1, step))
        return list(accumulate(pages, self.after, initial=self.first(root)))

    def name(self, address: Address) -> bytes:
        """The name of a file or a point: a hash of the fingerprint and every field of the address."""
        hasher = self._named.copy()
        root, before, tokens = address.root, address.before, address.tokens
        hasher.update(_NUMBERS.pack(address.group, address.start, address.end, len(root), len(before), len(tokens)))
        hasher.update(root + before + tokens)
        return hasher.digest()

    def seal(self, parts: Iterable[Buffer]) -> bytes:
        """A hash of some content that cannot be made without the secret."""
        hasher = blake2b(key=self._secret, digest_size=HASH_BYTES, person=b"bough seal")
        for part in parts:
            hasher.update(part)
        return hasher.digest()

    def proof(self) -> str:
        """Identifies the secret in the index, without revealing it."""
        return self._hash(b"bough proof", b"").hex()

    def _hash(self, purpose: bytes, content: bytes) -> bytes:
        return blake2b(content, key=self._secret, digest_size=HASH_BYTES, person=purpose).digest()
