"""One request alone on the engine, on the calling thread: without scheduler, and with any strategy of reuse.

The benchmarks compare strategies with it, and tests take it as the reference for requests that run together. It uses engine
and tree itself, so the runtime's worker must not run meanwhile.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from bough.engines.contract import Engine
from bough.generate.generation import ChunkSize, Generation
from bough.generate.reuse import Reuse
from bough.prompting.prompt import prepare_request
from bough.prompting.user_prompt import read_prompt
from bough.runtime import Runtime
from bough.types import Chunk, Completion, Prompt, SamplingParams

_READ_WAIT_S = 0.01


class SingleRequests:
    """Answers prompts one after the other, by the runtime's own tree or by another strategy of reuse."""

    def __init__(self, runtime: Runtime, reuse: Reuse | None = None) -> None:
        self._runtime = runtime
        self._reuse = reuse or runtime.prefix_cache

    def generate(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> Completion:
        """The whole answer. Options are those of `SamplingParams`."""
        *_, completion = self.stream(prompt, raw=raw, **sampling)
        assert isinstance(completion, Completion)
        return completion

    def stream(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> Iterator[Chunk | Completion]:
        """Yield the pieces of the answer that are not empty, then the completion."""
        runtime = self._runtime
        ask = replace(read_prompt(prompt, raw=raw), params=SamplingParams(**sampling))
        generation = runtime.prepare(prepare_request(ask, runtime.facts))
        for piece in run_alone(runtime.engine, self._reuse, generation, runtime.chunk_size):
            if not isinstance(piece, Chunk) or piece.text or piece.token_ids:
                yield piece
            elif generation.is_loading:
                generation.wait_for_reads(_READ_WAIT_S)


def warm_up(runtime: Runtime) -> None:
    """Answer a short prompt: the first forward pass of a process is slow."""
    SingleRequests(runtime).generate(list(range(3, 35)), max_tokens=2)


def run_alone(
    engine: Engine, reuse: Reuse, generation: Generation, size: ChunkSize
) -> Generator[Chunk | Completion, None, None]:
    """Load what is on disk, prefill in chunks, then decode a token at a time: yield the pieces, then the completion.

    Empty pieces come too, so that the caller can stop at any step. While the generation `is_loading`, the caller should
    wait a little after each of them. However the iteration ends, the session is closed and the work that was done is kept.
    """
    with closing(generation):
        generation.begin(reuse)
        while generation.is_loading:
            yield Chunk("")
            generation.advance_loading()
        while not generation.is_done and not generation.is_prefilled:
            yield generation.prefill_chunk(size) or Chunk("")
        while not generation.is_done:
            if (chunk := _decode_token(engine, generation)) is not None:
                yield chunk
        completion = generation.completion()
    yield completion


def _decode_token(engine: Engine, generation: Generation) -> Chunk | None:
    started_s = generation.clock()
    if generation.next_id is not None:
        generation.cross_reuse_limit()
        ids = [generation.next_id]
        with generation.session.feeding(ids):
            (generation.logits,) = engine.step([generation.lane], ids)
    (sampled,) = engine.sample([generation.logits], [generation.draw()])
    chunk = generation.accept(sampled)
    generation.note_step(generation.clock() - started_s)
    return chunk
