"""Puts a document and a question about it into the form that a model expects: its chat template, or
a plain line for models that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

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


class ChatForm:
    """A checkpoint's own tokenizer, and its chat template where it has one."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, model_max_length=1 << 30)
        head, tail = "", "\n"
        if self._tokenizer.chat_template:
            rendered = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
            )
            head, tail = str(rendered).split(_MARK)
        self._tail = tail
        self.head = self.encode(head)
        self.stop = [self._tokenizer.eos_token_id]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

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
