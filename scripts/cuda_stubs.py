#!/usr/bin/env python3
"""Makes a PyTorch that was linked with CUDA importable without CUDA's libraries.

    cuda_stubs.py SITE_PACKAGES/torch/lib

PyPI has PyTorch for x86-64 with CUDA alone, whose libraries take 3.5 GB that a machine without such
a device never calls. For each library that is needed there and absent, an empty one of the same
name is compiled: every function of it returns 100 (cudaErrorNoDevice), or says so, so that
torch.cuda.is_available() is False and other calls fail with that error. A later call, after another
PyTorch was installed there, makes them anew. Needs gcc and binutils."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

# What belongs to CUDA, by library and by symbol: nothing else is ever made up.
LIBRARY = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvToolsExt|nvJitLink)\w*\.so")
# These return a text, which their callers read.
TEXT = re.compile(r"Error(String|Name)$")
SYMBOL = re.compile(r"(cu|nccl|nvrtc|nvshmem|nvtx|nvJitLink)[A-Za-z0-9_]+$")


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wanted(folder: Path) -> tuple[set[str], dict[str, dict[str, set[str]]], set[str]]:
    """Returns the libraries that are needed and absent, their symbols by version, and undefined
    symbols of CUDA that name no library."""
    needed: set[str] = set()
    versioned: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    plain: set[str] = set()
    for file in sorted(folder.glob("*.so*")):
        library_of: dict[str, str] = {}  # version -> library
        source = ""
        for line in output("objdump", "-p", str(file)).splitlines():
            if found := re.match(r"\s+NEEDED\s+(\S+)", line):
                needed.add(found[1])
            elif found := re.match(r"\s+required from (\S+):", line):
                source = found[1]
            elif source and (found := re.match(r"\s+0x\w+ 0x\w+ \d+ (\S+)", line)):
                library_of[found[1]] = source
        for line in output("objdump", "-T", str(file)).splitlines():
            if "*UND*" not in line:
                continue
            fields = line.split("*UND*")[1].split()
            symbol, version = fields[-1], fields[1].strip("()") if len(fields) > 2 else "Base"
            if version in library_of and LIBRARY.match(library_of[version]):
                versioned[library_of[version]][version].add(symbol)
            elif version == "Base" and SYMBOL.match(symbol):
                plain.add(symbol)
    absent = {name for name in needed if LIBRARY.match(name) and not (folder / name).exists()}
    return absent, versioned, plain


def make(path: Path, versions: dict[str, set[str]], plain: set[str]) -> None:
    """Compiles one library. A version without its node would end the loader with an assertion."""
    symbols = sorted(set().union(plain, *versions.values()))
    with tempfile.TemporaryDirectory() as scratch:
        code, nodes = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        code.write_text("".join(
            f'const char *{symbol}(void) {{ return "no CUDA device"; }}\n' if TEXT.search(symbol) else
            f"long {symbol}(void) {{ return 100; }}\n" for symbol in symbols) or "int none;\n")
        nodes.write_text("".join(
            f"{version} {{ global: {' '.join(f'{symbol};' for symbol in sorted(names))} }};\n"
            for version, names in sorted(versions.items())))
        script = [f"-Wl,--version-script={nodes}"] if versions else []
        subprocess.run(
            ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{path.name}", *script, "-o",
             str(path), str(code)],
            check=True,
        )


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1], "libtorch.so").exists():
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    made = folder / "cuda_stubs.txt"  # names what was made here
    for name in made.read_text().split() if made.exists() else []:
        (folder / name).unlink(missing_ok=True)
    absent, versioned, plain = wanted(folder)
    made.write_text("".join(f"{name}\n" for name in sorted(absent)))
    for index, name in enumerate(sorted(absent)):
        make(folder / name, versioned.get(name, {}), plain if index == 0 else set())
    print(f"{len(absent)} libraries of CUDA replaced in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
