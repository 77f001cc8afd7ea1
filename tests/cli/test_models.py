"""The commands about models: pull, list, show, rm and cp."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from bough.errors import DownloadError, KernelsMissing
from bough.models import ModelFiles, PullPlan
from bough.system.resources import HostMemory
from tests.cli.conftest import add_model
from tests.fakes import MODELS, FakeEngine
from tests.models.tiny_tokenizer import byte_level
from tests.tiny_encoders import make_encoder, pooling, write_modules
from tests.tiny_models import make_folder


def test_list_says_how_to_get_a_first_model(invoke):
    result = invoke("list")

    assert (result.exit_code, result.stdout) == (0, "")
    assert "bough pull smollm2" in result.stderr


def test_list_shows_each_model_in_columns(invoke, store):
    add_model(store, "small")

    header, row = invoke("list").stdout.splitlines()

    assert header.split() == ["NAME", "SIZE", "PARAMETERS", "QUANTIZATION", "MODIFIED"]
    assert row.startswith("small") and "134.5M" in row and "Q4_1" in row and "just now" in row


def test_list_and_show_tell_an_encoder(invoke, store):
    with store.making("embeds") as making:
        write_modules(make_encoder(making.folder), pooling("cls"), ("Normalize", {}))
        making.commit("hub: org/embeds", "", 23_200, "F32")

    _, row = invoke("list").stdout.splitlines()
    shown = invoke("show", "embeds", "--device", "cpu").stdout

    assert "23.2K (embedder)" in row
    assert [each["encoder"] for each in json.loads(invoke("list", "--json").stdout)] == ["embedder"]
    facts = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines() if line.startswith("  ")}
    assert facts["capabilities"] == "embedding"
    assert facts["pooling"] == "cls, then Normalize"
    assert facts["output"] == "vectors of 32 numbers"


def test_list_as_json_has_exact_numbers(invoke, store):
    model = add_model(store, "small")

    (found,) = json.loads(invoke("list", "--json").stdout)

    assert found["name"] == "small:latest"
    assert found["size_bytes"] == model.size_bytes
    assert found["num_parameters"] == 134_500_000


def test_cp_gives_a_model_another_name(invoke, store):
    model, _ = add_model(store, "small"), add_model(store, "large")

    told = invoke("cp", "small", "gpt-4o")
    as_json = invoke("cp", "gpt-4o", "other", "--json")
    rows = {row.split()[0]: row for row in invoke("list").stdout.splitlines()[1:]}
    facts = {each["name"]: each for each in json.loads(invoke("list", "--json").stdout)}

    assert told.stdout == "gpt-4o:latest stands for small:latest\n"
    assert json.loads(as_json.stdout) == {"name": "other:latest", "stands_for": "small:latest"}
    assert list(rows) == ["large:latest", "small:latest", "gpt-4o:latest", "other:latest"]  # names below their model
    assert rows["gpt-4o:latest"].startswith("  gpt-4o:latest") and "another name" in rows["gpt-4o:latest"]
    assert facts["other:latest"]["stands_for"] == "small:latest"
    assert facts["other:latest"]["folder"] == str(model.folder)


def test_cp_refuses_unknown_sources_and_names_with_weights(invoke, store):
    add_model(store, "small")
    add_model(store, "large")

    assert "no local model 'smal'" in invoke("cp", "smal", "x").stderr
    assert "weights of its own" in invoke("cp", "small", "large").stderr
    assert "not a model name" in invoke("cp", "small", "../up").stderr
    assert store.names() == {"small", "large"}


def test_rm_of_an_alias_deletes_the_name_and_of_a_model_keeps_the_weights_for_its_aliases(invoke, store):
    add_model(store, "small")
    for name in ("one", "two"):
        store.copy("small", name)

    invoke("rm", "one", "--yes")
    assert store.names() == {"small", "two"}
    told = invoke("rm", "small", "--yes").stdout

    assert "stay for its other names" in told
    assert store.find("two") is not None and store.names() == {"two"}


def test_rm_takes_a_name_that_is_given_twice_once(invoke, store):
    add_model(store, "small")
    store.copy("small", "other")

    result = invoke("rm", "-y", "other", "other:latest", "--json")

    assert result.exit_code == 0, result.stderr
    assert [each["name"] for each in json.loads(result.stdout)["models"]] == ["other"]


def test_rm_deletes_models(invoke, store):
    add_model(store, "small")
    add_model(store, "large")

    result = invoke("rm", "small", "large:latest", "-y")

    assert result.exit_code == 0
    assert "deleted small" in result.stdout
    assert store.list() == []


def test_rm_refuses_an_unknown_name_and_deletes_nothing(invoke, store):
    add_model(store, "small")

    result = invoke("rm", "small", "smal", "--yes")

    assert result.exit_code == 1
    assert result.stderr == "error: no local model 'smal'; local models: small\n"
    assert [model.name for model in store.list()] == ["small"]


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["rm", "small", "--yes"]])
def test_a_folder_that_may_not_be_read_is_one_line(invoke, store, monkeypatch, words):
    def refuse(folder: Path):
        raise PermissionError(13, "Permission denied", str(folder))

    store.folder.mkdir(parents=True)
    monkeypatch.setattr(Path, "iterdir", refuse)

    result = invoke(*words)

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "Permission denied" in result.stderr


def test_rm_deletes_nothing_without_a_terminal_and_without_yes(invoke, store):
    add_model(store, "small")

    result = invoke("rm", "small")

    assert result.exit_code == 1
    assert result.stderr.startswith("error: delete small (") and result.stderr.endswith("needs -y without a terminal\n")
    assert store.find("small") is not None


def test_rm_asks_on_a_terminal(invoke, store, monkeypatch):
    add_model(store, "small")
    monkeypatch.setattr("bough.cli.terminal.screen.is_interactive", lambda: True)

    result = invoke("rm", "small", piped="n\n")

    assert "delete small" in result.stderr
    assert result.exit_code == 1
    assert store.find("small") is not None


def test_pull_tells_its_work_in_lines_where_there_is_no_terminal(invoke, store, monkeypatch):
    def pull(name: str, settings, gguf, progress, announce) -> ModelFiles:
        progress.start("weights", 2_000_000)
        progress.advance(2_000_000)
        progress.finish()
        return add_model(store, name)

    monkeypatch.setattr("bough.models.pull", pull)

    result = invoke("pull", "small")

    assert result.stderr == "weights (2.0 MB)\n"
    assert result.stdout.startswith("small is here")


def test_pull_of_what_is_there_says_so(invoke, store, monkeypatch):
    model = add_model(store, "small")
    monkeypatch.setattr("bough.models.pull", lambda name, settings, gguf, progress, announce: model)

    assert invoke("pull", "small").stdout.startswith("small was here already")


def test_pull_lists_the_short_names_with_sizes_licences_and_whether_they_fit(invoke, monkeypatch):
    monkeypatch.setattr("bough.cli.models.read_host_memory", lambda: HostMemory(8 * 10**9, 8 * 10**9))
    monkeypatch.setattr("bough.runtime.loading.load_kernels", lambda: "kernels")
    monkeypatch.setenv("BOUGH_DEVICE", "cpu")
    lines = [line.split() for line in invoke("pull", "--list").stdout.splitlines()]
    facts = json.loads(invoke("pull", "--list", "--json").stdout)

    assert lines[0] == ["NAME", "PARAMETERS", "DOWNLOAD", "WEIGHTS", "MEMORY", "FITS", "LICENCE", "FROM"]
    usual = "qwen3:4b, qwen3 4.0B 2.5 GB Q4_K_M 3.6 GB yes apache-2.0 Qwen/Qwen3-4B-GGUF"
    large = "qwen3:8b 8.2B 5.0 GB Q4_K_M 6.8 GB just apache-2.0 Qwen/Qwen3-8B-GGUF"
    assert usual.split() in lines and large.split() in lines
    assert len(facts) == len(lines) - 1
    assert {"qwen3", "qwen3:4b"} == set(next(each["names"] for each in facts if each["name"] == "qwen3:4b"))


@pytest.mark.parametrize(
    ("num_bytes", "words", "is_terminal", "is_asked"),
    [
        (3 * 10**9, [], True, True),
        (3 * 10**9, ["-y"], True, False),
        (3 * 10**9, [], False, False),
        (10**9, [], True, False),
    ],
)
def test_pull_tells_its_plan_and_asks_before_a_large_one(
    invoke, store, monkeypatch, num_bytes, words, is_terminal, is_asked
):
    def pull(name: str, settings, gguf, progress, announce) -> ModelFiles:
        announce(PullPlan(name, "org/small", "mit", num_bytes, 10**12))
        return add_model(store, name)

    monkeypatch.setattr("bough.models.pull", pull)
    for place in ("bough.cli.models", "bough.cli.terminal.screen"):
        monkeypatch.setattr(f"{place}.is_interactive", lambda: is_terminal)

    result = invoke("pull", "small", *words, piped="n\n")

    assert f"small from org/small: {num_bytes // 10**9}.0 GB; licence mit; 1.0 TB free on the disk" in result.stderr
    assert ("fetch 3.0 GB?" in result.stderr) == is_asked
    assert result.exit_code == (1 if is_asked else 0)
    assert (store.find("small") is None) == is_asked


def test_pull_as_json_has_the_plan_and_the_model(invoke, store, monkeypatch):
    def pull(name: str, settings, gguf, progress, announce) -> ModelFiles:
        announce(PullPlan(name, "org/small", "mit", 5, 10**12))
        return add_model(store, name)

    monkeypatch.setattr("bough.models.pull", pull)

    found = json.loads(invoke("pull", "small", "--json").stdout)

    assert (found["name"], found["is_new"], found["plan"]["license"]) == ("small:latest", True, "mit")


def test_pull_without_a_name_is_wrong_usage(invoke):
    assert invoke("pull").exit_code == 2


def test_pull_of_an_unknown_name_says_what_exists(invoke):
    result = invoke("pull", "nonsense")

    assert result.exit_code == 1
    assert "smollm2" in result.stderr


def test_a_failed_download_is_one_line(invoke, monkeypatch):
    def pull(name, settings, gguf, progress, announce):
        raise DownloadError("is there a network?")

    monkeypatch.setattr("bough.models.pull", pull)

    assert invoke("pull", "smollm2").stderr == "error: is there a network?\n"


def test_show_tells_the_model_and_the_verdict(invoke, home, monkeypatch):
    folder = make_folder("qwen3", home / "tiny")
    byte_level().save_pretrained(folder)
    wanted = []

    def make_engine(files, settings, progress):
        wanted.append(settings.engine)
        return FakeEngine(MODELS["full+recurrent"])

    monkeypatch.setattr("bough.cli.models.make_engine", make_engine)

    lines = [" ".join(line.split()) for line in invoke("show", str(folder), "--engine", "mlx").stdout.splitlines()]

    assert wanted == ["mlx"]
    assert "engine fake" in lines
    assert "architecture Qwen3ForCausalLM" in lines
    assert "chat template yes" in lines
    assert "capabilities completion, chat" in lines
    assert "chunking yes" in lines and "reuse yes" in lines
    assert "0 full 8 bytes a token" in lines
    assert "1 recurrent 64 bytes a state" in lines


def test_show_tells_how_weights_are_kept_what_computes_and_what_would_be_faster(invoke, home, monkeypatch):
    def fail() -> None:
        raise KernelsMissing("there was no C compiler", "install gcc")

    monkeypatch.setattr("bough.engines.torch.cpu.route.load_kernels", fail)
    monkeypatch.setattr("bough.runtime.loading.load_kernels", fail)
    folder = make_folder("llama", home / "tiny")
    byte_level().save_pretrained(folder)

    result = invoke("show", str(folder), "--engine", "torch", "--device", "cpu", env={"COLUMNS": "300"})
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]

    assert "weights float32 (there are no kernels for this CPU: there was no C compiler)" in lines
    assert "step transformers' modules in torch" in lines
    assert lines[lines.index("transformers " + version("transformers")) + 1].startswith(
        "advice tiny runs in float32 without kernels for this CPU, several"
    )


def test_packed_weights_where_there_can_be_none_are_an_error(invoke, home):
    folder = make_folder("llama", home / "tiny")
    byte_level().save_pretrained(folder)

    result = invoke(
        "show", str(folder), "--engine", "torch", "--device", "cpu", "--dtype", "bfloat16", "--weights", "packed"
    )

    assert result.exit_code == 1
    assert result.stderr.endswith("error: weights is 'packed', which needs the CPU and float32: this is cpu in bfloat16\n")


def test_show_as_json_without_the_check_loads_no_engine(invoke, home, monkeypatch):
    monkeypatch.setattr("bough.cli.models.make_engine", lambda *args: 1 / 0)
    folder = make_folder("qwen3", home / "tiny")

    found = json.loads(invoke("show", str(folder), "--json", "--no-check").stdout)

    assert found["architecture"] == "Qwen3ForCausalLM"
    assert "engine" not in found


def test_show_of_an_unknown_model_fetches_nothing(invoke):
    result = invoke("show", "smollm2")

    assert result.exit_code == 1
    assert "there are no local models yet" in result.stderr
