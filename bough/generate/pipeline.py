"""One request alone on the engine: prefill in chunks, then a token at a time."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from bough.cache.session import Reuse
from bough.engine import Engine
from bough.generate.chunk_size import ChunkSize
from bough.generate.generation import Generation
from bough.types import Chunk, Completion


def run_alone(
    engine: Engine, reuse: Reuse, generation: Generation, size: ChunkSize
) -> Generator[Chunk | Completion, None, None]:
    """Yield the answer in pieces, then whole. Empty pieces are yielded too: between any two the caller may stop.

    However the iteration ends, the session is closed and the work that was done is kept.
    """
    with closing(generation):
        generation.begin(reuse)
        while not generation.is_done and not generation.is_prefilled:
            generation.prefill_chunk(size)
            yield Chunk("")
        while not generation.is_done:
            (sampled,) = engine.sample([generation.logits], [generation.draw()])
            chunk = generation.accept(sampled)
            if chunk is not None:
                yield chunk
            if not generation.is_done:
                _step(engine, generation)
        completion = generation.completion()
    yield completion


def _step(engine: Engine, generation: Generation) -> None:
    assert generation.next_id is not None
    generation.cross_reuse_limit()
    ids = [generation.next_id]
    with generation.feeding(ids):
        (generation.logits,) = engine.step([generation.lane], ids)
