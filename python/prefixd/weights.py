"""Names the weights of a checkpoint, without PyTorch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from prefixd.errors import InvalidArgument


def checkpoint_files(directory: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint, in the order in which they are digested."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [directory / name for name in sorted(names)]
    raise InvalidArgument(f"{directory} has neither {single.name} nor {index.name}")


def checkpoint_digest(directory: Path) -> str:
    """Returns the name that feature maps and the C++ decoder give a checkpoint: BLAKE2b-256 over
    its safetensors files."""
    digest = hashlib.blake2b(digest_size=32)
    for path in checkpoint_files(directory):
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()
