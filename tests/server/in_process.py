"""Servers in this process, over an engine that computes nothing: for tests of what goes over the wire.

The model is a folder with a tokenizer, a chat template and one weight that nothing reads. The state of the engine is the
tokens themselves, so mistakes of the cache show. An answer is made of words that depend on the whole prompt, and goes on
until the request ends it. HTTP, the service, the scheduler and the tree are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bough.cache.tree.state import Group, Kind
from bough.config import Settings
from bough.engines.contract import EngineInfo
from bough.models import ModelFiles, Tokenizer, load_tokenizer
from bough.runtime import Runtime
from bough.runtime.tiers import open_tiers
from bough.scheduling.worker import Limits
from bough.server.app import make_app, make_service
from bough.server.http.listening import HttpServer, bind, url_of
from bough.server.serving.loaded import Start
from bough.system.announcement import announcing, make_announcement
from tests.fakes import FakeEngine
from tests.models.tiny_tokenizer import CHATML, LINES, byte_level
from tests.server.servers import DISK_BYTES, STOP_S, Address
from tests.waiting import BOUND_S

NUM_CONNECTIONS = 1000
FAR_BEHIND = 30.0  # less than a bias of 100, and enough that what is so far behind is not drawn
GROUP = Group(0, Kind.FULL, bytes_per_token=256)
JSON = '{"name": "weather", "arguments": {"city": "Paris"}} {"age": 1, "is_red": true, "a": false, "name": ""}'


class WordsEngine(FakeEngine):
    """Prefers words to all other tokens, then long tokens to short ones, and spaces least of all."""

    def __init__(self, tokenizer: Tokenizer, context_tokens: int) -> None:
        super().__init__([GROUP], vocab_size=len(tokenizer.hf), context_tokens=context_tokens)
        self.info = EngineInfo("fake", "tokens", "cpu", "tokens")
        texts = [tokenizer.token_bytes(token_id).decode("ascii", errors="replace") for token_id in range(self.vocab_size)]
        self._behind = [_how_far_behind(text) for text in texts]

    def default_budget_bytes(self) -> int:
        return 1 << 26

    def _logits_after(self, tokens: Sequence[int]) -> tuple[float, ...]:
        return tuple(score - behind for score, behind in zip(super()._logits_after(tokens), self._behind, strict=True))


def _how_far_behind(text: str) -> float:
    if text[:1] == " " and text[1:].isalpha() and len(text) > 2:
        return 0.0
    if text.isspace() or not text.isprintable() or "\ufffd" in text:
        return 2 * FAR_BEHIND
    return FAR_BEHIND + max(0, 10 - 2 * len(text))


def start_words(files: ModelFiles, settings: Settings, make: type[WordsEngine] = WordsEngine) -> Runtime:
    """Load a model as the server does, but for its weights."""
    tokenizer = load_tokenizer(files)
    engine = make(tokenizer, settings.context or files.config["max_position_embeddings"])
    tiers, limits = open_tiers(engine, files, settings), Limits(settings.queue)
    runtime = Runtime(engine, tokenizer, settings, files, tiers, limits)
    _ = runtime.worker  # the first use starts it
    return runtime


def make_words_folder(folder: Path, context_tokens: int = 2048, **sampling: Any) -> Path:
    """The folder of a model for `start_words`. `sampling` is what its makers recommend."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level(CHATML, lines=[*LINES, JSON, "x x x"], vocab_size=500).save_pretrained(folder)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "num_attention_heads": 2,
        "max_position_embeddings": context_tokens,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    if sampling:
        (folder / "generation_config.json").write_text(json.dumps(sampling), encoding="utf-8")
    return folder


@contextmanager
def serving(files: ModelFiles, folder: Path, start: Start = start_words, **settings: Any) -> Iterator[Address]:
    """A server on a thread of this process, with these settings; the model is loaded."""
    chosen = {"data_folder": folder / "data", "cache_folder": folder / "cache", "disk": DISK_BYTES, "model": files.name}
    made = Settings(**(chosen | settings))
    service = make_service(made, files, start=start)
    app = make_app(service.settings, service)
    server = HttpServer(app, service.settings, service, NUM_CONNECTIONS)
    ready: Future[None] = Future()

    async def serve() -> None:
        serving = asyncio.create_task(server.serve([bound]))
        try:
            await service.load(service.settings.model)
            ready.set_result(None)
        except BaseException as error:
            server.should_exit = True
            ready.set_exception(error)
        await serving

    with bind("127.0.0.1", 0) as bound:
        bound.listen()  # a client may come before the loop does
        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="server")
        thread.start()
        try:
            ready.result(BOUND_S)
            app.state.announcement = make_announcement(url_of(bound))
            with announcing(made.cache_folder, app.state.announcement):
                yield Address(url_of(bound), files.name, made.cache_folder)
        finally:
            server.stop()
            thread.join(STOP_S)
    assert not thread.is_alive()
