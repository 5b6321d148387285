"""Puts a document and a question about it into the form that a model expects: its chat template, or
a plain line for models that have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from prefixd.errors import PrefixdError

_MARK = "\x00content\x00"


class Form(Protocol):
    """`head` are the tokens before a document; `stop` are those that end an answer."""

    head: list[int]
    stop: list[int]

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a piece of text."""

    def decode(self, ids: list[int]) -> str:
        """Returns the text of tokens."""

    def question(self, text: str, begun: str) -> list[int]:
        """Returns the tokens that follow a document, ask and begin the answer."""


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Returns the chat template, wherever the checkpoint keeps it."""
    file = folder / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")


class ChatForm:
    """A checkpoint's own tokenizer, and its chat template where it has one."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = _settings(folder)
        special = {k: v["content"] if isinstance(v, dict) else v
                   for k, v in settings.items() if k.endswith("_token")}
        head, tail = "", "\n"
        if template := _template(folder, settings):
            rendered = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
                template
            ).render(messages=[{"role": "user", "content": _MARK}], add_generation_prompt=True, **special)
            head, tail = rendered.split(_MARK)
        self._tail = tail
        self.head = self.encode(head)
        stop = self._tokenizer.token_to_id(special.get("eos_token") or "")
        if stop is None:
            raise PrefixdError(f"{folder} does not say which token ends a text (eos_token in tokenizer_config.json)")
        self.stop = [stop]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def question(self, text: str, begun: str) -> list[int]:
        return self.encode(f"\n\n{text}{self._tail}{begun}")


class ByteForm:
    """The small model of models/: its tokens are bytes, 256 begins a prompt and 257 ends a text."""

    head = [256]
    stop = [257, ord("\n")]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def question(self, text: str, begun: str) -> list[int]:
        return self.encode(f"\n{text} {begun}")


def form_of(folder: Path) -> Form:
    """Returns the form of a checkpoint's directory: bytes where it has no tokenizer."""
    return ChatForm(folder) if (folder / "tokenizer.json").is_file() else ByteForm()
