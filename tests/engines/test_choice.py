"""Which engine is chosen: by the settings, the machine and what is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bough.config import Settings
from bough.engines import choice as engine_choice
from bough.engines.choice import choose_among, choose_engine, find_installed
from bough.errors import UnsupportedModel

BOTH = ("torch", "mlx")


@pytest.mark.parametrize(
    ("wanted", "installed", "on_apple_silicon", "chosen"),
    [
        ("auto", BOTH, True, "mlx"),
        ("auto", BOTH, False, "torch"),
        ("auto", ("torch",), True, "torch"),
        ("auto", ("mlx",), False, "mlx"),
        ("torch", BOTH, True, "torch"),
        ("mlx", BOTH, False, "mlx"),
    ],
)
def test_auto_takes_mlx_on_apple_silicon_and_torch_elsewhere(
    wanted: str, installed: tuple[str, ...], on_apple_silicon: bool, chosen: str
) -> None:
    assert choose_among(wanted, installed, on_apple_silicon) == chosen


def test_without_any_engine_both_ways_to_install_one_are_told() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"no engine is installed: pip install 'bough-llm\[torch\]' or .*'bough-llm\[mlx\]'"
    ):
        choose_among("auto", (), on_apple_silicon=True)


@pytest.mark.parametrize(("wanted", "other"), [BOTH, BOTH[::-1]])
def test_an_engine_that_was_asked_for_is_not_replaced_by_another(wanted: str, other: str) -> None:
    with pytest.raises(
        UnsupportedModel, match=rf"the engine {wanted} is not installed: pip install 'bough-llm\[{wanted}\]'$"
    ):
        choose_among(wanted, (other,), on_apple_silicon=False)


def test_what_is_installed_here_is_found() -> None:
    assert "torch" in find_installed()
    assert choose_engine(Settings(engine="torch")) == "torch"


def test_choosing_imports_no_engine() -> None:
    script = (
        "import sys; from bough.config import Settings; from bough.engines.choice import choose_engine;"
        "choose_engine(Settings()); print({'torch', 'mlx', 'mlx.core', 'mlx_lm', 'transformers'} & set(sys.modules))"
    )

    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)

    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
def test_a_device_that_only_torch_has_asks_for_torch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "is_apple_silicon", lambda: True)

    assert choose_engine(Settings(device=device)) == "torch"
    assert choose_engine(Settings(device=device, engine="mlx")) == "mlx"  # which refuses it, with a reason
