"""Records traces of a Hugging Face model: keys, values and queries of a long prompt and of what is
decoded behind it, for the benchmarks of selection, estimators, row layout and steps (--trace FILE).

    python -m prefixd.trace --model build/models/smollm2 --out traces
    python -m prefixd.trace --model ./llama --out traces --document book.txt --question "Who is lost?"

One file of each kind is written to the directory --out; a kind whose file is there already is left
out, so the same command goes on after an interruption. chat and summarising: the model answers
questions about a text of this machine; code: a source file goes on as it is written; retrieval: facts
planted in prose are asked for, and its sentences. Nothing is asked twice, so that a trace may have
fewer steps than --steps. Steps attend to everything. Needs a model whose every layer attends to
the whole prompt (Llama, Qwen, Mistral families)."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from prefixd.errors import PrefixdError
from prefixd.evaluate.compare.chat import form_of
from prefixd.trace.conversations import KINDS, Conversation, make, own
from prefixd.trace.record import record


def parser() -> argparse.ArgumentParser:
    a = argparse.ArgumentParser(
        prog="python -m prefixd.trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    a.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint's directory")
    a.add_argument("--out", type=Path, required=True, help="directory for the traces")
    a.add_argument("--kinds", default=",".join(KINDS), help="%(default)s")
    a.add_argument("--document", type=Path, help="your own text instead (UTF-8): written to document.safetensors")
    a.add_argument("--question", action="append", default=[], help="about it, any number; none: the text goes on")
    a.add_argument("--tokens", type=int, default=7600, help="of the prompt (%(default)s)")
    a.add_argument("--steps", type=int, default=512, help="decoded tokens that are recorded (%(default)s)")
    a.add_argument("--seed", type=int, default=0, help="chooses texts and planted facts")
    a.add_argument("--device", default="auto", help="auto, cpu, cuda")
    a.add_argument("--threads", type=int, default=0, help="of PyTorch; 0: as it likes")
    return a


def _conversations(o: argparse.Namespace, kinds: list[str]) -> list[tuple[Path, Conversation]]:
    form = form_of(o.model)
    if o.document is not None:
        return [(o.out / "document.safetensors", own(form, o.document, o.question, o.tokens, o.steps))]
    missing = [(kind, o.out / f"{kind}.safetensors") for kind in kinds]
    for _, path in missing:
        if path.exists():
            print(f"{path} is there", file=sys.stderr)
    return [(path, make(kind, form, o.tokens, o.steps, o.seed)) for kind, path in missing if not path.exists()]


def _show(what: str, done: int, of: int) -> None:
    print(f"\r  {what}: {done} of {of}    ", end="", file=sys.stderr, flush=True)


def run(o: argparse.Namespace, kinds: list[str]) -> None:
    conversations = _conversations(o, kinds)
    if not conversations:
        return
    if o.threads:
        torch.set_num_threads(o.threads)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if o.device == "auto" else o.device
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(o.model, dtype=dtype).eval().to(device)
    limit = model.config.get_text_config(decoder=True).max_position_embeddings
    for path, conversation in conversations:
        room = len(conversation.prompt) + o.steps
        if room > limit:
            raise PrefixdError(
                f"{len(conversation.prompt)} prompt tokens and {o.steps} steps are more than the model's {limit}: "
                "smaller --tokens or --steps"
            )
        print(f"{path.stem}: {conversation.source}", file=sys.stderr)
        begun = time.monotonic()
        trace = record(model, conversation, o.steps, _show)
        trace.save(path, o.model.resolve().name)
        print(
            f"\r{path}: {len(trace.prompt)} prompt tokens, {len(trace.steps)} steps in {len(trace.turns)} turns, "
            f"{path.stat().st_size / 1e6:.0f} MB, {time.monotonic() - begun:.0f} s"
        )


def main(argv: list[str] | None = None) -> int:
    a = parser()
    o = a.parse_args(argv)
    kinds = [k.strip() for k in o.kinds.split(",") if k.strip()]
    if wrong := [k for k in kinds if k not in KINDS]:
        a.error(f"there is no kind {', '.join(wrong)}; there are {', '.join(KINDS)}")
    if o.question and o.document is None:
        a.error("--question needs --document")
    if o.tokens < 512 or o.steps < 1:
        a.error("--tokens must be at least 512, --steps at least 1")
    if not (o.model / "config.json").is_file():
        a.error(f"{o.model} is no checkpoint's directory; make model-smollm2 makes one")
    try:
        run(o, kinds)
    except PrefixdError as e:
        print(f"\nprefixd.trace: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on with what is missing", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
