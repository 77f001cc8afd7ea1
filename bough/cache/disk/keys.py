"""The keyed hashes of a store: what stands for a salt, for a prefix, and for a file.

All are keyed with the store's own secret, so that a reader of the names and the index of one store can neither test a
guessed salt nor compare it with another store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b

from bough.cache.tree.address import Address
from bough.cache.tree.state import Buffer
from bough.cache.tree.tokens import TOKEN_BYTES

HASH_BYTES = 16
SECRET_BYTES = 32

_NUMBERS = struct.Struct("<iqqHHI")  # group, start, end; lengths of root, before and tokens


class Keys:
    """Hashes under one secret, for one fingerprint and page size."""

    def __init__(self, secret: bytes, fingerprint: str, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._secret = secret
        encoded = fingerprint.encode()
        self._named = blake2b(key=secret, digest_size=HASH_BYTES, person=b"bough name")
        self._named.update(len(encoded).to_bytes(4, "little") + encoded)

    def root(self, salt: str) -> bytes:
        """What stands for a salt."""
        return self._hash(b"bough root", salt.encode())

    def first(self, root: bytes) -> bytes:
        """The digest of no tokens at all below a root."""
        return self._hash(b"bough first", root)

    def after(self, before: bytes, page: bytes) -> bytes:
        """The digest of what `before` stands for and one whole page of tokens more."""
        return self._hash(b"bough chain", before + page)

    def digests(self, root: bytes, tokens: bytes) -> list[bytes]:
        """Element k stands for the root and all tokens before page k; there is one more than there are whole pages."""
        step = self.page_tokens * TOKEN_BYTES
        chain = [self.first(root)]
        for at in range(0, len(tokens) - step + 1, step):
            chain.append(self.after(chain[-1], tokens[at : at + step]))
        return chain

    def name(self, address: Address) -> bytes:
        """What a file or a point is found by: stands for the fingerprint and every field of the address."""
        hasher = self._named.copy()
        root, before, tokens = address.root, address.before, address.tokens
        hasher.update(_NUMBERS.pack(address.group, address.start, address.end, len(root), len(before), len(tokens)))
        hasher.update(root + before + tokens)
        return hasher.digest()

    def seal(self, parts: Iterable[Buffer]) -> bytes:
        """Stands for the whole of some content: only who has the secret can make it."""
        hasher = blake2b(key=self._secret, digest_size=HASH_BYTES, person=b"bough seal")
        for part in parts:
            hasher.update(part)
        return hasher.digest()

    def proof(self) -> str:
        """Tells in the index which secret its names were made with, without telling the secret."""
        return self._hash(b"bough proof", b"").hex()

    def _hash(self, purpose: bytes, content: bytes) -> bytes:
        return blake2b(content, key=self._secret, digest_size=HASH_BYTES, person=purpose).digest()
