"""The same small world on the torch engine: every forward pass is compared with one that has no cache."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bough.cache.session import Session
from bough.cache.state import Kind, Lane
from bough.config import Settings
from bough.torch_engine import TorchEngine
from tests.scenarios.world import World
from tests.tiny_models import make_model

TOLERANCE = 1e-4
ARCHITECTURES = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
    "gpt_oss": {"sliding_window": 4},
    "qwen3_next": {},
    "lfm2": {},
    "falcon_h1": {},
    "mamba2": {},
    "granitemoehybrid": {},
}


class WatchedEngine:
    """A torch engine that counts what it evaluates and can be made to fail in the middle of a forward pass."""

    def __init__(self, engine: TorchEngine, model: Any) -> None:
        self._engine = engine
        self._layers = _layers(model)
        self.evaluated: list[int] = []
        self.fail_next: str | None = None
        self.fail_after_groups = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def groups(self) -> Any:
        return self._engine.groups

    def evaluate(self, lane: Lane, ids: Sequence[int]) -> Any:
        if self.fail_next == "evaluate":
            self.fail_next = None
            return self._fail(lane, ids)
        logits = self._engine.evaluate(lane, ids)
        self.evaluated.append(len(ids))
        return logits

    def step(self, lanes: Sequence[Lane], ids: Sequence[int]) -> list[Any]:
        return [self.evaluate(lane, [token]) for lane, token in zip(lanes, ids, strict=True)]

    def _fail(self, lane: Lane, ids: Sequence[int]) -> Any:
        """Run into an error after some layers have taken the tokens in."""

        def stop(*_: object) -> None:
            raise RuntimeError("made to fail in mid-forward")

        layer = self._layers[min(self.fail_after_groups, len(self._layers) - 1)]
        hook = layer.register_forward_hook(stop)
        try:
            return self._engine.evaluate(lane, ids)
        finally:
            hook.remove()


def _layers(model: Any) -> list[Any]:
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len))


@functools.cache
def _made(name: str) -> tuple[TorchEngine, Any, Any]:
    """An engine, its model, and a second model like it that answers without any cache."""
    torch.set_num_threads(1)
    model = make_model(name, **ARCHITECTURES[name])
    with tempfile.TemporaryDirectory() as folder:  # no verdict of an earlier run
        engine = TorchEngine(model, Settings(cache_folder=Path(folder), chunk=8))
    return engine, model, make_model(name, **ARCHITECTURES[name])


class TorchWorld(World):
    """A world whose requests run on a tiny random model. After every forward pass its logits are compared."""

    num_visits, num_turns = 12, 15

    def __init__(self, name: str, page_tokens: int = 2, **settings: Any) -> None:
        engine, model, self._reference = _made(name)
        assert engine.capabilities.can_reuse, engine.capabilities.reason
        self._held_before = engine.held_bytes
        self.is_torch_window = any(group.kind is Kind.WINDOW for group in engine.groups)
        super().__init__(page_tokens=page_tokens, engine=WatchedEngine(engine, model), **settings)

    def check(self) -> None:
        self.cache.check()
        assert self.engine.held_bytes - self._held_before == self.cache.memory.tree_bytes
        for session in self.sessions:
            if session.is_whole and not session.is_closed:
                assert session.lane.offset == session.offset

    def after_forward(self, session: Session, logits: Any) -> None:
        ids = torch.tensor([session.tokens.tolist()])
        with torch.inference_mode():
            expected = self._reference(input_ids=ids, use_cache=False).logits[0, -1]
        difference = float((logits - expected).abs().max())
        assert difference <= TOLERANCE, f"{difference:.1e} off after {session.offset} tokens"
