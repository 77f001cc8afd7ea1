"""One request alone on the engine: load what lies on disk, prefill in chunks, then a token at a time."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from bough.cache.session import Reuse
from bough.engines.contract import Engine
from bough.generate.generation import ChunkSize, Generation
from bough.types import Chunk, Completion


def run_alone(
    engine: Engine, reuse: Reuse, generation: Generation, size: ChunkSize
) -> Generator[Chunk | Completion, None, None]:
    """Yield the answer in pieces, then the completion. Empty pieces come too, so that the caller can stop at any step.

    While the generation `is_loading`, the caller should wait a little after each empty piece. However the iteration ends,
    the session is closed and the work that was done is kept.
    """
    with closing(generation):
        generation.begin(reuse)
        while generation.is_loading and not generation.is_done:
            yield Chunk("")
            generation.advance_loading()
        while not generation.is_done and not generation.is_prefilled:
            yield generation.prefill_chunk(size) or Chunk("")
        while not generation.is_done:
            chunk = _next_token(engine, generation)
            if chunk is not None:
                yield chunk
        completion = generation.completion()
    yield completion


def _next_token(engine: Engine, generation: Generation) -> Chunk | None:
    started_s = generation.clock()
    if generation.next_id is not None:
        _feed(engine, generation, generation.next_id)
    (sampled,) = engine.sample([generation.logits], [generation.draw()])
    chunk = generation.accept(sampled)
    generation.note_step(generation.clock() - started_s)
    return chunk


def _feed(engine: Engine, generation: Generation, token_id: int) -> None:
    generation.cross_reuse_limit()
    ids = [token_id]
    with generation.session.feeding(ids):
        (generation.logits,) = engine.step([generation.lane], ids)
