"""Finding and loading the library of kernels; the library that was installed, or one of a stand-in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bough.engines.torch.cpu.library import ABI, ISAS, explain_missing_isa, find_isas, load_kernels
from bough.errors import KernelsMissing
from tests.engines.torch.cpu.conftest import STAND_IN


@pytest.fixture
def library(setup_file, stand_in, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that has plain kernels only, for a machine that says that it could run better ones."""
    monkeypatch.setenv("BOUGH_KERNELS_ISA", "plain")
    setup_file.build_library(stand_in, tmp_path / "_kernels.so")
    return tmp_path / "_kernels.so"


def test_the_best_kernels_that_the_library_has_are_taken(library):
    assert find_isas(library) == ["plain"]
    assert load_kernels(path=library).title == "plain C"


def test_a_better_instruction_set_of_the_machine_is_told_with_the_reason(library):
    why = explain_missing_isa(library)

    assert why.startswith("AVX512-VNNI is missing: ")


def test_the_installed_library_has_all_functions_for_each_instruction_set_of_this_machine():
    try:
        isas = find_isas()
    except KernelsMissing as missing:
        pytest.skip(str(missing))

    assert [load_kernels(isa).isa for isa in isas] == [isa for isa in ISAS if isa in isas]
    assert load_kernels().isa == isas[0]


def test_kernels_that_the_library_does_not_have_are_refused(library):
    with pytest.raises(KernelsMissing, match="no kernels for v3, only for plain"):
        load_kernels("v3", library)


def test_a_missing_library_is_told_with_what_the_build_noted(tmp_path):
    (tmp_path / "_kernels.txt").write_text("there was no C compiler\n")

    with pytest.raises(KernelsMissing, match=r"^there was no C compiler; with a C compiler .*pip install") as caught:
        load_kernels(path=tmp_path / "_kernels.so")
    assert caught.value.reason == "there was no C compiler"


def test_a_library_that_cannot_be_loaded_is_told(tmp_path):
    (tmp_path / "_kernels.so").write_bytes(b"no library")

    with pytest.raises(KernelsMissing, match=r"_kernels.so cannot be used: .*build it again"):
        load_kernels(path=tmp_path / "_kernels.so")


def test_a_library_of_another_version_is_refused_before_it_is_called(setup_file, stand_in, tmp_path):
    stand_in.write_text(STAND_IN % (ABI + 1))
    setup_file.build_library(stand_in, tmp_path / "other.so")

    with pytest.raises(KernelsMissing, match=f"has version {ABI + 1} of the kernels, and this Bough needs {ABI}; build it"):
        find_isas(tmp_path / "other.so")


def test_the_library_is_found_without_importing_torch():
    code = "import sys, bough.engines.torch.cpu.library; assert 'torch' not in sys.modules, 'torch was imported'"

    subprocess.run([sys.executable, "-c", code], check=True)
