"""`bough doctor` and `bough version`."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import gguf
import pytest

import bough
from bough.cli import doctor
from bough.config import load_settings
from bough.errors import KernelsMissing
from bough.models import ModelFiles, ModelFolder, resolve
from bough.models.weights.packed import read_packed
from bough.runtime import describe_kernels
from bough.system import distribution
from bough.system.distribution import VERSION
from tests.cli.conftest import add_model
from tests.models.tiny_gguf import FOR_TORCH, write_gguf
from tests.models.tiny_tokenizer import byte_level
from tests.tiny_models import make_folder


@pytest.fixture(autouse=True)
def settings(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that make no finding worse than ok, but for the missing default model."""
    monkeypatch.setenv("BOUGH_DISK", "1GB")
    monkeypatch.chdir(home)


def findings(invoke, topic: str, exit_code: int = 0) -> list[dict[str, str]]:
    result = invoke("doctor", "--json")
    assert result.exit_code == exit_code, result.stdout
    found = json.loads(result.stdout)
    assert found["is_healthy"] is (exit_code == 0)
    return [each for each in found["findings"] if each["topic"] == topic]


def test_version_tells_what_a_report_of_a_bug_needs(invoke):
    found = json.loads(invoke("version", "--json").stdout)

    assert list(found) == ["bough", "python", "torch", "transformers", "mlx", "platform"]
    assert (found["bough"], found["python"]) == (VERSION, platform.python_version())
    assert f"bough {VERSION}\n" in invoke("version").stdout


def test_another_distribution_called_bough_is_named_with_the_commands_that_mend_it(invoke, monkeypatch):
    monkeypatch.setattr(doctor, "find_strangers", lambda: ["the distribution bough 0.3.4 is another"])

    (finding,) = findings(invoke, "installation", exit_code=1)

    assert (finding["level"], finding["text"]) == ("problem", "the distribution bough 0.3.4 is another")
    assert finding["todo"].startswith("pip uninstall bough && pip install ")
    assert invoke("version").stderr.startswith(f"problem: {finding['text']}: pip uninstall bough && ")


def test_a_file_of_another_package_in_place_of_ours_is_a_problem(invoke, monkeypatch):
    monkeypatch.setattr(doctor, "find_strangers", list)
    monkeypatch.delattr(bough, "__all__")

    (finding,) = findings(invoke, "installation", exit_code=1)

    assert finding["text"] == f"{bough.__file__} is not the file that Bough has there"


def test_each_line_begins_with_how_bad_it_is(invoke):
    result = invoke("doctor")

    assert {line.split(":")[0] for line in result.stdout.splitlines()} <= {"ok", "warning", "problem"}
    assert "server: none is running" in result.stdout


def test_the_engine_is_told_with_the_reason(invoke):
    (found,) = findings(invoke, "engine")

    assert "would run models, because" in found["text"] and "cuda: " in found["text"]


def test_the_kernels_of_the_cpu_are_told(invoke, monkeypatch):
    monkeypatch.setenv("BOUGH_ENGINE", "torch")
    monkeypatch.setenv("BOUGH_DEVICE", "cpu")
    monkeypatch.setenv("BOUGH_THREADS", "3")
    try:
        wanted = ("ok", f"{describe_kernels()}, for 3 threads")
    except KernelsMissing as missing:
        wanted = ("warning", f"none: {missing.reason}")

    (found,) = findings(invoke, "kernels")

    assert (found["level"], found["text"]) == wanted


def test_missing_kernels_are_a_warning_with_what_to_do(invoke, monkeypatch):
    def fail() -> str:
        raise KernelsMissing("there was no C compiler", "install gcc")

    monkeypatch.setattr(doctor, "describe_kernels", fail)
    monkeypatch.setenv("BOUGH_ENGINE", "torch")
    monkeypatch.setenv("BOUGH_DEVICE", "cpu")

    assert "warning: kernels: none: there was no C compiler: install gcc\n" in invoke("doctor").stdout


def test_settings_are_told_with_where_they_came_from(invoke, home, monkeypatch):
    (home / "bough.toml").write_text("lanes = 3")
    monkeypatch.setenv("BOUGH_QUEUE", "7")
    monkeypatch.setenv("BOUGH_API_KEY", "hidden")
    found = findings(invoke, "settings")

    texts = [each["text"] for each in found]
    assert {"lanes is 3 (lanes in bough.toml)", "queue is 7 (BOUGH_QUEUE)"} <= set(texts)
    assert "hidden" not in json.dumps(found)
    assert [each["level"] for each in found if each["level"] != "ok"] == []


def test_settings_that_cannot_be_read_are_a_problem_and_the_rest_is_still_told(invoke, monkeypatch):
    monkeypatch.setenv("BOUGH_KEEP_ALIVE", "5x")

    (found,) = findings(invoke, "settings", exit_code=1)

    assert found["level"] == "problem" and found["text"].startswith("BOUGH_KEEP_ALIVE is '5x'")
    assert findings(invoke, "engine", exit_code=1)


def test_a_bad_file_of_keys_is_a_problem(invoke, home, monkeypatch):
    monkeypatch.setenv("BOUGH_KEYS_FILE", str(home / "nothing"))

    found = findings(invoke, "settings", exit_code=1)

    assert any(each["level"] == "problem" and "cannot read the keys" in each["text"] for each in found)


def test_a_cache_folder_that_cannot_be_written_is_told(invoke, home, monkeypatch):
    (home / "file").write_text("")
    monkeypatch.setenv("BOUGH_CACHE_FOLDER", str(home / "file"))

    (found,) = findings(invoke, "cache folder")

    assert found["level"] == "warning" and found["text"].endswith("file cannot be written (Not a directory)")


def test_a_disk_without_room_is_told(invoke, monkeypatch):
    monkeypatch.setenv("BOUGH_DISK", "auto")
    monkeypatch.setenv("BOUGH_DISK_FREE", "999999TB")

    (found,) = findings(invoke, "cache folder")

    assert found["level"] == "warning" and "is full" in found["text"]


def make_whole(store: ModelFolder) -> Path:
    """A model in the folder of models that lacks nothing."""
    folder = make_folder("llama", store.folder / "whole")
    byte_level().save_pretrained(folder)
    (folder / "bough.json").write_text(
        json.dumps(
            {"name": "whole", "source": "", "sha256": "", "num_parameters": 0, "quantization": ""}
            | {"created": "2026-01-01T00:00:00+00:00"}
        )
    )
    return folder


def test_a_model_that_lacks_one_of_its_files_of_weights_is_a_problem(invoke, home, store):
    shards = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (make_whole(store) / "model.safetensors.index.json").write_text(json.dumps(shards))

    found = [each["text"] for each in findings(invoke, "models", exit_code=1) if each["level"] == "problem"]

    assert found == [
        f"whole: {store.folder / 'whole'} lacks 1 of 1 files of weights; the first is model-00002-of-00002.safetensors"
    ]


def test_damaged_models_are_a_problem_and_whole_ones_are_not(invoke, home, store):
    make_whole(store)
    add_model(store, "hollow")
    (store.folder / "nothing").mkdir()

    found = {each["text"].split(",")[0].split(":")[0]: each for each in findings(invoke, "models", exit_code=1)}

    assert found["whole"]["level"] == "ok"
    assert (found["hollow"]["level"], found["hollow"]["todo"]) == ("problem", "`bough rm hollow`, then pull it again")
    assert found[f"{store.folder / 'nothing'} is no model"]["level"] == "warning"
    assert "bough pull smollm2" in found["the model smollm2 (model) is not here"]["todo"]


@pytest.mark.parametrize("name", ["whole", "whole:latest", "copied"])
def test_the_model_of_the_settings_may_have_any_of_its_names(invoke, store, monkeypatch, name):
    make_whole(store)
    store.copy("whole", "copied")
    monkeypatch.setenv("BOUGH_MODEL", name)

    assert not [each for each in findings(invoke, "models") if "is not here" in each["text"]]


def add_gguf(home: Path, store: ModelFolder) -> ModelFiles:
    """A model that is a GGUF file."""
    write_gguf(home / "small.gguf", gguf.GGMLQuantizationType.Q8_0)
    model = resolve(home / "small.gguf", load_settings(), FOR_TORCH)
    assert store.find(model.name) is not None
    return model


def test_a_gguf_file_that_is_gone_is_a_problem(invoke, home, store):
    model = add_gguf(home, store)
    model.weights[0].unlink()

    found = findings(invoke, "models", exit_code=1)

    assert any(each["level"] == "problem" and "small.gguf" in each["text"] for each in found)


def test_the_rows_of_a_model_are_compared_with_the_librarys_reading(invoke, home, store):
    model = add_gguf(home, store)

    said = invoke("doctor", model.name).stdout

    num_rows = sum(each.num_rows for name, each in read_packed(model.folder).tensors.items() if name != "lm_head.weight")
    expected = f"{num_rows:,} rows of 16 weights of {model.name} are, bit by bit, as transformers reads them"
    assert " ".join(said.split()) == f"ok: model: {expected}"


def test_rows_that_the_table_has_in_another_place_are_a_problem(invoke, home, store):
    model = add_gguf(home, store)
    table = json.loads((model.folder / "packed.json").read_text())
    wrong = table["tensors"]["model.layers.1.mlp.up_proj.weight"]
    wrong["rows"] = table["tensors"]["model.layers.1.mlp.gate_proj.weight"]["rows"]
    q = table["tensors"]["model.layers.0.self_attn.q_proj.weight"]
    q["rows"][0], q["rows"][1] = q["rows"][1], q["rows"][0]
    (model.folder / "packed.json").write_text(json.dumps(table))

    answer = invoke("doctor", model.name)

    said = answer.stdout
    assert answer.exit_code == 1
    assert f"2 weights of {model.name} are not as transformers reads them, such as model.layers.0" in " ".join(said.split())


def test_an_announcement_of_a_process_that_does_not_answer_is_told(invoke, home):
    (home / "cache").mkdir()
    announced = {"pid": os.getpid(), "url": "http://127.0.0.1:9", "nonce": "n"}
    (home / "cache" / "server.json").write_text(json.dumps(announced))

    (found,) = findings(invoke, "server")

    assert found["level"] == "warning" and f"process {os.getpid()}" in found["text"]


def test_a_missing_package_is_told_with_the_command_that_installs_it(invoke, monkeypatch):
    monkeypatch.setattr(distribution, "find_spec", lambda name: None)

    found = findings(invoke, "extras")

    assert [(each["level"], each["todo"]) for each in found] == [
        ("warning", "pip install 'bough-llm[server]'"),
        ("ok", "pip install 'bough-llm[bench]'"),
        ("ok", "pip install 'bough-llm[store]'"),
    ]


def test_it_says_whether_the_shared_store_answers(invoke, home, monkeypatch):
    (home / "secret").write_text("a secret of a few words")
    monkeypatch.setenv("BOUGH_STORE_SECRET_FILE", str(home / "secret"))
    monkeypatch.setenv("BOUGH_STORE", str(home / "store"))
    (found,) = findings(invoke, "store")
    assert found["level"] == "ok" and "answers" in found["text"]

    for name, value in (("ENDPOINT_URL", "http://127.0.0.1:9"), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("BOUGH_STORE", "s3://nowhere")
    (found,) = findings(invoke, "store", exit_code=1)
    assert found["level"] == "problem" and "does not answer" in found["text"]


def test_an_engine_that_cannot_be_imported_is_a_problem(invoke, monkeypatch):
    def fail() -> str:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(doctor, "_describe_torch", fail)
    monkeypatch.setenv("BOUGH_ENGINE", "torch")

    (found,) = findings(invoke, "engine", exit_code=1)

    assert "libcudart" in found["text"] and found["todo"] == "pip install 'bough-llm[torch]'"
