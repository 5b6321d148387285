"""Measures early token freezing on a real model: the prompt is prefilled with early tokens frozen in the last
quarter of the layers, and what the model then predicts of the text that follows is compared with what it
predicts behind a full prefill.

    python -m prefixd.freezing --model build/models/smollm2 --out build/freezing

In the form `states` a frozen token keeps its hidden state, and each layer has keys of its own; in the form
`rows` it keeps the keys and values of the layer before, which need not be stored again. Texts are of this
machine. What was measured is kept in --out: the same command goes on where it ended."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from prefixd.errors import PrefixdError
from prefixd.evaluate.arguments import names_of
from prefixd.evaluate.compare import texts
from prefixd.evaluate.compare.chat import form_of
from prefixd.evaluate.compare.journal import Journal
from prefixd.evaluate.stats import interval
from prefixd.freezing.freeze import FORMS, Schedule, follow, prefill

SEED = 0  # chooses texts


def parser() -> argparse.ArgumentParser:
    a = argparse.ArgumentParser(
        prog="python -m prefixd.freezing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = tuple(texts.KINDS)
    a.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint's directory")
    a.add_argument("--out", type=Path, required=True, help="directory for texts and rows")
    a.add_argument("--json", type=Path, metavar="FILE", help="write the table here, too")
    a.add_argument("--forms", type=names_of(FORMS), default=list(FORMS), help="states, rows (both)")
    a.add_argument("--psi", type=lambda v: [float(x) for x in v.split(",")], default=[0.9, 0.5],
                   help="the share of tokens that the model's end leaves free; the paper's is 0.5 (0.9,0.5)")
    a.add_argument("--gamma", type=float, default=1.0, help="of the schedule (%(default)s)")
    a.add_argument("--sinks", type=int, default=16, help="first tokens that are never frozen (%(default)s)")
    a.add_argument("--kinds", type=names_of(kinds), default=list(kinds), help=f"of texts: {', '.join(kinds)}")
    a.add_argument("--documents", type=int, default=3, help="of each kind (%(default)s)")
    a.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt (%(default)s)")
    a.add_argument("--follow", type=int, default=256, help="tokens behind it (%(default)s)")
    a.add_argument("--threads", type=int, default=0, help="of PyTorch; 0: as it likes")
    return a


def compared(full: Tensor, own: Tensor, ids: Tensor) -> dict[str, float]:
    """Returns the mean KL(full || own) in nats, the share of equal likeliest tokens, and the nats of the text
    beyond full attention's."""
    return {
        "kl": float((full.exp() * (full - own)).sum(-1).mean()),
        "same": float((full.argmax(-1) == own.argmax(-1)).float().mean()),
        "nats": float((full - own).gather(1, ids[0, 1:, None]).mean()),
    }


@torch.no_grad()
def measure(model: PreTrainedModel, o: argparse.Namespace, journal: Journal) -> None:
    form = form_of(o.model)
    for text in (t for ts in texts.kept(o.out / "texts.jsonl", o.kinds, o.documents, SEED).values() for t in ts):
        key = (f"{text.kind}-{text.number}", o.prompt, o.follow)
        cells = [(f, p) for p in o.psi for f in o.forms]
        cells = [(f, p) for f, p in cells if not journal.has(key, method(f, p, o.gamma, o.sinks))]
        if not cells:
            continue
        ids = torch.tensor([form.encode(text.text)[: o.prompt + o.follow]])
        if ids.shape[1] < o.prompt + o.follow:
            raise PrefixdError(f"{text.source} has {ids.shape[1]} tokens, fewer than --prompt and --follow together")
        prompt, rest = ids[:, : o.prompt], ids[:, o.prompt :]
        full = None
        for f, psi in cells:
            print(f"\r  {key[0]}: {f}, psi {psi:g}          ", end="", file=sys.stderr, flush=True)
            if full is None:
                full = follow(model, prefill(model, prompt, None, f), rest)
            schedule = Schedule(model.config.num_hidden_layers, o.prompt, psi, o.gamma, o.sinks)
            own = follow(model, prefill(model, prompt, schedule, f), rest)
            journal.add({
                "key": list(key), "method": method(f, psi, o.gamma, o.sinks), "form": f, "psi": psi,
                "kind": text.kind, "saved": schedule.saved, **compared(full, own, rest),
            })  # fmt: skip
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)


def method(form: str, psi: float, gamma: float, sinks: int) -> str:
    return f"{form}/{psi:g}/{gamma:g}/{sinks}"


def summary(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each form and psi: means over documents with 95% intervals, and KL by kind."""
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault(row["method"], []).append(row)
    out = []
    for got in cells.values():
        kinds = sorted({r["kind"] for r in got})
        out.append({
            "form": got[0]["form"], "psi": got[0]["psi"], "saved": got[0]["saved"], "documents": len(got),
            "kl": _mean(got, "kl"), "same": _mean(got, "same"), "nats": _mean(got, "nats"),
            "kl_by_kind": {k: _mean([r for r in got if r["kind"] == k], "kl")[0] for k in kinds},
        })  # fmt: skip
    return out


def _mean(rows: list[Mapping[str, Any]], name: str) -> list[float]:
    values = [float(r[name]) for r in rows]
    return [sum(values) / len(values), *interval(values)]


def table(body: list[dict[str, Any]]) -> str:
    lines = ["| form | psi | frozen | documents | KL in nats | same next token | nats of the text beyond |",
             "|---|---|---|---|---|---|---|"]
    for row in body:
        kl, same, nats = (f"{v[0]:.4f} [{v[1]:.4f}, {v[2]:.4f}]" for v in (row["kl"], row["same"], row["nats"]))
        lines.append(f"| {row['form']} | {row['psi']:g} | {row['saved']:.1%} | {row['documents']} "
                     f"| {kl} | {same} | {nats} |")  # fmt: skip
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    a = parser()
    o = a.parse_args(argv)
    if not (o.model / "config.json").is_file():
        a.error(f"{o.model} is no checkpoint's directory; make model-smollm2 makes one")
    if any(not 0 < p <= 1 for p in o.psi) or o.gamma <= 0:
        a.error("--psi lies above 0 and up to 1, --gamma above 0")
    if o.sinks < 0 or o.prompt < 64 or o.follow < 2:
        a.error("--prompt must be at least 64, --follow at least 2, --sinks not negative")
    if o.threads:
        torch.set_num_threads(o.threads)
    o.out.mkdir(parents=True, exist_ok=True)
    journal = Journal(o.out / "freezing.jsonl")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.float32).eval()
        measure(model, o, journal)
    except PrefixdError as e:
        print(f"\nprefixd.freezing: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on with what is missing", file=sys.stderr)
        return 130
    body = summary(r for r in journal.rows if tuple(r["key"][1:]) == (o.prompt, o.follow))
    if o.json:
        o.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(table(body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
