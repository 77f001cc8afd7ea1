"""Settings: flags before variables before the file before the defaults."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bough.config import Settings, find_given, find_package_index, load_settings, parse_bytes, parse_seconds
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


def test_the_package_index_is_that_of_pip_or_else_pypi() -> None:
    assert find_package_index({"PIP_INDEX_URL": "http://a"}) == "http://a"
    assert find_package_index({}) == "https://pypi.org/simple"


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("2GB", 2 << 30), ("1.5 gib", 3 << 29), ("10M", 10 << 20), ("4k", 4096)]
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("90m", 5400), ("12h", 43_200), ("7d", 604_800), (" 1.5 H ", 5400), ("45", 45), (2, 2)],
)
def test_times_are_read_with_their_units(text: str | int, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("name", ["device_memory", "host_memory", "disk"])
def test_a_place_is_sized_by_the_machine_unless_a_size_is_given_and_zero_is_a_size(name: str, tmp_path: Path) -> None:
    file = tmp_path / "bough.toml"
    file.write_text(f'{name} = "2GB"')

    assert getattr(Settings(), name) is None
    assert getattr(load_settings({}, {}, file), name) == 2 << 30
    assert getattr(load_settings({}, {f"BOUGH_{name.upper()}": "auto"}, file), name) is None
    assert getattr(load_settings({name: "0"}, {f"BOUGH_{name.upper()}": "auto"}, file), name) == 0
    assert getattr(load_settings({name: 0}, {}, file), name) == 0


@pytest.mark.parametrize("word", ["auto", "never", "Never"])
def test_what_is_on_disk_stays_for_ever_unless_a_time_is_given(word: str, tmp_path: Path) -> None:
    file = tmp_path / "bough.toml"
    file.write_text('disk_ttl = "7d"')

    assert Settings().disk_ttl is None
    assert load_settings({}, {}, file).disk_ttl == 604_800
    assert load_settings({}, {"BOUGH_DISK_TTL": "12h"}, file).disk_ttl == 43_200
    assert load_settings({"disk_ttl": word}, {}, file).disk_ttl is None


def test_the_reserve_of_the_disk_and_the_share_of_a_salt_are_read(file: Path) -> None:
    found = load_settings({"salt_share": "0.25"}, {"BOUGH_DISK_FREE": "10GB"}, file)

    assert (found.salt_share, found.disk_free) == (0.25, 10 << 30)
    assert (Settings().salt_share, Settings().disk_free) == (1.0, 2 << 30)


def test_the_trees_on_disk_lie_in_the_cache_folder(tmp_path: Path) -> None:
    assert Settings(cache_folder=tmp_path).trees_folder == tmp_path / "trees"


@pytest.mark.parametrize("engine", ["auto", "torch", "mlx"])
def test_the_engine_is_one_of_three(engine: str, file: Path) -> None:
    assert load_settings({}, {"BOUGH_ENGINE": engine}, file).engine == engine
    assert load_settings({"engine": engine}, {"BOUGH_ENGINE": "torch"}, file).engine == engine


@pytest.mark.parametrize(
    "overrides",
    [
        {"lanes": -1},
        {"threads": -1},
        {"engine": "abacus"},
        {"nonsense": 1},
        {"device_memory": "much"},
        {"device_memory": "5gbb"},
        {"device_memory": "infGB"},
        {"device_memory": 1.5},
        {"device_memory": "never"},
        {"host_memory": -1},
        {"disk": "-2GB"},
        {"disk_free": -1},
        {"disk_free": "auto"},
        {"disk_ttl": 0},
        {"disk_ttl": "-7d"},
        {"disk_ttl": "7w"},
        {"disk_ttl": "inf"},
        {"disk_ttl": "nan"},
        {"salt_share": 0},
        {"salt_share": 1.01},
        {"salt_share": "nan"},
        {"salt_share": "half"},
        {"lanes": 2.5},
        {"port": -1},
        {"port": 65_536},
        {"queue": -1},
        {"max_models": "auto"},
        {"keep_alive": "nan"},
        {"keep_alive": "auto"},
        {"request_timeout": 0},
        {"stop_after": -1},
        {"verify_cache": 1.5},
        {"verify_cache": "nan"},
        {"rate_limit": -1},
        {"max_body": "much"},
    ],
)
def test_wrong_settings_are_refused_by_name(overrides: dict[str, object], file: Path) -> None:
    with pytest.raises(SettingsError, match=next(iter(overrides))):
        load_settings(overrides, {}, file)


def test_a_refusal_says_the_value_and_what_it_may_be(file: Path) -> None:
    with pytest.raises(SettingsError, match=r"salt_share is 1\.5, and must be above 0 and at most 1"):
        load_settings({"salt_share": 1.5}, {}, file)
    with pytest.raises(SettingsError, match=r"disk is 'much', and must be a size such as 2GB or auto"):
        load_settings({"disk": "much"}, {}, file)
    with pytest.raises(SettingsError, match=r"disk_ttl is '7w', and must be a time such as 7d or auto or never"):
        load_settings({"disk_ttl": "7w"}, {}, file)


def test_a_variable_that_names_no_setting_is_refused(file: Path) -> None:
    with pytest.raises(SettingsError, match=r"^unknown setting BOUGH_LANE; did you mean BOUGH_LANES\?$"):
        load_settings({}, {"BOUGH_LANE": "8"}, file)


@pytest.mark.parametrize(
    "line", ["trust_remote_code = true", 'host = "0.0.0.0"', 'origins = "*"', 'allowed_hosts = ["evil.example"]']
)
def test_a_file_in_the_working_folder_cannot_make_us_run_code_or_open_the_machine(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bough.toml").write_text(line)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=line.split()[0]):
        load_settings({}, {})


@pytest.mark.parametrize("value", ["never", "-1", -1, "-5m", "inf"])
def test_a_model_can_be_kept_alive_for_ever(value: str | int, file: Path) -> None:
    assert load_settings({"keep_alive": value}, {}, file).keep_alive is None


def test_a_model_is_kept_alive_for_five_minutes_unless_told_otherwise(file: Path) -> None:
    assert load_settings({}, {}, file).keep_alive == 300
    assert load_settings({"keep_alive": "0"}, {}, file).keep_alive == 0
    assert load_settings({}, {"BOUGH_KEEP_ALIVE": "2h"}, file).keep_alive == 7200


def test_a_request_takes_as_long_as_it_takes_unless_a_time_is_given(file: Path) -> None:
    assert load_settings({"request_timeout": "never"}, {}, file).request_timeout is None
    assert load_settings({"request_timeout": "10m"}, {}, file).request_timeout == 600


def test_a_file_of_keys_is_a_path_or_none(file: Path) -> None:
    assert load_settings({"keys_file": "~/keys"}, {}, file).keys_file == Path("~/keys").expanduser()
    assert load_settings({}, {"BOUGH_KEYS_FILE": ""}, file).keys_file is None
    assert load_settings({"keys_file": "none"}, {"BOUGH_KEYS_FILE": "keys"}, file).keys_file is None


def test_a_list_in_the_file_is_read_as_text_with_commas(tmp_path: Path) -> None:
    file = tmp_path / "bough.toml"
    file.write_text('origins = ["http://a", "http://b"]')

    assert load_settings({}, {}, file).origins == "http://a,http://b"


def test_keys_are_not_shown_with_the_settings() -> None:
    assert "hidden" not in repr(Settings(api_key="hidden"))


def test_words_for_yes_and_no_are_read(file: Path) -> None:
    assert load_settings({}, {"BOUGH_CACHE": "off"}, file).cache is False
    with pytest.raises(SettingsError, match=r"^BOUGH_CACHE is 'perhaps', and must be true or false$"):
        load_settings({}, {"BOUGH_CACHE": "perhaps"}, file)


def test_a_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "bough.toml"
    broken.write_text("lanes = = 2")
    with pytest.raises(SettingsError, match=r"bough\.toml"):
        load_settings({}, {}, broken)


def test_the_defaults_are_sound() -> None:
    assert (Settings().lanes, Settings().host, Settings().port) == (0, "127.0.0.1", 11435)


@pytest.mark.parametrize("each", dataclasses.fields(Settings), ids=lambda each: each.name)
def test_every_setting_has_a_sentence_for_the_reference(each: dataclasses.Field[object]) -> None:
    assert each.metadata["help"].endswith(".")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("keep_alive", "5x", "is '5x', and must be a time such as 7d or never"),
        ("queue", "-1", "is -1, and must be at least 0"),
        ("engine", "abacus", "is 'abacus', and must be auto, torch or mlx"),
        ("weights", "q3", "is 'q3', and must be auto, packed, float32, q8_0 or q4_0"),
    ],
)
def test_an_error_names_a_setting_in_the_words_that_were_typed(name, value, problem, tmp_path):
    file, empty = tmp_path / "bough.toml", tmp_path / "empty.toml"
    file.write_text(f"{name} = {value!r}")
    empty.write_text("")
    flag, variable = f"--{name.replace('_', '-')}", f"BOUGH_{name.upper()}"
    ways = {
        flag: lambda: load_settings({name: value}, {}, empty, are_flags=True),
        name: lambda: load_settings({name: value}, {}, empty),
        variable: lambda: load_settings({}, {variable: value}, empty),
        f"{name} in {file}": lambda: load_settings({}, {}, file),
    }

    for words, load in ways.items():
        with pytest.raises(SettingsError) as raised:
            load()
        assert str(raised.value) == f"{words} {problem}"


def test_a_misspelt_setting_in_the_file_suggests_the_nearest(tmp_path):
    file = tmp_path / "bough.toml"
    file.write_text("keepalive = 5")

    with pytest.raises(SettingsError) as raised:
        load_settings({}, {}, file)
    assert str(raised.value) == f"unknown setting keepalive in {file}; did you mean keep_alive?"


def test_a_name_that_is_like_no_setting_gets_them_all(file):
    with pytest.raises(SettingsError, match="unknown setting BOUGH_XYZZY; there are model, engine, "):
        load_settings({}, {"BOUGH_XYZZY": "1"}, file)


def test_variables_for_building_the_kernels_are_no_settings():
    assert load_settings(environ={"BOUGH_NO_KERNELS": "1", "BOUGH_KERNELS_ISA": "plain"}) == Settings()


def test_what_was_given_tells_where_it_came_from(file):
    found = find_given({"lanes": 7}, {"BOUGH_DISK": "1GB"}, file, are_flags=True)

    assert {name: (each.source, each.words) for name, each in found.items()} == {
        "lanes": ("flag", "--lanes"),
        "disk": ("variable", "BOUGH_DISK"),
        "threads": ("file", f"threads in {file}"),
        "dtype": ("file", f"dtype in {file}"),
    }
