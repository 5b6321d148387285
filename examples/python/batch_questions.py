"""Answers a batch of questions with one beginning: prefills and stores the beginning once, then
answers all questions together, each attending over it.

    python batch_questions.py --store ./kv --document report.txt "What was decided?" "Who signed?"
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import arguments, left_padded, load, open_store

import prefixd
from prefixd.transformers import Splice


def main() -> None:
    parser = arguments("A batch of questions over one stored document")
    parser.add_argument("--document", required=True)
    parser.add_argument("--budget", type=float, help="fraction of the document read per step")
    parser.add_argument("questions", nargs="+")
    given = parser.parse_args()
    model, tokens = load(given.model)
    document = tokens.encode(Path(given.document).read_text(errors="replace") + "\n", first=True)
    policy = None if given.budget is None else prefixd.Policy(budget=given.budget)
    with open_store(given.store) as store:
        splice = Splice(store, model, policy=policy)
        if store.match(splice.spec.name, document).n_tokens < len(document):
            ids = torch.tensor([document], device=model.device)
            with splice.cache(
                ids, label=Path(given.document).name, policy={"mode": "full"}
            ) as cache:
                with torch.no_grad():
                    model(
                        ids[:, cache.get_seq_length() :],
                        past_key_values=cache,
                        logits_to_keep=1,
                    )
            stored = cache.stored()[0]
            if stored is not None:
                store.wait_ready(stored.prefix)
                print(f"stored {stored.stored_tokens} tokens, {stored.bytes} bytes")
        rows = [document + tokens.encode(question, first=False) for question in given.questions]
        ids, mask = left_padded(rows, model.device)
        with splice.cache(ids, mask, store=False) as cache:
            out = model.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=given.answer_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            reports = cache.reports()
            attached = cache.attached
    for b, question in enumerate(given.questions):
        answer = tokens.decode(out[b, ids.shape[1] :].tolist())
        total = reports[b]["total"]
        read = total["anchor_tokens"] + total["retrieved_tokens"]
        print(
            f"{question!r} -> {answer!r}  ({attached[b]} tokens attached, "
            f"{read / max(1, total['steps']):.0f} read per step and head)"
        )


if __name__ == "__main__":
    main()
