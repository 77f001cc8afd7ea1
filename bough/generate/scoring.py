"""The log-probabilities of a prompt's own tokens, collected as its chunks are evaluated.

They need the logits of every position, so nothing of such a prompt is reused. Of the logits of a chunk only what was asked
for is kept, and a chunk is so short that it has at most `MAX_LOGITS` of them.
"""

from __future__ import annotations

from collections.abc import Callable

from bough.cache.tree.state import Lane
from bough.engines.contract import Engine, Logits
from bough.errors import RequestError
from bough.generate.request import Request
from bough.types import Sampled, TokenLogprob

MAX_LOGITS = 2**26
"""The most logits of one chunk: 256 MB in float32."""


class PromptScorer:
    """Evaluates the chunks of one prompt and scores its tokens from the second on. `logprobs` are those so far."""

    def __init__(self, engine: Engine, request: Request, describe: Callable[[Sampled], TokenLogprob]) -> None:
        """Raises RequestError for a prompt that the engine can only evaluate at once, and that is too long for that."""
        self.logprobs: list[TokenLogprob] = []
        self.max_chunk = max(1, MAX_LOGITS // engine.vocab_size)
        self._engine = engine
        self._ids = request.ids
        self._num_top = request.params.logprobs or 0
        self._describe = describe
        self._require_chunks(len(request.ids))

    def _require_chunks(self, num_tokens: int) -> None:
        can = self._engine.capabilities
        is_chunked = can.can_chunk and (can.reuse_limit is None or num_tokens <= can.reuse_limit)
        if not is_chunked and num_tokens > self.max_chunk:
            found = f"the prompt has {num_tokens:,} tokens, which this model evaluates all at once"
            raise RequestError(f"{found}, and may have {self.max_chunk:,} for their log-probabilities")

    def evaluate(self, lane: Lane, chunk: list[int]) -> Logits:
        """Evaluate the next chunk on the lane, and score the tokens that follow each of its own."""
        following = self._ids[lane.offset + 1 : lane.offset + len(chunk) + 1]
        run = self._engine.evaluate_scored(lane, chunk, following, self._num_top)
        self.logprobs += map(self._describe, run.scores)
        return run.logits
