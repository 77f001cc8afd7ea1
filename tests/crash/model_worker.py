"""A program that is killed: it answers a few conversations with the default model, and says what it has flushed.

    python -m tests.crash.model_worker MODEL CACHE SEED

It writes one JSON value a line: "ready", then, after each flush, the conversation that was flushed.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from typing import Any

SYSTEM = {"role": "system", "content": "You answer in one short sentence. " * 45}
QUESTIONS = ("What is the capital of France?", "Name a river.", "Tell me about the sea.", "What is seven times six?")
SETTINGS: dict[str, Any] = {"disk": 2**30, "disk_free": 0, "device_memory": 48 * 2**20}  # the tree is on disk
NUM_TOKENS = 12


def conversation(number: int) -> list[dict[str, str]]:
    """One of a few, some of which go on from others."""
    first, turns = divmod(number, 2)
    turn = [{"role": "assistant", "content": "Let me think."}, {"role": "user", "content": "Well, say more about it."}]
    return [SYSTEM, {"role": "user", "content": QUESTIONS[first]}, *turn * turns]


NUM_CONVERSATIONS = 2 * len(QUESTIONS)


def main(model: str, cache: str, seed: str) -> None:
    import bough

    chance = random.Random(seed)
    with bough.load(model, cache_folder=cache, **SETTINGS) as runner:
        print(json.dumps("ready"), flush=True)
        for _ in itertools.repeat(None, 1000):
            number = chance.randrange(NUM_CONVERSATIONS)
            runner.generate(conversation(number), max_tokens=NUM_TOKENS)
            if chance.random() < 0.5:
                assert runner.cache.flush()
                print(json.dumps(number), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
