"""`python -m benchmarks library` on a tiny model, with a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.library.forks import ForkFigures, count_distinct
from benchmarks.library.together import LibraryRound, TimedAnswer, WayFigures, count_equal_answers
from tests.cli.conftest import Invoke
from tests.models.tiny_tokenizer import byte_level
from tests.tiny_models import make_folder


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A random model with a byte-level tokenizer, and room for prompts of some thousand bytes."""
    tokenizer, folder = byte_level(), tmp_path / "tiny"
    make_folder("llama", folder, vocab_size=len(tokenizer), max_position_embeddings=8192)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_threads_coroutines_and_clients_answer_alike_and_forks_compute_their_prefix_once(
    invoke: Invoke, model: str
) -> None:
    sizes = {"clients": 3, "lanes": 2, "tokens": 4, "rounds": 1, "blocks": 1, "forks": 5, "prefix": 300}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]

    result = invoke("library", "--model", model, *words, "--json", catch_exceptions=False)

    report = json.loads(result.stdout.splitlines()[-1])
    ways, forks = report["together"], report["forks"]
    assert list(ways) == ["threads", "coroutines", "http"]
    assert all(each["tokens_per_s"] > 0 and not each["errors"] for each in ways.values())
    computed = [each["computed_tokens"] for each in ways.values()]
    assert max(computed) < 1.1 * min(computed)  # messages may share their first letters
    assert report["equal_answers"] == 3
    assert forks["computed_tokens"] == forks["distinct_prompt_tokens"]
    assert forks["prefixes_computed"] == 1
    assert forks["tree_tokens"] == forks["distinct_tokens"]
    assert forks["tree_bytes"] == forks["row_bytes"]
    assert "3 HTTP clients" in result.stderr and "of which 5 tails" in result.stderr


def test_a_request_that_fails_is_counted_and_told() -> None:
    answered, failed = (
        TimedAnswer("yes", 8, prompt_tokens=20, cached_tokens=12),
        TimedAnswer(error="LanesBusy: all are busy"),
    )

    figures = WayFigures.of(
        [LibraryRound("threads", 2.0, [answered, failed]), LibraryRound("threads", 1.0, [answered, answered])]
    )

    assert (figures.lowest, figures.tokens_per_s, figures.highest) == (4.0, 10.0, 16.0)
    assert figures.computed_tokens == 12
    assert figures.errors == ["LanesBusy: all are busy"]


def test_answers_are_equal_if_they_are_in_every_round() -> None:
    rounds = [
        LibraryRound("http", 1.0, [TimedAnswer("a"), TimedAnswer("b")]),
        LibraryRound("threads", 1.0, [TimedAnswer("a"), TimedAnswer("c")]),
    ]

    assert count_equal_answers(rounds) == 1


def test_what_sequences_begin_with_counts_once() -> None:
    assert count_distinct([[1, 2, 3, 4], [1, 2, 5], [1, 2, 3], [7]]) == 6


def test_a_prefix_that_every_fork_computes_is_seen() -> None:
    tree = {"tree_tokens": 140, "distinct_tokens": 140, "tree_bytes": 0, "row_bytes": 0}
    lanes = {"lane_bytes_before": 0, "lane_bytes": 0}
    figures = ForkFigures(4, 100, 440, 0, 440, distinct_prompt_tokens=140, seconds=1.0, **tree, **lanes)

    assert figures.prefixes_computed == 4
