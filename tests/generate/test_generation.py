"""Generation over the fake engine: limits, ends, cancellation, seeds, and the same text cold and warm."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.null_engine import NullEngine, NullVocabulary
from bough.bench.alone import run_alone
from bough.cache.prefix_cache import PrefixCache
from bough.engines.contract import Capabilities
from bough.errors import EngineError, PromptTooLong, RequestError
from bough.generate import scoring
from bough.generate.generation import MIN_CHUNK, MIN_CHUNK_BESIDE_OTHERS, ChunkSize, Generation
from bough.generate.request import Request
from bough.scheduling.job import Job, PromptAdvanced, RequestNews
from bough.tokens import Tokens
from bough.types import Chunk, Completion, SamplingParams
from tests import invariants
from tests import reference_sampler as reference
from tests.fakes import MODELS, FakeEngine

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
every_model = pytest.mark.parametrize("model", MODELS)


class Letters:
    """A vocabulary whose tokens are single letters; 63 ends an answer."""

    eos_ids = frozenset({63})
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([ord("A") + token_id % 57])


class Bench:
    """A fake engine with its cache, and a way to run requests on it."""

    def __init__(self, model: str = "full", **engine: int) -> None:
        self.engine = FakeEngine(MODELS[model], **engine)
        ticks = itertools.count(1)
        self.cache = PrefixCache(self.engine, [self.engine.make_lane(), self.engine.make_lane()], page_tokens=4)
        self.clock = lambda: next(ticks) / 10

    def stream(self, request: Request, **options: Any) -> Iterator[Chunk | Completion]:
        job = Job(self.engine, request, Letters(), None, self.clock, **options)
        return run_alone(self.engine, self.cache, job, ChunkSize(3))

    def run(self, ids: list[int] = PROMPT, choice: int = 0, seed: int = 0, **params: object) -> Completion:
        *_, completion = self.stream(Request(Tokens.of(ids), SamplingParams(**params), seed=seed, choice=choice))  # type: ignore[arg-type]
        invariants.check(self.cache, self.engine)
        assert isinstance(completion, Completion)
        return completion

    def greedy(self, count: int) -> list[int]:
        """What a plain loop without any cache would generate."""
        ids = list(PROMPT)
        for _ in range(count):
            lane = self.engine.make_lane()
            lane.reserve(len(ids))
            scores = self.engine.evaluate(lane, ids)
            ids.append(max(range(len(scores)), key=lambda i: (scores[i], -i)))
        return ids[len(PROMPT) :]


@every_model
def test_greedy_tokens_are_those_of_a_plain_loop_cold_and_warm(model: str) -> None:
    bench = Bench(model)
    expected = bench.greedy(6)

    cold = bench.run(max_tokens=6, ignore_eos=True)
    warm = bench.run(max_tokens=6, ignore_eos=True)

    assert list(cold.token_ids) == list(warm.token_ids) == expected
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens == len(PROMPT) - 1
    assert warm.usage.computed_tokens == 1


def test_counts_add_up_and_times_are_told() -> None:
    done = Bench().run(max_tokens=4, ignore_eos=True)

    assert done.usage.cached_tokens + done.usage.computed_tokens == done.usage.prompt_tokens == len(PROMPT)
    assert done.usage.completion_tokens == len(done.token_ids) == 4
    assert 0 < done.timings.prefill_s < done.timings.first_token_s < done.timings.total_s


def test_an_end_token_at_once_gives_an_empty_answer() -> None:
    bench = Bench()
    first = bench.greedy(1)[0]
    Letters.eos_ids = frozenset({first})
    try:
        done = bench.run(max_tokens=4)
    finally:
        Letters.eos_ids = frozenset({63})
    assert (done.text, done.token_ids, done.finish_reason) == ("", (), "stop")


def test_an_end_token_in_mid_run_is_not_part_of_the_answer() -> None:
    bench = Bench()
    tokens = bench.greedy(4)
    Letters.eos_ids = frozenset({tokens[2]})
    try:
        done = bench.run(max_tokens=9)
    finally:
        Letters.eos_ids = frozenset({63})
    assert (list(done.token_ids), done.finish_reason) == (tokens[:2], "stop")


def test_the_budget_of_tokens_ends_an_answer_by_length() -> None:
    assert Bench().run(max_tokens=3, ignore_eos=True).finish_reason == "length"
    assert Bench().run(max_tokens=0).finish_reason == "length"


def test_a_stop_string_across_tokens_ends_the_answer_before_it() -> None:
    bench = Bench()
    text = bench.run(max_tokens=8, ignore_eos=True).text
    stop = text[2:5]
    start = text.index(stop)

    done = bench.run(max_tokens=8, ignore_eos=True, stop=(stop,))

    assert (done.text, done.finish_reason, done.stop) == (text[:start], "stop", stop)


def test_a_stop_string_at_the_very_end_counts() -> None:
    bench = Bench()
    text = bench.run(max_tokens=8, ignore_eos=True).text
    done = bench.run(max_tokens=8, ignore_eos=True, stop=(text[-2:],))
    assert done.finish_reason == "stop"


def test_pieces_joined_are_the_whole_text_also_with_an_almost_matching_stop() -> None:
    bench = Bench()
    text = bench.run(max_tokens=8, ignore_eos=True).text
    request = Request(Tokens.of(PROMPT), SamplingParams(max_tokens=8, ignore_eos=True, stop=(text[3:6] + "?",)))

    *pieces, done = bench.stream(request)

    assert isinstance(done, Completion)
    assert "".join(piece.text for piece in pieces) == done.text == text


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    bench = Bench(context_tokens=10)
    with pytest.raises(PromptTooLong, match="11 tokens, and the context holds 10"):
        bench.run(list(range(11)))
    with pytest.raises(PromptTooLong):
        bench.run(list(range(10)), max_tokens=1)
    assert bench.run(list(range(10)), max_tokens=0).finish_reason == "length"


def test_the_context_bounds_the_answer() -> None:
    done = Bench(context_tokens=12).run(ignore_eos=True)
    assert done.usage.completion_tokens == 12 - len(PROMPT)
    assert done.finish_reason == "length"


@pytest.mark.parametrize(
    ("context", "max_tokens", "expected"),
    [(4000, None, 1000), (600, None, 256), (200, None, 192), (400, -1, 392), (4000, 40, 40), (50_000, None, 8192)],
)
def test_an_answer_without_a_limit_takes_a_quarter_of_the_context(
    context: int, max_tokens: int | None, expected: int
) -> None:
    engine = NullEngine()
    engine.context_tokens = context
    request = Request(Tokens.of(PROMPT), SamplingParams(max_tokens=max_tokens))
    generation = Generation(engine, request, NullVocabulary(), None, lambda: 0.0)

    *_, done = run_alone(engine, PrefixCache(engine, [engine.make_lane()]), generation, ChunkSize(8))

    assert isinstance(done, Completion)
    assert (done.usage.completion_tokens, done.finish_reason) == (expected, "length")


@every_model
def test_leaving_the_stream_anywhere_keeps_the_work_and_frees_the_lane(model: str) -> None:
    for pieces in range(8):
        bench = Bench(model)
        stream = bench.stream(Request(Tokens.of(PROMPT), SamplingParams(max_tokens=5, ignore_eos=True)))
        for _ in range(pieces):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        invariants.check(bench.cache, bench.engine)
        assert not any(slot.is_busy for slot in bench.cache.lanes.slots)
        assert bench.run(max_tokens=5, ignore_eos=True).usage.cached_tokens >= min(2 * pieces, len(PROMPT) - 1)


def test_a_cancelled_request_says_so_and_keeps_what_was_computed() -> None:
    bench = Bench()
    asked = itertools.count()
    request = Request(Tokens.of(PROMPT), SamplingParams(max_tokens=5))

    *_, done = bench.stream(request, asks_to_end=lambda: next(asked) >= 2)

    assert isinstance(done, Completion) and done.finish_reason == "cancelled"
    assert bench.run(max_tokens=1).usage.cached_tokens > 0


def test_an_engine_error_is_raised_and_the_next_request_is_right() -> None:
    bench = Bench()
    bench.engine.fail_next = "evaluate"
    with pytest.raises(EngineError):
        bench.run()
    assert list(bench.run(max_tokens=3, ignore_eos=True).token_ids) == bench.greedy(3)


def test_a_seed_gives_one_text_alone_and_among_others_and_another_seed_another() -> None:
    alone = Bench().run(max_tokens=8, temperature=1.0, seed=7, ignore_eos=True)
    bench = Bench()
    streams = [
        bench.stream(Request(Tokens.of(ids), SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True), seed=seed))
        for ids, seed in ((PROMPT, 7), ([9, 9], 3))
    ]
    turns = list(itertools.zip_longest(*streams))  # the two take turns
    mixed = next(piece for piece, _ in turns if isinstance(piece, Completion))

    assert mixed.token_ids == alone.token_ids
    assert Bench().run(max_tokens=8, temperature=1.0, seed=8, ignore_eos=True).token_ids != alone.token_ids
    assert Bench().run(max_tokens=8, temperature=1.0, seed=7, choice=1, ignore_eos=True).token_ids != alone.token_ids


def test_logprobs_come_with_each_token() -> None:
    done = Bench().run(max_tokens=3, ignore_eos=True, logprobs=2)
    assert [each.token_id for each in done.logprobs] == list(done.token_ids)
    assert all(each.logprob <= 0 and len(each.top) == 2 for each in done.logprobs)
    assert all(each.top[0].logprob == pytest.approx(each.logprob) for each in done.logprobs)  # greedy


def test_progress_reaches_the_whole_prompt() -> None:
    news: list[RequestNews] = []
    list(Bench().stream(Request(Tokens.of(PROMPT), SamplingParams(max_tokens=1)), listener=news.append))
    seen = [(each.done_tokens, each.total_tokens) for each in news if isinstance(each, PromptAdvanced)]
    assert seen[0] == (0, 8) and seen[-1] == (8, 8)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_past_the_reuse_limit_a_sequence_is_evaluated_anew_and_not_recorded() -> None:
    bench = Bench()
    bench.engine.capabilities = bench.engine.capabilities.__class__(reuse_limit=10)
    bench.cache = PrefixCache(bench.engine, [bench.engine.make_lane()], page_tokens=4, reuse_limit=10)

    done = bench.run(max_tokens=6, ignore_eos=True)

    assert list(done.token_ids) == bench.greedy(6)
    assert bench.cache.forest.tries[""].match([*PROMPT, *done.token_ids]).length == 10
    before = len(bench.engine.evaluated)
    assert bench.run([*PROMPT, *done.token_ids], max_tokens=1).usage.cached_tokens == 0
    assert bench.engine.evaluated[before:] == [14], "beyond the limit a prompt is one run"


def test_chunks_adapt_to_the_measured_rate_and_a_fixed_size_stays() -> None:
    size = ChunkSize()
    size.measure(512, 0.5)
    assert size.choose() == 256
    for _ in range(20):
        size.measure(512, 100.0)
    assert size.choose() == MIN_CHUNK
    assert size.choose(beside_others=True) == MIN_CHUNK_BESIDE_OTHERS
    for _ in range(40):
        size.measure(4096, 0.001)
    assert size.choose() == 8192
    assert ChunkSize(largest=100).choose() == 100
    fixed = ChunkSize(100)
    fixed.measure(100, 9.0)
    assert fixed.choose() == fixed.choose(beside_others=True) == 100
    assert ChunkSize().choose(beside_others=True) == MIN_CHUNK < ChunkSize().choose(), "the first one is a guess"


def count_seen(generation: Generation) -> dict[int, int]:
    seen = generation.draw().seen
    return {} if seen is None else dict(zip(seen.ids, seen.counts, strict=True))


@pytest.mark.parametrize("last_n", [-1, 0, 1, 5, 12, 64])
@pytest.mark.parametrize("penalty", [{"repeat_penalty": 1.5}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}])
def test_penalties_apply_to_the_last_tokens_of_prompt_and_answer(last_n: int, penalty: dict[str, float]) -> None:
    bench = Bench()
    params = SamplingParams(max_tokens=20, ignore_eos=True, repeat_last_n=last_n, **penalty)  # type: ignore[arg-type]
    generation = Generation(bench.engine, Request(Tokens.of(PROMPT), params), Letters(), None, bench.clock)
    tokens = list(PROMPT)

    for chunk in run_alone(bench.engine, bench.cache, generation, ChunkSize(3)):
        tokens += chunk.token_ids if isinstance(chunk, Chunk) else ()
        last = tokens[-last_n:] if last_n > 0 else tokens[: -last_n * len(tokens)]
        assert count_seen(generation) == count_seen(generation) == Counter(last)
    assert len(tokens) == len(PROMPT) + 20


def test_without_penalties_no_token_is_counted() -> None:
    bench = Bench()

    generation = Generation(bench.engine, Request(Tokens.of(PROMPT), SamplingParams()), Letters(), None, bench.clock)

    assert generation.draw().seen is None


@every_model
def test_a_scored_prompt_is_computed_whole_tells_the_same_cold_and_warm_and_stays_reusable(model: str) -> None:
    bench = Bench(model)
    expected = []
    for end in range(1, len(PROMPT)):
        lane = bench.engine.make_lane()
        lane.reserve(end)
        scores = bench.engine.evaluate(lane, PROMPT[:end])
        expected.append(reference.score(scores, PROMPT[end], 2))

    def score() -> list[Chunk | Completion]:
        request = Request(Tokens.of(PROMPT), SamplingParams(max_tokens=2, ignore_eos=True, logprobs=2), scores_prompt=True)
        pieces = list(bench.stream(request))
        invariants.check(bench.cache, bench.engine)
        return pieces

    plain = bench.run(max_tokens=2, ignore_eos=True)
    pieces = score()
    completion = pieces[-1]
    assert isinstance(completion, Completion)
    assert [(each.token_id, each.logprob, each.top) for each in completion.prompt_logprobs] == [
        (each.token_id, each.logprob, each.top) for each in expected
    ]
    streamed = [each for piece in pieces[:-1] if isinstance(piece, Chunk) for each in piece.prompt_logprobs]
    assert tuple(streamed) == completion.prompt_logprobs
    assert completion.token_ids == plain.token_ids
    assert completion.usage.cached_tokens == 0 and completion.usage.computed_tokens == len(PROMPT)

    again = score()[-1]
    assert isinstance(again, Completion) and again.prompt_logprobs == completion.prompt_logprobs
    assert bench.run(max_tokens=2, ignore_eos=True).usage.cached_tokens == len(PROMPT) - 1


def test_a_prompt_that_only_fits_at_once_has_a_bound_for_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_LOGITS", 4 * 64)
    bench = Bench()
    request = Request(Tokens.of(PROMPT), SamplingParams(max_tokens=0, logprobs=0), scores_prompt=True)
    *_, chunked = bench.stream(request)
    assert isinstance(chunked, Completion) and len(chunked.prompt_logprobs) == 7

    bench.engine.capabilities = Capabilities(can_chunk=False)
    with pytest.raises(RequestError, match=r"the prompt has 8 tokens, .* and may have 4"):
        bench.stream(request)


def test_further_end_tokens_end_an_answer_and_are_no_part_of_it() -> None:
    bench = Bench()
    ids = PROMPT[1:]
    first, second = bench.run(ids, max_tokens=2, ignore_eos=True).token_ids
    assert first != second and 63 not in (first, second)

    *_, ended = bench.stream(Request(Tokens.of(ids), SamplingParams(max_tokens=5), end_ids=frozenset({second})))

    assert isinstance(ended, Completion)
    assert (ended.token_ids, ended.finish_reason) == ((first,), "stop")
