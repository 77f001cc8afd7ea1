"""The kernels against scalar code in double precision: a C program, which also runs for another machine in an emulator."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bough.engines.torch.cpu import library
from bough.errors import KernelsMissing

SOURCE = Path(__file__).with_name("kernels_test.c")
KERNELS = Path(library.__file__).with_name("kernels") / "kernels.c"
ARM_COMPILER, ARM_EMULATOR, ARM_FOLDER = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"


def build_program(compiler: str, folder: Path, *more_flags: str) -> Path:
    """Compile the program that compares, with the structs that the kernels have."""
    sources = "".join(KERNELS.with_name(name).read_text() for name in ("types.h", "model.h"))
    structs = re.findall(r"typedef struct \{[^}]*\} (?:Matrix|Layer|Model|Rows|Batch);", sources)
    (folder / "structs.h").write_text("\n".join(structs))
    program = folder / "kernels_test"
    flags = [*more_flags, "-O2", "-std=gnu11", f"-I{folder}", str(SOURCE), "-ldl", "-lm", "-o", str(program)]
    subprocess.run([compiler, *flags], check=True)
    return program


def compare(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all is right\n"), done.stdout + done.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    return build_program(compiler, tmp_path_factory.mktemp("program"))


@pytest.mark.parametrize("isa", library.ISAS)
def test_the_kernels_compute_what_the_definition_says(isa, program):
    try:
        library.load_kernels(isa)
    except KernelsMissing as missing:
        pytest.skip(str(missing))

    compare(program, library.LIBRARY, isa)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_use_no_memory_but_what_they_are_given(setup_file, tmp_path, monkeypatch):
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("this needs gcc")
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-sanitize=alignment")
    monkeypatch.setenv("CC", " ".join([compiler, *flags]))
    monkeypatch.setenv("BOUGH_KERNELS_ISA", "plain,v3,vnni")
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")  # the program gives nothing back
    setup_file.build_library(KERNELS, tmp_path / "_kernels.so")
    program = build_program(compiler, tmp_path, *flags)

    for isa in set(library.find_isas()) & {"plain", "v3", "vnni"}:
        compare(program, tmp_path / "_kernels.so", isa)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_compute_the_same_on_arm(setup_file, tmp_path, monkeypatch):
    if not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)):
        pytest.skip(f"this needs {ARM_COMPILER} and {ARM_EMULATOR}")
    monkeypatch.setenv("CC", ARM_COMPILER)
    setup_file.build_library(KERNELS, tmp_path / "_kernels.so")
    program = build_program(ARM_COMPILER, tmp_path)

    for isa in ("neon", "plain"):
        compare(ARM_EMULATOR, "-L", ARM_FOLDER, program, tmp_path / "_kernels.so", isa)
