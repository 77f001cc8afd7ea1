"""Layouts that are kept from one load to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.config import Settings
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.self_check import probe as probing
from bough.engines.torch.self_check.probe import find_layout, probe
from tests.tiny_models import CONFIGS, make_model


def kept_files(folder: Path) -> list[Path]:
    return sorted((folder / "layouts").glob("*")) if (folder / "layouts").is_dir() else []


@pytest.mark.parametrize("name", CONFIGS)
def test_a_kept_layout_is_the_one_that_was_probed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, forward = Settings(cache_folder=tmp_path), TorchForward(make_model(name))
    probed = find_layout(settings, "key", forward)
    if kept_files(tmp_path):
        monkeypatch.setattr(probing, "probe", None)  # it must not be called again

    assert find_layout(settings, "key", forward) == probed == probe(forward)
    assert bool(kept_files(tmp_path)) == bool(probed.groups and not probed.states and not probed.empty)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0}', '{"format": 1, "groups": [{"kind": "full"}]}'])
def test_a_damaged_or_old_file_is_probed_again_and_replaced(text: str, tmp_path: Path) -> None:
    settings, forward = Settings(cache_folder=tmp_path), TorchForward(make_model("llama"))
    probed = find_layout(settings, "key", forward)
    (file,) = kept_files(tmp_path)
    good = file.read_text()
    file.write_text(text)

    assert find_layout(settings, "key", forward) == probed
    assert file.read_text() == good


def test_another_key_has_a_layout_of_its_own(tmp_path: Path) -> None:
    settings = Settings(cache_folder=tmp_path)
    small = find_layout(settings, "one", TorchForward(make_model("llama")))

    large = find_layout(settings, "two", TorchForward(make_model("llama", num_hidden_layers=5)))

    assert (large.num_layers, small == large) == (5, False)
