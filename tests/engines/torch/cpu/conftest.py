"""setup.py as a module, and a small C file in place of the kernels, which compiles at once."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bough.engines.torch.cpu.library import ABI, Kernels, load_kernels
from bough.errors import KernelsMissing

ROOT = Path(__file__).parents[4]
STAND_IN = """
#define JOIN_(a, b, c) a##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define FN(name) JOIN(bough_, ISA, name)
#define EXPORT __attribute__((visibility("default")))
EXPORT int FN(abi)(void) { return %d; }
EXPORT void FN(linear)(void) {}
EXPORT void FN(unpack)(void) {}
EXPORT void FN(gather)(void) {}
EXPORT void FN(linear_floats)(void) {}
EXPORT void FN(pack)(void) {}
EXPORT void FN(panels_bytes)(void) {}
EXPORT void FN(step_floats)(void) {}
EXPORT void FN(share_threads)(void) {}
EXPORT void FN(step)(void) {}
#ifdef ISA_PLAIN_OBJECT
EXPORT int bough_can_run(const char *isa) { return isa[0] != 'n'; } /* not NEON */
#endif
"""


def has_compiler() -> bool:
    return any(map(shutil.which, ("cc", "gcc", "clang")))


@pytest.fixture
def setup_file(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The functions of setup.py, with no variable set that changes what they build."""
    pytest.importorskip("setuptools")
    for name in ("CC", "BOUGH_NO_KERNELS", "BOUGH_KERNELS_ISA"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("bough_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A source that says that the machine has all that x86 has, and has the functions without doing anything."""
    if not has_compiler():
        pytest.skip("there is no C compiler")
    file = tmp_path / "kernels.c"
    file.write_text(STAND_IN % ABI)
    return file


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The best kernels of this machine. Without a compiler a test is skipped; with one they must be there."""
    try:
        return load_kernels()
    except KernelsMissing as missing:
        if has_compiler():
            raise
        pytest.skip(str(missing))


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)
