"""The benchmark of streams: what it counts, and the words that its tokens have."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from benchmarks.null_engine import NUM_BYTES, NullEngine
from benchmarks.streams.clients import ClientSetup
from benchmarks.streams.model import write_word_model
from benchmarks.streams.run import measure_in_process
from benchmarks.streams.window import StreamWindow
from bough.config import load_settings
from bough.models.tokenizer import load_tokenizer
from bough.runtime import Runtime


def test_only_what_arrives_while_all_streams_run_is_counted() -> None:
    window = StreamWindow(2)
    window.add(0, 5)  # the other has not begun
    window.add(1, 1)
    window.add(0, 2)
    window.add(1, 3)
    window.end()
    window.add(1, 7)  # the first has ended

    assert window.num_pieces == 5
    assert window.seconds > 0


def test_a_window_that_never_opened_has_no_length() -> None:
    window = StreamWindow(2)
    window.add(0, 5)
    window.end()

    assert (window.num_pieces, window.seconds) == (0, 0.0)


def test_requests_in_process_stream_words_from_an_engine_that_computes_nothing(tmp_path: Path) -> None:
    engine = NullEngine(step_s=0.002)
    files = write_word_model(tmp_path / "model", engine.vocab_size)
    settings = load_settings({"cache_folder": tmp_path, "data_folder": tmp_path, "disk": 0, "lanes": 2})
    with closing(Runtime(engine, load_tokenizer(files), settings, files)) as runtime:
        figures = measure_in_process(runtime, ClientSetup(num_clients=2, num_tokens=200, prompt_bytes=64))
        words = {runtime.tokenizer.decode([token_id]) for token_id in range(NUM_BYTES, NUM_BYTES + 100)}

    assert figures.tokens_per_s > 0  # it raises if a request fails, or they do not run together
    assert len(words) == 100 and all(word.startswith(" ") and len(word) == 6 for word in words)
