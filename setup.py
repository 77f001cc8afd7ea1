"""Builds the CPU kernels: C in one folder, compiled once for each instruction set, linked into one shared library.

All else about the package is in pyproject.toml. The library knows nothing of Python: `bough/engines/torch/cpu/library.py`
loads it by ctypes, so one library serves every version of Python. An installation never fails because of it: what could not
be built is written to `_kernels.txt` beside it, and `bough doctor` tells it.

- `CC` names the compiler; without it cc, gcc and clang are looked for. `CFLAGS` is not read: results depend on flags.
- `BOUGH_NO_KERNELS=1` builds no library, and makes a wheel for any platform.
- `BOUGH_KERNELS_ISA=plain,v3` builds for these instruction sets only; plain is always there.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

MODULE = "bough.engines.torch.cpu._kernels"
SOURCE = "bough/engines/torch/cpu/kernels/kernels.c"
NOTES = "_kernels.txt"
CFLAGS = [
    *("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),  # never -ffast-math: sums have one order
]
LFLAGS = ["-shared", "-pthread", "-lm"]
PLAIN = ["-O1"]  # it runs where nothing better does: quickly compiled
V3 = ["-mavx2", "-mfma", "-mf16c"]  # what `bough_can_run` asks the machine for, and no more
V4 = [*V3, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
ISAS: dict[str, dict[str, list[str]]] = {
    "x86_64": {"plain": PLAIN, "v3": V3, "avxvnni": [*V3, "-mavxvnni"], "avx512": V4, "vnni": [*V4, "-mavx512vnni"]},
    "aarch64": {"plain": PLAIN, "neon": []},
}  # the flags of each instruction set, for each type of machine; others have plain alone
OTHER_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


class BuildError(Exception):
    """Something cannot be compiled or linked."""


def build_library(source: Path, library: Path) -> None:
    """Compile and link the kernels. What could not be built is noted beside the library; no older library stays."""
    library.parent.mkdir(parents=True, exist_ok=True)
    notes = library.with_name(NOTES)
    notes.unlink(missing_ok=True)
    try:
        left_out = _compile_and_link(source, library)
    except BuildError as error:
        library.unlink(missing_ok=True)
        left_out = [str(error)]
    if left_out:
        notes.write_text("\n".join(left_out) + "\n", encoding="utf-8")


def _compile_and_link(source: Path, library: Path) -> list[str]:
    """Build the library; the result tells which instruction sets it lacks, and why."""
    if os.environ.get("BOUGH_NO_KERNELS"):
        raise BuildError("BOUGH_NO_KERNELS was set when Bough was built")
    compiler = find_compiler()
    isas = find_isas(compiler)
    wanted = choose_isas(isas)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
        objects = {isa: Path(folder) / f"{isa}.o" for isa in wanted}
        results = {isa: threads.submit(compile_one, compiler, source, isa, isas[isa], objects[isa]) for isa in wanted}
        problems = {isa: result.exception() for isa, result in results.items()}
        if problems["plain"]:
            raise problems["plain"]
        _link(compiler, [objects[isa] for isa in wanted if problems[isa] is None], library)
    missing = {isa: problems.get(isa, "left out by BOUGH_KERNELS_ISA") for isa in isas}
    return [f"{isa}: {why}" for isa, why in missing.items() if why]


def _link(compiler: list[str], objects: list[Path], library: Path) -> None:
    """Link the library and put it into its place at once: a process that has an older one loaded keeps that."""
    unfinished = library.with_suffix(".new")
    run_compiler([*compiler, *map(str, objects), *LFLAGS, "-o", str(unfinished)])
    unfinished.replace(library)


def find_compiler() -> list[str]:
    """The words that begin each command: a C compiler, perhaps with flags that the user gave with its name."""
    if given := shlex.split(os.environ.get("CC", "")):
        if not shutil.which(given[0]):
            raise BuildError(f"there was no C compiler {given[0]} (CC) when Bough was built")
        return given
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise BuildError("there was no C compiler (cc, gcc or clang) when Bough was built")


def find_isas(compiler: list[str]) -> dict[str, list[str]]:
    """The flags of each instruction set that the compiler's target has. A cross compiler has another than this machine."""
    target = run_compiler([*compiler, "-dumpmachine"]).split("-")[0].strip().lower()
    return ISAS.get(OTHER_NAMES.get(target, target), {"plain": PLAIN})


def choose_isas(isas: dict[str, list[str]]) -> list[str]:
    """Those that the user wants, and plain: all, or what BOUGH_KERNELS_ISA lists."""
    wanted = {each.strip() for each in os.environ.get("BOUGH_KERNELS_ISA", "").split(",")} - {""}
    known = {isa for each in ISAS.values() for isa in each}
    if wanted - known:
        names = ", ".join(sorted(wanted - known))
        raise SystemExit(f"BOUGH_KERNELS_ISA names {names}, and may name {', '.join(sorted(known))}")
    return [isa for isa in isas if not wanted or isa in wanted or isa == "plain"]


def compile_one(compiler: list[str], source: Path, isa: str, flags: list[str], result: Path) -> None:
    """Compile the source for one instruction set. All its names begin with that of the set."""
    defines = [f"-DISA={isa}", *(["-DISA_PLAIN_OBJECT"] if isa == "plain" else [])]
    run_compiler([*compiler, *CFLAGS, *flags, *defines, "-c", str(source), "-o", str(result)])


def run_compiler(command: list[str]) -> str:
    """Run a compiler and give its output. A failure becomes one line: the first in which it speaks of an error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = [*done.stderr.splitlines(), f"{command[0]} ended with {done.returncode}"]
        raise BuildError(next((line for line in lines if "error" in line), lines[-1]).strip())
    return done.stdout


class BuildKernels(build_ext):
    """Builds the library in place of a Python extension: its name has no version of Python, and it may be missing."""

    def run(self) -> None:
        library = Path(self.get_ext_fullpath(MODULE))
        build_library(Path(SOURCE), library)
        if not library.exists():
            self.warn(f"no CPU kernels: {library.with_name(NOTES).read_text(encoding='utf-8').strip()}")

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_outputs(self) -> list[str]:
        library = Path(self.get_ext_fullpath(MODULE))
        return [str(each) for each in (library, library.with_name(NOTES)) if each.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # in an editable installation the library is built into the source folder itself


class TagWheel(bdist_wheel):
    """Names the wheel for its platform and for every Python 3; without kernels, for any platform."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = bool(os.environ.get("BOUGH_NO_KERNELS"))

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()[2]
        return "py3", "none", tag.replace("universal2", platform.machine())  # kernels are for one type of machine


if __name__ == "__main__":
    setup(
        ext_modules=[Extension(MODULE, [SOURCE], optional=True)],
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": TagWheel},
    )
