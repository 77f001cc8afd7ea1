"""Settings: flags before variables before the file before the defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.config import Settings, load_settings, parse_bytes
from bough.errors import SettingsError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bough.toml"
    path.write_text('lanes = 2\nthreads = 3\ndtype = "bfloat16"\n')
    return path


def test_flags_come_before_variables_before_the_file(file: Path) -> None:
    found = load_settings({"lanes": 7}, {"BOUGH_LANES": "5", "BOUGH_THREADS": "6"}, file)
    assert (found.lanes, found.threads, found.dtype) == (7, 6, "bfloat16")


def test_a_flag_that_was_not_given_leaves_the_next_source(file: Path) -> None:
    assert load_settings({"lanes": None}, {}, file).lanes == 2


def test_the_package_index_of_pip_is_used_unless_ours_is_set(file: Path) -> None:
    assert load_settings({}, {"PIP_INDEX_URL": "http://a"}, file).index_url == "http://a"
    assert load_settings({}, {"PIP_INDEX_URL": "http://a", "BOUGH_INDEX_URL": "http://b"}, file).index_url == "http://b"


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("2GB", 2 << 30), ("1.5 gib", 3 << 29), ("10M", 10 << 20), ("4k", 4096)]
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "overrides",
    [
        {"lanes": 0},
        {"threads": -1},
        {"engine": "abacus"},
        {"nonsense": 1},
        {"device_bytes": "much"},
        {"device_bytes": "5gbb"},
        {"device_bytes": "infGB"},
        {"device_bytes": 1.5},
        {"lanes": 2.5},
    ],
)
def test_wrong_settings_are_refused_by_name(overrides: dict[str, object], file: Path) -> None:
    with pytest.raises(SettingsError, match=next(iter(overrides))):
        load_settings(overrides, {}, file)


def test_a_variable_that_names_no_setting_is_refused(file: Path) -> None:
    with pytest.raises(SettingsError, match="lane"):
        load_settings({}, {"BOUGH_LANE": "8"}, file)


def test_a_file_in_the_working_folder_cannot_make_us_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bough.toml").write_text("trust_remote_code = true")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="trust_remote_code"):
        load_settings({}, {})


def test_words_for_yes_and_no_are_read(file: Path) -> None:
    assert load_settings({}, {"BOUGH_CACHE": "off"}, file).cache is False
    with pytest.raises(SettingsError, match="cache"):
        load_settings({}, {"BOUGH_CACHE": "perhaps"}, file)


def test_a_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "bough.toml"
    broken.write_text("lanes = = 2")
    with pytest.raises(SettingsError, match=r"bough\.toml"):
        load_settings({}, {}, broken)


def test_the_defaults_are_sound() -> None:
    assert Settings().lanes == 4
