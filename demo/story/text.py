"""Turns text into the token ids that prefixd-demo takes, and back, for each kind of model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Protocol


class Stop(Exception):
    """Ends the demo with one line on standard error."""


def read_document(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except IsADirectoryError:
        raise Stop(f"document '{path}' is a directory; name a text file") from None
    except OSError as error:
        raise Stop(f"cannot read document '{path}': {error.strerror}; name a text file") from None
    except UnicodeDecodeError as error:
        raise Stop(f"document '{path}': not UTF-8 text: byte {error.start} starts no valid character; "
                   "convert the file first (iconv -t UTF-8)") from None


def shown(text: str) -> str:
    """Returns text that is safe on a terminal: a model's output must not move the cursor."""
    return "".join(c if c in "\n\t" or c.isprintable() else "?" for c in text)


class Text(Protocol):
    """What the demo needs of a model's text."""

    max_positions: int

    def document(self, text: str) -> tuple[list[int], list[int]]:
        """Returns the ids before the document, and those of the document."""

    def question(self, text: str, begun: str) -> list[int]:
        """Returns the ids that follow the document, ask a question and begin its answer."""

    def alone(self, text: str, begun: str, title: str) -> list[int]:
        """Returns a whole prompt that asks the same without the document; empty: not possible."""

    def decode(self, ids: list[int]) -> str:
        """Returns the text of an answer's ids."""


class ByteText:
    """The small model of models/: its tokens are bytes, 256 begins a prompt."""

    def __init__(self, config: dict) -> None:
        self.max_positions = int(config["max_position_embeddings"])

    def document(self, text: str) -> tuple[list[int], list[int]]:
        return [256], list(text.encode())

    def question(self, text: str, begun: str) -> list[int]:
        # The model was trained on questions that stand on a line of their own.
        return list((text if text.startswith("\n") else "\n" + text).encode())

    def alone(self, text: str, begun: str, title: str) -> list[int]:
        return []

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class ChatText:
    """A model with a tokenizer and a chat template, in Hugging Face's files."""

    _MARK = "\x00content\x00"

    def __init__(self, folder: Path, config: dict) -> None:
        # These come from python/requirements-models.txt; the small model does without.
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        self.max_positions = int(config["max_position_embeddings"])
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        template = folder / "chat_template.jinja"
        if not template.is_file():
            raise Stop(f"{folder} has no chat_template.jinja: the demo asks models that were tuned to answer")
        special = {}
        if (file := folder / "tokenizer_config.json").is_file():
            settings = json.loads(file.read_text(encoding="utf-8"))
            special = {k: v["content"] if isinstance(v, dict) else v
                       for k, v in settings.items() if k.endswith("_token")}
        rendered = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
            template.read_text(encoding="utf-8")
        ).render(messages=[{"role": "user", "content": self._MARK}], add_generation_prompt=True, **special)
        self._head, self._tail = rendered.split(self._MARK)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def document(self, text: str) -> tuple[list[int], list[int]]:
        return self._ids(self._head), self._ids(text)

    def question(self, text: str, begun: str) -> list[int]:
        return self._ids(f"\n\nAccording to the text above: {text}{self._tail}{begun}")

    def alone(self, text: str, begun: str, title: str) -> list[int]:
        return self._ids(f"{self._head}About {title}: {text}{self._tail}{begun}")

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


def text_of(folder: Path) -> Text:
    """Returns the text of a checkpoint: byte-level where it has no tokenizer."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Stop(f"cannot read the model's '{folder / 'config.json'}': {error}") from None
    if (folder / "tokenizer.json").is_file():
        return ChatText(folder, config)
    if config.get("bos_token_id") != 256:
        raise Stop(f"{folder} has no tokenizer.json, and its tokens are not bytes")
    return ByteText(config)


def trained_length(folder: Path) -> int | None:
    """Returns the longest prefix that the checkpoint's feature maps were trained for."""
    lengths = [int(m[1]) for f in folder.glob("phi-*.safetensors") if (m := re.search(r"phi-(\d+)", f.name))]
    return max(lengths, default=None)
