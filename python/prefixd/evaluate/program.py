"""Measures the quality of a model over stored prompts: tasks, likelihood and attention errors of
each method at each read budget and length, through a real store. Writes tables, figures and one
page.

    python -m prefixd.evaluate --model DIR --text BOOK.txt --out quality

Without --model it evaluates the small model of this repository. --out keeps the rows of every
document as they come: the same command continues where it was interrupted. --quick gives a first
look in a few minutes.

    python -m prefixd.evaluate compare --help    a real model on real texts, against full attention
    python -m prefixd.evaluate report DIR        the tables of what `compare` has measured"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from prefixd.extras import require

require("prefixd.evaluate", "research", "torch", "transformers", "safetensors", "matplotlib")

import torch  # noqa: E402
import transformers  # noqa: E402

from prefixd.evaluate import tasks  # noqa: E402
from prefixd.evaluate.methods import METHODS  # noqa: E402
from prefixd.evaluate.model import Subject  # noqa: E402
from prefixd.evaluate.report import write_report  # noqa: E402
from prefixd.evaluate.rows import Rows  # noqa: E402
from prefixd.evaluate.run import Evaluation, Plan  # noqa: E402
from prefixd.transformers.texts import read_texts  # noqa: E402

SMALL_MODEL = Path(__file__).resolve().parents[3] / "models/prefixd-tiny"
DEFAULT_TEXT = Path("/usr/share/common-licenses/GPL-3")
# These parts of a plan may change between runs, because rows do not depend on them or record them
# themselves.
_WIDER = ("tasks", "lengths", "documents", "methods", "budgets", "maps")


def parser() -> argparse.ArgumentParser:
    a = argparse.ArgumentParser(
        prog="python -m prefixd.evaluate", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    a.add_argument("--model", default=str(SMALL_MODEL) if SMALL_MODEL.is_dir() else None,
                   required=not SMALL_MODEL.is_dir(), help="checkpoint directory or name")
    a.add_argument("--out", type=Path, required=True, help="directory for rows, tables and figures")
    a.add_argument("--text", type=Path, action="append",
                   help=f"file or directory the documents are made of; may be repeated ({DEFAULT_TEXT})")
    a.add_argument("--tokenizer", default="auto", help="directory, name, or 'bytes' (%(default)s)")
    a.add_argument("--maps", type=Path, action="append",
                   help="feature maps (default: phi-*.safetensors in the checkpoint's directory)")
    a.add_argument("--suite", action="append", choices=[*tasks.SUITES],
                   help="tasks; may be repeated (default: all, 'planted' for byte-level models alone)")
    a.add_argument("--questions", type=Path,
                   help='your own: JSON lines {"document" or "file", "question", "answers": [...]}')
    a.add_argument("--method", action="append", choices=[*METHODS],
                   help="may be repeated (default: all that the store and the model allow)")
    a.add_argument("--length", type=int, action="append",
                   help="document tokens; may be repeated (2048, 4096, 8192, and 16384 if it fits)")
    a.add_argument("--budget", type=float, action="append",
                   help="fraction of the prefix read per step; may be repeated (0.01 to 0.05)")
    a.add_argument("--documents", type=int, default=8, help="per task and length (%(default)s)")
    a.add_argument("--continuation", type=int, default=128,
                   help="tokens behind a document whose likelihood is measured (%(default)s)")
    a.add_argument("--queries", type=int, default=12,
                   help="decode queries per document for the diagnostics (%(default)s)")
    a.add_argument("--l-gen", type=int, default=128,
                   help="generated tokens that share a summary, amortized accounting (%(default)s)")
    a.add_argument("--selector", default="exact", help="as policies name it (%(default)s)")
    a.add_argument("--floor", type=float, default=0.05,
                   help="tasks below this score with full attention are not asked of the other methods "
                   "(%(default)s)")
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--device", default="auto", help="cpu, cuda, ... (%(default)s)")
    a.add_argument("--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"],
                   help="the model's; auto: as the checkpoint says")
    a.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's choice)")
    a.add_argument("--quick", action="store_true",
                   help="2 documents of 2048 tokens, budgets 0.02 and 0.05, unless given")
    a.add_argument("--json", type=Path, help="also write the figures of all tables here, compactly")
    a.add_argument("--report-only", action="store_true", help="tables and figures of what is there")
    return a


def main(argv: list[str]) -> int:
    a = parser()
    o = a.parse_args(argv)
    if o.threads:
        torch.set_num_threads(o.threads)
    if any(not 0 < f <= 1 for f in o.budget or []):
        a.error("--budget is a fraction above 0, at most 1")
    o.out.mkdir(parents=True, exist_ok=True)
    if o.report_only:
        if not (o.out / "plan.json").is_file():
            a.error(f"{o.out} has no run to report")
    else:
        _run(a, o)
    results = write_report(o.out)
    if o.json:
        tables = {k: v for k, v in results.items() if k not in ("heads", "scatter")}
        o.json.write_text(json.dumps(tables, separators=(",", ":")) + "\n")
    print(f"{o.out / 'report.html'}")
    return 0


def _run(a: argparse.ArgumentParser, o: argparse.Namespace) -> None:
    transformers.utils.logging.disable_progress_bar()
    if o.text is None and not DEFAULT_TEXT.is_file():
        a.error("name a text that the documents are made of: --text FILE")
    directory = Path(o.model)
    maps = o.maps if o.maps is not None else sorted(directory.glob("phi-*.safetensors"))
    subject = Subject(
        o.model, o.out / "store", tokenizer=o.tokenizer, dtype=o.dtype, device=o.device,
        feature_maps=[m.resolve() for m in maps], l_gen=o.l_gen, selector=o.selector,
    )
    try:
        noise = "\n".join(read_texts(o.text or [DEFAULT_TEXT], subject.encoder))
        lengths = o.length or ([2048] if o.quick else [
            n for n in (2048, 4096, 8192, 16384) if n + 1024 < subject.limit])
        if not lengths or max(lengths) + 512 > subject.limit or min(lengths) < 512:
            a.error(f"--length must be from 512 to {subject.limit - 512} for this model")
        suites = o.suite or (["planted"] if subject.encoder.byte_level else [
            "ruler", "babilong", "planted"])
        generators = {k: v for suite in suites for k, v in tasks.SUITES[suite].items()}
        if o.questions:
            generators["questions"] = tasks.question_file(o.questions)
        methods = o.method or [m for m in METHODS if maps or not m.startswith("phi")]
        if not maps and any(m.startswith("phi") for m in methods):
            a.error("φ needs feature maps: train them with python -m prefixd.train, name them with --maps")
        # The completion gain is measured against Top-K, and nothing can be compared without full
        # attention.
        methods = [*dict.fromkeys(["full", "topk", *methods])]
        methods = [m for m in METHODS if m in methods]
        plan = Plan(
            checkpoint=directory.name, weights=subject.splice.spec.identity["tensors"],
            tasks=[*generators], methods=methods, lengths=lengths,
            budgets=o.budget or ([0.02, 0.05] if o.quick else [0.01, 0.02, 0.03, 0.04, 0.05]),
            documents=2 if o.quick else o.documents, continuation=o.continuation, queries=o.queries,
            seed=o.seed, floor=o.floor, l_gen=o.l_gen, selector=o.selector,
            dtype=subject.splice.spec.dtype, maps=[f"{m.name}@{_digest(m)}" for m in maps],
            text=hashlib.blake2b(noise.encode(), digest_size=8).hexdigest(),
        )
        _check_same(a, o.out / "plan.json", plan)
        Evaluation(
            subject, plan, generators, noise, maps, Rows(o.out / "rows.jsonl"),
            lambda text: print(text, flush=True),
        ).run()
    finally:
        subject.close()


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=4).hexdigest()


def _check_same(a: argparse.ArgumentParser, path: Path, plan: Plan) -> None:
    """Checks that the directory holds the rows of this plan, which may be widened."""
    new = json.loads(plan.to_json())
    if path.is_file():
        old = json.loads(path.read_text())
        differ = [k for k in new if k not in _WIDER and old[k] != new[k]]
        if differ:
            said = "; ".join(f"{k}: {old[k]} there, {new[k]} now" for k in differ)
            a.error(f"{path.parent} holds another run ({said}); name another --out or remove it")
        for k in ("tasks", "lengths"):
            new[k] = [*dict.fromkeys([*old[k], *new[k]])]
        new["methods"] = [m for m in METHODS if m in old["methods"] or m in new["methods"]]
        new["budgets"] = sorted({*old["budgets"], *new["budgets"]})
        new["documents"] = max(old["documents"], new["documents"])
    path.write_text(json.dumps(new, indent=1) + "\n")
