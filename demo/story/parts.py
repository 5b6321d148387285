"""Parts of the story against a daemon that runs already: store a prompt, and ask about it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from job import job_of, reading
from programs import Programs
from story import prefill
from text import ByteText, Stop, shown, text_of


def store(args: Any) -> None:
    programs = Programs(args.build, args.socket)
    prefill(job_of(args, programs), programs, args.state)


def reading_of(budget: str) -> dict[str, Any]:
    """This only parses the budget; the daemon decides whether it can be paid."""
    if budget == "all":
        return reading("full", None)
    try:
        part = float(budget.removesuffix("%")) / (100 if budget.endswith("%") else 1)
    except ValueError:
        part = float("nan")
    if not abs(part) < float("inf"):
        raise Stop(f"the budget is a fraction of the prompt such as 0.01 or 1%, or 'all'; not '{budget}'")
    return reading("topk_auto", part)


def state_of(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except OSError:
        raise Stop(f"cannot read '{path}'; store a prompt first (scripts/demo.sh prefill)") from None
    except ValueError:
        state = {}
    if not isinstance(state, dict) or "prefix" not in state:
        raise Stop(f"'{path}' is not a demo state")
    return state


def size(amount: float) -> str:
    for unit, scale in (("B", 1), ("KiB", 1 << 10)):
        if amount < scale << 10:
            return f"{amount / scale:.{0 if scale == 1 else 1}f} {unit}"
    return f"{amount / (1 << 20):.1f} MiB"


def ask(args: Any) -> None:
    how = reading_of(args.budget)
    state = state_of(args.state)
    question = args.question if args.question is not None else state["questions"][0]
    if not question.strip("\n"):
        raise Stop("the question is empty")
    programs = Programs(args.build, args.socket)
    text = text_of(Path(state["model_dir"]))
    ids = text.question(question, "")
    request = {"model_dir": state["model_dir"], "model": state["model"], "prefix": state["prefix"],
               "prompt": state["prompt"], "questions": [{"tokens": ids}], "asked": [how],
               "answer_tokens": args.tokens}  # fmt: skip
    answer: list[int] = []
    asked: dict[str, Any] = {}
    printed = 0

    def show(until: str) -> None:
        nonlocal printed
        if not args.json:
            print(shown(until[printed:]), end="", flush=True)
        printed = len(until)

    # The byte model goes on with the question's line.
    before = question.removeprefix("\n") if isinstance(text, ByteText) else ""
    for event in programs.run(["ask"], request):
        if event["event"] == "token":
            answer.append(event["token"])
            if not (so_far := before + text.decode(answer)).endswith("�"):
                show(so_far)
        else:
            asked = event
    show(before + text.decode(answer))
    figures = figures_of(state, ids, args, answer, text.decode(answer), asked)
    if args.json:
        json.dump(figures | {"question": question}, sys.stdout, indent=2, ensure_ascii=False)
        print()
        return
    print(f"\nattach and question ({len(ids)} tokens, exact): {size(asked['question_bytes'])} read, "
          f"{size(asked['question_ssd_bytes'])} from SSD; first token after {asked['first_token_ms']:.1f} ms")
    if asked["steps"]:
        print(f"{asked['steps']} steps, each {asked['tokens_per_step']:.1f} token-equivalents per head: "
              f"{size(figures['bytes_per_step'])} read, {size(figures['ssd_bytes_per_step'])} from SSD, "
              f"{figures['per_cent_per_step']:.2f}% of the prompt; {figures['ms_per_step']:.1f} ms")


def figures_of(state: dict[str, Any], ids: list[int], args: Any, answer: list[int], text: str,
               asked: dict[str, Any]) -> dict[str, Any]:
    def per_step(amount: float) -> float:
        return amount / asked["steps"] if asked["steps"] else 0.0

    return {
        "prefix": state["prefix"], "prompt_tokens": len(state["prompt"]), "prompt_bytes": asked["prompt_bytes"],
        "question_tokens": len(ids), "question_bytes": asked["question_bytes"],
        "question_ssd_bytes": asked["question_ssd_bytes"], "attach_ms": asked["attach_ms"],
        "first_token_ms": asked["first_token_ms"], "text": text, "answer_tokens": len(answer), "budget": args.budget,
        "steps": asked["steps"], "tokens_per_step": asked["tokens_per_step"],
        "bytes_per_step": per_step(asked["bytes"]), "ssd_bytes_per_step": per_step(asked["ssd_bytes"]),
        "scan_bytes_per_step": per_step(asked["scan_bytes"]),
        "per_cent_per_step": 100 * per_step(asked["bytes"]) / asked["prompt_bytes"],
        "ms_per_step": per_step(asked["answer_ms"]),
    }  # fmt: skip
