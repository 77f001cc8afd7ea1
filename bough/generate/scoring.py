"""Log-probabilities of a prompt's own tokens, for requests that ask for them.

They need the logits of every position, so nothing is reused, and chunks are short.
"""

from __future__ import annotations

from collections.abc import Callable

from bough.cache.tree.state import Lane
from bough.engines.contract import Engine, Logits
from bough.errors import RequestError
from bough.generate.request import Request
from bough.types import SampledToken, TokenLogprob

MAX_LOGITS = 2**26  # the most logits of one chunk: 256 MB in float32


class PromptScorer:
    """Evaluates the chunks of one prompt and collects the log-probabilities of its tokens from the second on.

    They need the logits of every position, so a chunk is so short that it has at most `MAX_LOGITS` of them.
    """

    def __init__(self, engine: Engine, request: Request, describe: Callable[[SampledToken], TokenLogprob]) -> None:
        """Raises RequestError if the engine can only evaluate the prompt at once, and it is too long for that."""
        self.logprobs: list[TokenLogprob] = []
        self.max_chunk = max(1, MAX_LOGITS // engine.vocab_size)
        self._engine = engine
        self._tokens = request.tokens
        self._num_top = request.params.logprobs or 0
        self._describe = describe
        can, num_tokens = engine.capabilities, len(request.tokens)
        is_chunked = can.can_chunk and (can.reuse_limit is None or num_tokens <= can.reuse_limit)
        if not is_chunked and num_tokens > self.max_chunk:
            found = f"the prompt has {num_tokens:,} tokens, which this model evaluates all at once"
            raise RequestError(f"{found}, and may have {self.max_chunk:,} for their log-probabilities")

    def evaluate(self, lane: Lane, ids: list[int]) -> Logits:
        """Evaluate the ids of the next chunk on the lane, and score the token that follows each of them."""
        following = self._tokens[lane.offset + 1 : lane.offset + len(ids) + 1].ids
        run = self._engine.evaluate_scored(lane, ids, following, self._num_top)
        self.logprobs += map(self._describe, run.scores)
        return run.logits
