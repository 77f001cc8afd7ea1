"""The tokenizer: text and messages to token ids, and ids back to text and bytes.

A model without tokenizer files has a `Tokenizer` too. It knows the ids that end an answer, refuses text and returns none.
Any thread may call it: nothing changes after loading, except that the bytes of tokens are cached.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from bough.errors import RequestError, UnsupportedModel
from bough.models.chat.control_tokens import ControlTokens
from bough.models.chat.renderer import shared_renderer
from bough.models.chat.template import Template
from bough.models.encoder import UNLIMITED, Encoder, PromptLimit
from bough.models.files import CONFIG_FILE, GENERATION_FILE, ModelFiles, read_json
from bough.models.infill import Infill, find_infill

_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): bytes([byte]) for byte in _PRINTABLE} | {chr(256 + i): bytes([byte]) for i, byte in enumerate(_HIDDEN)}
"""The byte of each character of a byte-level vocabulary."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A transformers tokenizer, `hf`, as Bough uses it. `hf` is None if the model has none."""

    def __init__(self, hf: Any, eos_ids: Iterable[int] = ()) -> None:
        if hf is not None and getattr(hf, "backend_tokenizer", None) is None:
            raise UnsupportedModel(f"{type(hf).__name__} is not a fast tokenizer; a tokenizer.json is needed")
        self.hf = hf
        own = [hf.eos_token_id] if hf is not None and hf.eos_token_id is not None else []
        self.eos_ids: frozenset[int] = frozenset([*eos_ids, *own])
        self._known_bytes: dict[int, bytes] = {}  # at most the vocabulary
        if hf is not None:
            hf.backend_tokenizer.no_truncation()
            hf.backend_tokenizer.no_padding()

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer; without one, prompts and answers are ids."""
        return self.hf is not None

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which are not part of the text of an answer."""
        added = self._added_ids if self.hf is not None else {}
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def strips_leading_space(self) -> bool:
        """Whether decoded text begins with a space that must be dropped, as in sentencepiece vocabularies."""
        return self.hf is not None and '"Strip"' in self._decoder

    @cached_property
    def template(self) -> Template:
        """The chat template. Raises RequestError if there is no tokenizer."""
        return Template(self.hf, self.encoder)

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder of text. Raises RequestError if there is no tokenizer."""
        if self.hf is None:
            raise RequestError("the model has no tokenizer: send token ids instead of text")
        return Encoder(self._backend)

    @cached_property
    def infill(self) -> Infill | None:
        """How to ask for the text between two others; None if the vocabulary has no tokens for it."""
        return find_infill(self._backend, self.encoder) if self.hf is not None else None

    def with_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another chat template, in Jinja. Raises RequestError if there is no tokenizer."""
        other = copy(self)
        other.template = Template(self.hf, self.encoder, source)
        return other

    def encode(
        self, text: str, limit: PromptLimit = UNLIMITED, *, has_start: bool = True, has_special: bool = True
    ) -> list[int]:
        """The ids of a raw prompt, without its start token, or with special tokens as plain text, if wanted."""
        if has_special:
            return self.encoder.encode_whole(text, limit) if has_start else self.encoder.encode(text, limit).ids
        start = self.encoder.start_ids if has_start else []
        return [*start, *ControlTokens(self._backend, "", self.encoder).encode_typed(text, limit)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids, with a replacement character for each invalid one; empty without a tokenizer."""
        if self.hf is None:
            return ""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, which may be part of a character; none for an unknown id."""
        known = self._known_bytes.get(token_id) or self._find_bytes(token_id)
        if known:  # an unknown id is not cached: clients may send any
            self._known_bytes[token_id] = known
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if self.hf is not None else None
        if token is None:
            return b""
        if token_id in self._added_ids:
            return str(self._added_ids[token_id].content).encode()
        if "ByteLevel" in self._decoder:
            return b"".join(_BYTES.get(char, char.encode()) for char in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte and "ByteFallback" in self._decoder:
            return bytes([int(byte[1], 16)])
        if "▁" in self._decoder:
            return str(token).replace("▁", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    @property
    def _backend(self) -> Any:
        return self.hf.backend_tokenizer

    @cached_property
    def _added_ids(self) -> dict[int, Any]:
        return dict(self._backend.get_added_tokens_decoder())

    @cached_property
    def _decoder(self) -> str:
        """The decoder as JSON, which shows how bytes are written in the vocabulary."""
        if self._backend.decoder is None:
            return ""
        return json.dumps(json.loads(self._backend.decoder.__getstate__()), ensure_ascii=False)


def load_tokenizer(files: ModelFiles, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model, with every id that ends an answer. Raises UnsupportedModel if it cannot be read."""
    eos_ids = _read_eos_ids(files)
    if not files.has_tokenizer:
        return Tokenizer(None, eos_ids)
    shared_renderer().start()  # while the files are read
    from transformers import AutoTokenizer

    try:
        hf: Any = AutoTokenizer.from_pretrained(files.folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # the library raises anything for malformed files
        raise UnsupportedModel(f"cannot load the tokenizer in {files.folder}: {type(error).__name__}: {error}") from error
    return Tokenizer(hf, eos_ids)


def load_decoder(files: ModelFiles, trust_remote_code: bool = False) -> Callable[[Sequence[int]], str]:
    """A function from ids to text, special tokens included, as the model's tokenizer decodes. Raises UnsupportedModel.

    If `tokenizer.json` has all tokens, it is read without transformers, whose import takes seconds.
    """
    file = files.folder / "tokenizer.json"
    if not file.is_file() or not _has_all_tokens(files.folder):
        tokenizer = load_tokenizer(files, trust_remote_code)
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises nothing more exact
        raise UnsupportedModel(f"cannot load the tokenizer in {files.folder}: {error}") from error
    return lambda ids: str(backend.decode(list(ids), skip_special_tokens=False))


def _has_all_tokens(folder: Path) -> bool:
    """Whether `tokenizer.json` has the tokens that the configuration of the tokenizer adds."""
    if not (folder / "tokenizer_config.json").is_file():
        return True
    added = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    known = read_json(folder / "tokenizer.json").get("added_tokens") or []
    have = {(str(token.get("id")), token.get("content")) for token in known}
    return {(index, token.get("content")) for index, token in added.items()} <= have


def _read_eos_ids(files: ModelFiles) -> frozenset[int]:
    """The ids that end an answer by `generation_config.json` and `config.json`."""
    found: set[int] = set()
    for name in (GENERATION_FILE, CONFIG_FILE):
        if (files.folder / name).is_file():
            config = read_json(files.folder / name)
            for each in (config, config.get("text_config") or {}):
                eos = each.get("eos_token_id")
                found |= set(eos) if isinstance(eos, list) else {eos} if isinstance(eos, int) else set()
    return frozenset(found)
