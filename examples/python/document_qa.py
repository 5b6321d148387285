"""Answers many questions about one long document in several processes: the first prefills and
stores the document, all others attach to it over the daemon.

    prefixd --dir /srv/kv --socket /tmp/kv.sock &
    python document_qa.py --store unix:/tmp/kv.sock --document report.txt --processes 4 \\
        "What was decided?" "Who signed?"

models/prefixd-tiny answers planted lines only; ask it "[key of pudeko is ".
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import torch
from common import arguments, load, open_store

from prefixd.transformers import Splice


def ask(options: dict, questions: list[str], answers: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    model, tokens = load(options["model"])
    document = tokens.encode(options["text"], first=True)
    with open_store(options["store"]) as store:
        splice = Splice(store, model)
        for question in questions:
            ids = torch.tensor(
                [document + tokens.encode(question, first=False)], device=model.device
            )
            begun = time.perf_counter()
            with splice.cache(ids, label=options["label"], store=options["keep"]) as cache:
                out = model.generate(
                    ids,
                    past_key_values=cache,
                    max_new_tokens=options["answer_tokens"],
                    do_sample=False,
                    pad_token_id=0,
                )
                reused = cache.attached[0]
            text = tokens.decode(out[0, ids.shape[1] :].tolist())
            answers.put((question, text, reused, ids.shape[1], time.perf_counter() - begun))


def run(options: dict, questions: list[str]) -> list[tuple]:
    """Answers each question in a process of its own."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [context.Process(target=ask, args=(options, [q], answers)) for q in questions]
    for worker in workers:
        worker.start()
    found = []
    while len(found) < len(workers):
        try:
            found.append(answers.get(timeout=1))
        except Exception:  # queue.Empty: a failed process never answers
            if any(worker.exitcode not in (None, 0) for worker in workers):
                raise SystemExit("a process failed; its message is above") from None
    for worker in workers:
        worker.join()
    return found


def main() -> None:
    parser = arguments("Questions about one document, asked by several processes")
    parser.add_argument("--document", required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("questions", nargs="+")
    given = parser.parse_args()
    if not given.store.startswith(("unix:", "tcp:", "tls:")):
        parser.error("several processes need a daemon: --store unix:/path (a folder has one owner)")
    path = Path(given.document)
    options = {
        "model": given.model,
        "store": given.store,
        "text": path.read_text(errors="replace") + "\n",
        "label": path.name,
        "answer_tokens": given.answer_tokens,
        "keep": True,
    }
    # One process prefills and stores the document; the others find it in the store.
    first, rest = given.questions[:1], given.questions[1:]
    found = run(options, first)
    for begin in range(0, len(rest), given.processes):
        found += run({**options, "keep": False}, rest[begin : begin + given.processes])
    for question, answer, reused, total, seconds in found:
        print(f"{question!r} -> {answer!r}  ({reused} of {total} tokens reused, {seconds:.2f} s)")


if __name__ == "__main__":
    main()
