"""Runs as the last step of scripts/wheel.sh: checks a repaired wheel and adds the licences of its
contents.

    wheel_finish.py WHEEL DIRECTORY

It refuses paths of this machine in what the loader reads, and libraries of unknown origin."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

LIBRARIES = [
    *filter(None, os.environ.get("AUDITWHEEL_LD_LIBRARY_PATH", "").split(":")),
    f"/usr/lib/{os.uname().machine}-linux-gnu",
    "/usr/lib",
]
# These headers are compiled in; the names are their packages.
COMPILED_IN = [
    "/usr/include/CLI/CLI.hpp",
    "/usr/include/boost/version.hpp",
    "/usr/include/faiss/Index.h",
    "/usr/include/nlohmann/json.hpp",
]
COMMON = Path("/usr/share/common-licenses")


def owner(path: Path) -> str | None:
    """Returns the Debian package of a file; before trixie dpkg knows some by their name in /lib
    alone."""
    for name in (str(path), str(path).removeprefix("/usr")):
        found = subprocess.run(["dpkg", "-S", name], capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.split(":")[0]
    return None


def original(name: str) -> Path | None:
    """Returns the original of a file that auditwheel copied: its name has the digest's first
    digits."""
    match = re.fullmatch(r"(.+?)-([0-9a-f]{8})(\..+)", name)
    if not match:
        return None
    for folder in LIBRARIES:
        path = Path(folder, match[1] + match[3]).resolve()
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest().startswith(match[2]):
            return path
    return None


def packages(names: list[str]) -> Iterator[str]:
    paths = {n: original(Path(n).name) for n in names if ".libs/" in n and not n.endswith("/")}
    for name, path in [*paths.items(), *((p, Path(p)) for p in COMPILED_IN)]:
        package = owner(path) if path else None
        if not package:
            sys.exit(f"wheel: no Debian package is known for {name}, so neither is its licence")
        yield package


def licences(names: list[str]) -> dict[str, bytes]:
    """Returns each package's text and the texts that it refers to, by name in the wheel's
    licences."""
    texts: dict[str, bytes] = {}
    for package in sorted(set(packages(names))):
        texts[f"debian/{package}"] = Path("/usr/share/doc", package, "copyright").read_bytes()
    said = b"\n".join(texts.values()).decode("utf-8", "replace")
    for licence in sorted(set(re.findall(r"common-licenses/([A-Za-z0-9.-]*[A-Za-z0-9])", said))):
        if (COMMON / licence).is_file():
            texts[f"common/{licence}"] = (COMMON / licence).read_bytes()
    for file in distribution("nanobind").files or []:
        if "licenses" in file.parts:
            texts[f"nanobind/{file.name}"] = file.read_binary()
    return texts


def check(name: str, data: bytes) -> None:
    if data[:4] != b"\x7fELF":
        return
    elf = ELFFile(io.BytesIO(data))
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags():
                path = getattr(tag, "rpath", getattr(tag, "runpath", ""))
                if any(not part.startswith("$ORIGIN") for part in path.split(":") if path):
                    sys.exit(f"wheel: {name} looks for libraries in {path}")
        if section.name == ".symtab":
            sys.exit(f"wheel: {name} is not stripped")


def finish(source: Path, target: Path) -> None:
    with ZipFile(source) as old, ZipFile(target, "w", ZIP_DEFLATED) as new:
        names = old.namelist()
        info = next(n.split("/")[0] for n in names if n.endswith(".dist-info/METADATA"))
        added = licences(names)
        record: list[str] = []

        def write(entry: ZipInfo, data: bytes) -> None:
            entry.compress_type = ZIP_DEFLATED
            new.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{entry.filename},sha256={digest},{len(data)}")

        for entry in old.infolist():
            data = old.read(entry)
            check(entry.filename, data)
            if entry.filename == f"{info}/METADATA":
                head, _, body = data.partition(b"\n\n")
                lines = "".join(f"\nLicense-File: third-party/{name}" for name in added)
                data = head + lines.encode() + b"\n\n" + body
                for name, text in added.items():
                    licence = ZipInfo(f"{info}/licenses/third-party/{name}", entry.date_time)
                    licence.external_attr = entry.external_attr
                    write(licence, text)
            if entry.filename != f"{info}/RECORD" and not entry.is_dir():
                write(entry, data)
        record.append(f"{info}/RECORD,,")
        new.writestr(f"{info}/RECORD", "\n".join(record) + "\n")


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    target = folder / source.name
    part = target.with_suffix(".part")
    finish(source, part)
    part.rename(target)
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
