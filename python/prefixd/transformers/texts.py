"""Encodes texts as a model's token ids: its own tokenizer, or bytes for a byte-level model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Encoder:
    """Converts between text and ids. It is thread-safe if the tokenizer is."""

    def __init__(self, tokenizer: Any | None, bos: int | None) -> None:
        self._tokenizer = tokenizer
        self.bos = bos

    @property
    def byte_level(self) -> bool:
        return self._tokenizer is None

    def encode(self, text: str) -> list[int]:
        """Encodes without special tokens."""
        if self._tokenizer is None:
            return list(text.encode(errors="surrogateescape"))
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, text: str) -> list[int]:
        """Encodes as the beginning of a prompt."""
        return ([] if self.bos is None else [self.bos]) + self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return bytes(i for i in ids if i < 256).decode(errors="replace")
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def load_encoder(name: str, checkpoint: str | Path, config: Any) -> Encoder:
    """Chooses the tokenizer. `name` "auto": the checkpoint's own; bytes where it has none and the
    vocabulary is one of bytes (256 to 512 ids). Otherwise "bytes", or another checkpoint whose
    tokenizer to use."""
    directory = Path(checkpoint)
    if name == "auto":
        local = directory.is_dir()
        if not local or any((directory / file).exists() for file in _TOKENIZER_FILES):
            name = str(checkpoint)
        elif 256 <= config.vocab_size <= 512:
            name = "bytes"
        else:
            raise SystemExit(
                f"{directory} has no tokenizer; name one with --tokenizer (a directory or a model's "
                "name, or 'bytes' for a byte-level model)"
            )
    if name == "bytes":
        return Encoder(None, config.bos_token_id)
    tokenizer = AutoTokenizer.from_pretrained(name)
    return Encoder(tokenizer, tokenizer.bos_token_id)


def read_texts(paths: Iterable[str | Path], encoder: Encoder) -> list[str]:
    """Reads the named files, and every file below the named directories, as UTF-8. Other bytes stay
    as they are for a byte-level model, and are replaced for others."""
    named = [Path(path) for path in paths]
    files: list[Path] = []
    for path in named:
        if path.is_dir():
            files += sorted(p for p in path.rglob("*") if p.is_file())
        elif path.is_file():
            files.append(path)
        else:
            raise SystemExit(f"{path}: no such file or directory")
    errors = "surrogateescape" if encoder.byte_level else "replace"
    texts = [f.read_bytes().decode(errors=errors) for f in files]
    texts = [t for t in texts if t.strip()]
    if not texts:
        raise SystemExit(f"no text in {', '.join(map(str, named))}")
    return texts
