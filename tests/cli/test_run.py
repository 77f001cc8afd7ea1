"""`bough run` with a prompt: one answer on standard output."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from bough.cli.main import app
from bough.cli.prompt_args import PromptArgs
from bough.config import load_settings
from bough.models import Tokenizer
from bough.models.fingerprint import check_packed
from bough.runner import Runner
from bough.runtime import Runtime
from bough.types import SamplingParams
from tests.cli.conftest import make_runner
from tests.fakes import FakeEngine
from tests.models.tiny_tokenizer import byte_level
from tests.waiting import wait_until

HELLO = [{"role": "user", "content": "Hello there"}]


class InterruptedEngine(FakeEngine):
    """Ctrl-C comes while its third token is computed, which takes until the request is cancelled."""

    is_cancelled = None

    def step(self, lanes, ids):
        if len(self.evaluated) == 3:
            signal.raise_signal(signal.SIGINT)
            wait_until(self.is_cancelled)
        return super().step(lanes, ids)


def test_an_answer_is_what_the_runner_generates(invoke, loads, tmp_path):
    expected = make_runner(tmp_path).generate(HELLO, max_tokens=6).text

    result = invoke("run", "tiny", "Hello there", "--max-tokens", "6")

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == expected.removesuffix("\n") + "\n"
    assert loads == [{"name": "tiny"}]


def test_a_piped_text_is_the_prompt(invoke, loads, tmp_path):
    expected = make_runner(tmp_path).generate(HELLO, max_tokens=6).text

    assert invoke("run", "--max-tokens", "6", piped="Hello there\n").stdout.strip() == expected.strip()


def test_raw_goes_without_the_template(invoke, loads, tmp_path):
    expected = make_runner(tmp_path).generate("Hello there", raw=True, max_tokens=6)

    found = json.loads(invoke("run", "Hello there", "--raw", "--json", "--max-tokens", "6").stdout)

    assert found["text"] == expected.text
    assert found["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


def test_json_is_one_object_with_counts_and_times(invoke, loads):
    found = json.loads(invoke("run", "Hello there", "--json", "--max-tokens", "6").stdout)

    assert found["model"] == "tiny"
    assert found["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 6
    assert found["usage"]["cached_tokens"] + found["usage"]["computed_tokens"] == found["usage"]["prompt_tokens"]
    assert found["timings"]["load_s"] >= 0 and found["timings"]["total_s"] > 0


def test_verbose_tells_the_cost_on_standard_error(invoke, loads):
    lines = invoke("run", "Hello there", "--verbose", "--max-tokens", "6").stderr.splitlines()

    names = [line.split("  ")[0] for line in lines]
    assert names == ["total", "load", "prompt", "cached", "computed", "first token", "generated", "finished"]


@pytest.mark.parametrize(("flags", "told"), [([], "note: it could be faster\n"), (["--json"], "")])
def test_what_would_be_faster_is_told_once_and_not_beside_json(invoke, runner, monkeypatch, flags, told):
    def load(name: str, *, progress, announce, advise, **settings) -> Runner:
        advise("it could be faster")
        return runner

    monkeypatch.setattr("bough.cli.backends.local.load", load)

    assert invoke("run", "-m", "tiny", "Hello there", "--max-tokens", "1", *flags).stderr == told


def test_flags_reach_the_settings(invoke, loads):
    flags = ["--context", "512", "--device-memory", "2GB", "--no-cache", "--engine", "mlx", "--device", "cpu"]

    invoke("run", "-m", "tiny", "Hello", *flags, "--max-tokens", "1")

    chosen = {"context": 512, "device_memory": "2GB", "cache": False, "engine": "mlx", "device": "cpu"}
    assert loads == [{"name": "tiny", **chosen}]


def test_a_chat_begins_by_saying_which_engine_answers(invoke, loads, monkeypatch):
    monkeypatch.setattr(
        "bough.cli.run.read_prompt_args", lambda *_: PromptArgs("tiny", None)
    )  # no prompt, as at a terminal

    result = invoke("run", "tiny", piped="/bye\n")

    assert "tiny on fake (unknown) · /help lists" in result.stderr


def test_flags_of_the_tiers_reach_the_settings(invoke, loads):
    flags = ["--host-memory", "auto", "--disk", "0", "--disk-free", "5GB", "--disk-ttl", "7d", "--salt-share", "0.5"]

    invoke("run", "-m", "tiny", "Hello", "--max-tokens", "1", *flags)

    tiers = {"host_memory": "auto", "disk": "0", "disk_free": "5GB", "disk_ttl": "7d", "salt_share": 0.5}
    assert loads == [{"name": "tiny", **tiers}]


def test_sampling_flags_reach_the_request(invoke, loads, tmp_path):
    chosen = {"max_tokens": 6, "temperature": 2.0, "seed": 7, "top_k": 50, "repeat_penalty": 1.5, "top_n_sigma": 2.5}
    expected = make_runner(tmp_path).generate(HELLO, **chosen).text
    flags = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", str(value))]

    result = invoke("run", "Hello there", *flags)

    assert result.stdout.rstrip("\n") == expected.rstrip("\n")


def test_a_schema_file_shapes_the_answer(invoke, loads, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["Paris"]}')

    assert invoke("run", "Hello there", "--format", str(schema)).stdout == '"Paris"\n'


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--format", "nonsense"], "format is 'nonsense'"),
        (["--raw", "--system", "Be brief."], "--system needs the chat template"),
    ],
)
def test_bad_flags_are_refused_before_a_model_is_loaded(invoke, loads, flags, complaint):
    result = invoke("run", "Hello there", *flags)

    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())
    assert loads == []


def test_no_prompt_at_all_is_bad_usage(invoke, loads):
    assert invoke("run", "tiny").exit_code == 2


def test_a_first_word_that_is_no_model_is_an_error_that_says_what_to_do(invoke):
    result = invoke("run", "Hello", "there")

    assert result.exit_code == 1
    assert "no model 'Hello'" in result.stderr and "--model" in result.stderr


def test_one_word_that_is_no_model_is_a_prompt(invoke, loads, tmp_path):
    expected = make_runner(tmp_path).generate([{"role": "user", "content": "Hello"}], max_tokens=6).text

    result = invoke("run", "Hello", "--max-tokens", "6")

    assert result.stdout.strip() == expected.strip()
    assert result.stderr == "there is no model 'Hello': sending it as a prompt to smollm2\n"
    assert loads == [{}]


def test_a_person_is_asked_whether_a_word_is_a_prompt(invoke, loads, monkeypatch):
    monkeypatch.setattr("bough.cli.run.is_interactive", lambda: True)

    asked = invoke("run", "Hello", "--max-tokens", "6", piped="n\n")

    assert asked.exit_code == 1
    assert loads == []


@pytest.mark.parametrize("words", [["smolm2"], ["Smolllm2", "Hello there"]])
def test_a_misspelt_name_is_not_sent_as_a_prompt(invoke, loads, words):
    result = invoke("run", *words)

    assert result.exit_code == 1
    assert result.stderr == f"error: there is no model {words[0]!r}; did you mean smollm2?\n"
    assert loads == []


def test_no_parameter_is_set_that_was_not_given(invoke, runner, loads, monkeypatch):
    asked = []
    monkeypatch.setattr(
        runner, "model_params", lambda **given: asked.append(given) or SamplingParams(**given), raising=False
    )

    invoke("run", "Hello there", "--max-tokens", "3")

    assert asked == [{"max_tokens": 3}]


def test_an_answer_without_a_limit_runs_to_the_end_of_the_context(invoke, monkeypatch, tmp_path):
    engine = FakeEngine(vocab_size=len(byte_level()), context_tokens=80)
    monkeypatch.setattr("bough.cli.backends.local.load", lambda *args, **settings: make_runner(tmp_path, engine))

    usage = json.loads(invoke("run", "Hello there", "--max-tokens", "-1", "--json").stdout)["usage"]

    assert usage["prompt_tokens"] + usage["completion_tokens"] == 80


def test_a_model_without_a_template_asks_for_raw(invoke, monkeypatch, tmp_path):
    monkeypatch.setattr("bough.cli.backends.local.load", lambda *args, **settings: make_runner(tmp_path, template=None))

    result = invoke("run", "Hello there")

    assert result.exit_code == 1
    assert "--raw" in result.stderr


def test_ctrl_c_keeps_what_came(invoke, monkeypatch, tmp_path):
    whole = make_runner(tmp_path).generate(HELLO, max_tokens=50).text
    engine = InterruptedEngine(vocab_size=len(byte_level()))
    stopped = make_runner(tmp_path, engine)
    prepare = stopped.runtime.prepare

    def note_request(request, listener, is_cancelled):
        engine.is_cancelled = is_cancelled
        return prepare(request, listener, is_cancelled)

    monkeypatch.setattr(stopped.runtime, "prepare", note_request)
    monkeypatch.setattr("bough.cli.backends.local.load", lambda *args, **settings: stopped)

    result = invoke("run", "Hello there", "--json", "--max-tokens", "50")

    found = json.loads(result.stdout)
    assert result.exit_code == 130
    assert found["finish_reason"] == "cancelled"
    assert 0 < found["usage"]["completion_tokens"] < 50
    assert whole.startswith(found["text"])


@pytest.mark.model
def test_the_default_model_answers_in_a_process_of_its_own(smollm2_files):
    check_packed(smollm2_files, load_settings())  # the first to read the packed weights says so
    question = ["--temperature", "0", "smollm2", "What is the capital of France?"]
    command = [sys.executable, "-m", "bough.cli.main", "run", "--json", *question]

    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200)

    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in json.loads(done.stdout)["text"]


@pytest.mark.model
def test_the_default_model_passes_its_self_check(smollm2_files):
    found = json.loads(CliRunner().invoke(app, ["show", "smollm2", "--json"]).stdout)

    assert found["has_chat_template"]
    assert found["engine"]["capabilities"]["can_reuse"]


def test_a_model_without_a_tokenizer_says_which_files_it_lacks(invoke, tmp_path, monkeypatch):
    made = make_runner(tmp_path).runtime
    bare = Runner(Runtime(made.engine, Tokenizer(None), made.settings, made.files))
    monkeypatch.setattr("bough.cli.backends.local.load", lambda *args, **settings: bare)

    result = invoke("run", "--model", "tiny", "Hello there")

    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {tmp_path} has no tokenizer: there is none of tokenizer.json,")


def test_a_path_that_is_not_there_is_not_taken_for_a_part_of_the_prompt(invoke):
    assert invoke("run", "/no/such/model", "Hello").stderr == "error: there is no file or folder /no/such/model\n"
