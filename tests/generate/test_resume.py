"""Answers that go on from tokens that were generated before: cut anywhere, they are what they would have been."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bough.bench.alone import run_alone
from bough.config import Settings
from bough.errors import RequestError
from bough.generate.generation import ChunkSize, Generation
from bough.generate.request import Request
from bough.models import ModelFiles
from bough.models.prompts import EncodedPrompt
from bough.runtime import Runtime, load_runtime
from bough.tokens import Tokens
from bough.types import Chunk, Completion, SamplingParams
from tests.generate.test_generation import PROMPT, Bench, every_model
from tests.server.servers import make_chat_folder
from tests.tiny_models import make_folder


class Emoji:
    """A vocabulary of single bytes of emoji, kana and letters: most characters take several tokens; 63 ends an answer."""

    eos_ids = frozenset({63})
    strips_leading_space = False
    text = "🌳é木ab".encode()

    def token_bytes(self, token_id: int) -> bytes:
        at = token_id % len(self.text)
        return self.text[at : at + 1]


def answer(bench: Bench, vocabulary: Any = None, **request: Any) -> tuple[list[Chunk], Completion]:
    """The chunks of an answer that have something in them, and its completion."""
    asked = Request(Tokens.of(PROMPT), request.pop("params"), **request)
    generation = Generation(bench.engine, asked, vocabulary or Emoji(), None, bench.clock)
    *pieces, completion = run_alone(bench.engine, bench.cache, generation, ChunkSize(3))
    assert isinstance(completion, Completion)
    return [each for each in pieces if isinstance(each, Chunk) and (each.text or each.token_ids)], completion


def text_of(chunks: list[Chunk]) -> str:
    return "".join(each.text for each in chunks)


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [token_id for each in chunks for token_id in each.token_ids]


@every_model
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95),
        SamplingParams(max_tokens=20, temperature=1.0, repeat_penalty=1.3, repeat_last_n=5, presence_penalty=0.5),
        SamplingParams(max_tokens=20, temperature=1.0, stop=("ba", "🌳a", "木")),
    ],
    ids=["greedy", "seeded", "penalties", "stops"],
)
def test_cut_anywhere_an_answer_goes_on_as_it_would_have(model: str, params: SamplingParams) -> None:
    for seed in range(3):
        whole, expected = answer(Bench(model), params=params, seed=seed)
        for cut in range(1 + sum(bool(each.token_ids) for each in whole)):  # the last chunk may have held-back text alone
            before, resumed = whole[:cut], Bench(model)
            after, completion = answer(resumed, params=params, seed=seed, resumed_ids=ids_of(before))

            assert ids_of(before) + ids_of(after) == ids_of(whole)
            assert text_of(before) + text_of(after) == text_of(whole) == completion.text
            assert (completion.token_ids, completion.finish_reason) == (expected.token_ids, expected.finish_reason)
            assert completion.stop == expected.stop
            assert completion.usage.completion_tokens == len(expected.token_ids)
            assert completion.usage.cached_tokens + completion.usage.computed_tokens in (0, len(PROMPT))


def test_what_the_tree_holds_of_an_answer_is_reused_when_it_goes_on() -> None:
    bench = Bench()
    whole, _ = answer(bench, params=SamplingParams(max_tokens=12))
    before = ids_of(whole)[:8]
    bench.engine.evaluated.clear()

    answer(bench, params=SamplingParams(max_tokens=12), resumed_ids=before)

    assert bench.engine.evaluated[0] == 1  # the last token alone: the tree holds all before it


@pytest.mark.parametrize("wrong", [-1, 64, 63])
def test_a_token_that_no_answer_has_is_refused_by_its_number(wrong: int) -> None:
    with pytest.raises(RequestError, match=rf"resumed_ids\[2\] is {wrong}"):
        answer(Bench(), params=SamplingParams(max_tokens=9), resumed_ids=[1, 2, wrong])


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = make_chat_folder(tmp_path_factory.mktemp("resume") / "chat")
    with load_runtime_of(folder) as runtime:
        yield runtime


@contextmanager
def load_runtime_of(folder: Path) -> Iterator[Runtime]:
    with closing(load_runtime(ModelFiles(folder.name, folder), Settings(device="cpu", disk=0))) as runtime:
        yield runtime


def run(runtime: Runtime, params: SamplingParams, resumed_ids: Sequence[int] = ()) -> Completion:
    """An answer without the tree: what it computes must not depend on what was kept of another."""
    prompt = EncodedPrompt(Tokens.of([5, 6, 7, 8, 9, 10]))
    generation = runtime.prepare(Request.of(prompt, params, keep_state=False, resumed_ids=resumed_ids))
    *_, completion = run_alone(runtime.engine, runtime.prefix_cache, generation, runtime.chunk_size)
    assert isinstance(completion, Completion)
    return completion


def test_an_answer_in_a_grammar_goes_on_inside_it(runtime: Runtime) -> None:
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=5, format="json")
    whole = run(runtime, params)
    for cut in random.Random(1).sample(range(len(whole.token_ids)), 6):
        assert run(runtime, params, whole.token_ids[:cut]).text == whole.text
    if whole.finish_reason == "stop":
        json.loads(whole.text)


def test_a_resumed_token_that_breaks_the_grammar_is_refused(runtime: Runtime) -> None:
    with pytest.raises(RequestError, match="cannot be followed"):
        run(runtime, SamplingParams(max_tokens=60, format="json"), runtime.tokenizer.encode("no"))


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_tiny_models_go_on_with_the_same_tokens(name: str, tmp_path: Path) -> None:
    with load_runtime_of(make_folder(name, tmp_path / name)) as runtime:
        params = SamplingParams(max_tokens=10, temperature=0.8, seed=3, repeat_penalty=1.2)
        whole = run(runtime, params)
        for cut in range(0, 11, 2):
            assert run(runtime, params, whole.token_ids[:cut]).token_ids == whole.token_ids
