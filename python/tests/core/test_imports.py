"""Tests the package with only NumPy: what it imports, how fast, and its messages about the rest."""

from __future__ import annotations

import pytest

from tests.conftest import run_python

# This finder comes before all others, so that every way to import one of these fails.
BLOCK = """
import sys

class Blocked:
    names = {"torch", "transformers", "safetensors", "matplotlib", "gguf", "jinja2", "tokenizers", "vllm"}

    def find_spec(self, name, path=None, target=None):
        if path is None and name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""
# These modules need no extra.
CORE = """
import importlib, pkgutil, prefixd
core = [m.name for m in pkgutil.iter_modules(prefixd.__path__)
        if not m.ispkg and m.name != "golden"]
for name in core:
    importlib.import_module(f"prefixd.{name}")
for name in prefixd.__all__:
    getattr(prefixd, name)
assert not Blocked.names & set(sys.modules)
print(*core)
"""


def test_the_core_needs_numpy_alone() -> None:
    assert {"_core", "arrays", "programs", "session", "store"} <= set(
        run_python("-c", BLOCK + CORE).split()
    )


def test_a_store_opens_without_the_rest(tmp_path: object) -> None:
    program = f"""
import prefixd
with prefixd.open({str(tmp_path)!r}, host_tier_bytes=64 << 20) as store:
    assert store.list_prefixes().prefixes == []
"""
    run_python("-c", BLOCK + program)


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("transformers", "transformers"),
        ("train", "research"),
        ("train.__main__", "research"),
        ("evaluate.program", "research"),
        ("evaluate.compare", "models"),
        ("golden", "research"),
        ("models", "models"),
        ("vllm", "vllm"),
    ],
)
def test_what_is_missing_is_said_with_its_extra(module: str, extra: str) -> None:
    program = f"""
try:
    import prefixd.{module}
except ModuleNotFoundError as error:
    print(error)
"""
    assert f"pip install 'prefixd[{extra}]'" in run_python("-c", BLOCK + program)


def test_importing_is_quick_and_small() -> None:
    """Imports only small modules of the standard library: NumPy comes with the first store."""
    program = """
import sys, time
begin = time.process_time()
import prefixd
seconds = time.process_time() - begin
assert "numpy" not in sys.modules and "prefixd._core" not in sys.modules
resident = next(l for l in open("/proc/self/status") if l.startswith("VmRSS"))
print(seconds, int(resident.split()[1]) / 1024)
"""
    runs = [tuple(map(float, run_python("-c", program).split())) for _ in range(5)]
    assert min(seconds for seconds, _ in runs) < 0.1
    assert min(mib for _, mib in runs) < 60


def test_one_version() -> None:
    from pathlib import Path

    import prefixd

    header = Path(__file__).resolve().parents[3] / "include/prefixd/version.h"
    assert f'#define PREFIXD_VERSION "{prefixd.__version__}"' in header.read_text()


def test_a_command_without_its_program_says_so() -> None:
    """Tests a tree where the module is built in place."""
    program = """
import prefixd.programs as programs
programs.__file__ = "/nowhere/prefixd/programs.py"
try:
    programs.prefixctl()
except SystemExit as end:
    print(end)
"""
    assert "prefixctl: /nowhere/prefixd/bin/prefixctl cannot be started" in run_python(
        "-c", program
    )
