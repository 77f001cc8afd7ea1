"""Names in the store: the keys of our objects, and the addresses of everything on one token prefix.

All our objects lie below `bough-state/`, and each key has exactly the form of its kind. A bucket or a folder may hold
other things: what lies elsewhere is never listed, and what has another form is neither counted nor deleted.
"""

from __future__ import annotations

import re

from bough.cache.disk.keys import HASH_BYTES, Keys
from bough.cache.store.format import POINTS, ROWS
from bough.cache.tree.address import POINT, Address
from bough.cache.tree.tokens import cut, num_tokens

PREFIX = "bough-state/"
LEASE = f"{PREFIX}lease"
DELETED = f"{PREFIX}deleted/"
ALL = "all"

_FINGERPRINT, _HASH, _OWNER = "([0-9a-f]{64})", f"([0-9a-f]{{{2 * HASH_BYTES}}})", "([0-9a-f]{16})"

PAGE_KEY = re.compile(f"{PREFIX}{_FINGERPRINT}/{_HASH}/{_HASH}")
"""Pages, lists and restore points: fingerprint, root, name."""

DELETION_KEY = re.compile(f"{DELETED}{_FINGERPRINT}/(?:{_HASH}|{ALL})/{_OWNER}")
"""Lists of what was cleared: fingerprint, root (none for all of the model), machine."""


class StorePath:
    """The whole pages of a prefix below one salt's root. It grows at its end; each page is hashed once."""

    def __init__(self, keys: Keys, salt: str) -> None:
        self.root = keys.root(salt)
        self.page_tokens = keys.page_tokens
        self._keys = keys
        self._digests = [keys.first(self.root)]  # element k stands for all tokens before page k
        self._pages: list[bytes] = []
        self._rest = b""

    def add(self, tokens: bytes) -> None:
        """Go on with these tokens. Costs as much as they are."""
        tokens, size = self._rest + tokens, self.page_tokens
        whole = num_tokens(tokens) // size * size
        for start in range(0, whole, size):
            page = cut(tokens, start, start + size)
            self._digests.append(self._keys.after(self._digests[-1], page))
            self._pages.append(page)
        self._rest = cut(tokens, whole)

    @property
    def num_pages(self) -> int:
        """How many whole pages there are."""
        return len(self._pages)

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_tokens + num_tokens(self._rest)

    def rows(self, page: int) -> Address:
        """The rows of a whole page."""
        return self._address(page, ROWS)

    def points(self, page: int) -> Address:
        """The list of a whole page's restore points."""
        return self._address(page, POINTS)

    def _address(self, page: int, group: int) -> Address:
        start = page * self.page_tokens
        return Address(self.root, self._digests[page], self._pages[page], group, start, start + self.page_tokens)

    def point(self, offset: int) -> Address:
        """What a restore point inside a whole page, or at its end, needs."""
        page = (offset - 1) // self.page_tokens
        tokens = cut(self._pages[page], 0, offset - page * self.page_tokens)
        return Address(self.root, self._digests[page], tokens, POINT, offset, offset)
