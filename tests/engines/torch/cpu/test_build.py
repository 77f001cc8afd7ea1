"""What setup.py builds, for each compiler that it may find."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return tmp_path / "cpu" / "_kernels.so"


def has(library: Path, isa: str) -> bool:
    return hasattr(ctypes.CDLL(str(library)), f"bough_{isa}_abi")


def notes(library: Path) -> str:
    file = library.with_name("_kernels.txt")
    return file.read_text() if file.exists() else ""


def use_old_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make CC a compiler for x86-64 that does not know AVX512."""
    file = folder / "old-cc"
    refusal = '*avx512f*) echo "old-cc: error: unknown option -mavx512f" >&2; exit 1;;'
    target = "*dumpmachine*) echo x86_64-linux-gnu; exit;;"
    file.write_text(f'#!/bin/sh\ncase "$*" in {refusal} {target} esac\nexec cc "$@"\n')
    file.chmod(0o755)
    monkeypatch.setenv("CC", str(file))


def test_all_instruction_sets_of_the_target_are_in_one_library(setup_file, stand_in, library):
    setup_file.build_library(stand_in, library)

    isas = setup_file.find_isas(setup_file.find_compiler())
    assert "plain" in isas and all(has(library, isa) for isa in isas)
    assert notes(library) == ""


def test_no_compiler_is_noted_and_nothing_of_an_older_library_stays(setup_file, stand_in, library, monkeypatch):
    setup_file.build_library(stand_in, library)
    monkeypatch.setenv("PATH", "")

    setup_file.build_library(stand_in, library)

    assert not library.exists()
    assert notes(library) == "there was no C compiler (cc, gcc or clang) when Bough was built\n"


def test_a_compiler_that_is_not_there_is_named(setup_file, stand_in, library, monkeypatch):
    monkeypatch.setenv("CC", "nocc -m64")

    setup_file.build_library(stand_in, library)

    assert "no C compiler nocc (CC)" in notes(library)


def test_a_source_that_does_not_compile_is_noted_with_the_compilers_error(setup_file, stand_in, library):
    stand_in.write_text("int main(void) { return x; }")

    setup_file.build_library(stand_in, library)

    assert not library.exists()
    assert "error" in notes(library) and "x" in notes(library)


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(
    setup_file, stand_in, library, tmp_path, monkeypatch
):
    use_old_compiler(tmp_path, monkeypatch)
    monkeypatch.setitem(setup_file.ISAS, "x86_64", {"plain": [], "v3": [], "avx512": ["-mavx512f"]})

    setup_file.build_library(stand_in, library)

    assert has(library, "plain") and has(library, "v3") and not has(library, "avx512")
    assert notes(library) == "avx512: old-cc: error: unknown option -mavx512f\n"


def test_the_user_may_choose_instruction_sets(setup_file, stand_in, library, monkeypatch):
    monkeypatch.setenv("BOUGH_KERNELS_ISA", "plain")

    setup_file.build_library(stand_in, library)

    assert has(library, "plain") and not has(library, "v3") and not has(library, "neon")
    assert all(line.endswith(": left out by BOUGH_KERNELS_ISA") for line in notes(library).splitlines())


def test_an_unknown_instruction_set_ends_the_build(setup_file, stand_in, library, monkeypatch):
    monkeypatch.setenv("BOUGH_KERNELS_ISA", "plain,avx9")

    with pytest.raises(SystemExit, match=r"names avx9, and may name avx512, avxvnni, neon, plain, v3, vnni"):
        setup_file.build_library(stand_in, library)


def test_the_user_may_want_no_kernels(setup_file, stand_in, library, monkeypatch):
    monkeypatch.setenv("BOUGH_NO_KERNELS", "1")

    setup_file.build_library(stand_in, library)

    assert [each.name for each in library.parent.iterdir()] == ["_kernels.txt"]
    assert "BOUGH_NO_KERNELS" in notes(library)
