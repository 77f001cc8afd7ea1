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
KERNELS = Path(library.__file__).with_name("kernels.c")
ARM_COMPILER, ARM_EMULATOR, ARM_FOLDER = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"


def build_program(compiler: str, folder: Path) -> Path:
    """Compile the program that compares, with the structs that the kernels have."""
    structs = re.findall(r"typedef struct \{[^}]*\} (?:Matrix|Layer|Model|Rows|Batch);", KERNELS.read_text())
    (folder / "structs.h").write_text("\n".join(structs))
    program = folder / "kernels_test"
    flags = ["-O2", "-std=gnu11", f"-I{folder}", str(SOURCE), "-ldl", "-lm", "-o", str(program)]
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

    compare(program, KERNELS.with_name("_kernels.so"), isa)


@pytest.mark.slow
def test_the_kernels_compute_the_same_on_arm(setup_file, tmp_path, monkeypatch):
    if not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)):
        pytest.skip(f"this needs {ARM_COMPILER} and {ARM_EMULATOR}")
    monkeypatch.setenv("CC", ARM_COMPILER)
    setup_file.build_library(KERNELS, tmp_path / "_kernels.so")
    program = build_program(ARM_COMPILER, tmp_path)

    for isa in ("neon", "plain"):
        compare(ARM_EMULATOR, "-L", ARM_FOLDER, program, tmp_path / "_kernels.so", isa)
