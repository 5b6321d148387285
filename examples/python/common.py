"""Loads a model with its tokens for the examples, and says where prompts are stored."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import prefixd

TINY = Path(__file__).resolve().parents[2] / "models/prefixd-tiny"


class Bytes:
    """Encodes for models/prefixd-tiny, which has no tokenizer file: BOS, then bytes."""

    def encode(self, text: str, first: bool) -> list[int]:
        return [256] * first + list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Words:
    """Encodes with any Hugging Face tokenizer."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(self, text: str, first: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=first))

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=str(TINY), help="Hugging Face checkpoint or hub name")
    parser.add_argument(
        "--store",
        required=True,
        help="a folder, or the address of a daemon: unix:/path, tcp:host:port",
    )
    parser.add_argument("--answer-tokens", type=int, default=8)
    return parser


def load(folder: str) -> tuple[PreTrainedModel, Bytes | Words]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    bytes_only = Path(folder).is_dir() and not list(Path(folder).glob("tokenizer*"))
    return model, Bytes() if bytes_only else Words(folder)


def open_store(where: str) -> prefixd.Store:
    logging.basicConfig(level=logging.WARNING)
    if where.startswith(("unix:", "tcp:", "tls:")):
        return prefixd.connect(where)
    return prefixd.open(where)


def left_padded(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (input_ids, attention_mask)."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
    return ids, mask
