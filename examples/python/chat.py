"""Keeps a chat whose system prompt and past are stored: started again, it continues without a
prefill of what was said.

    python chat.py --store ./kv --system "You are a helpful assistant." --history chat.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from common import arguments, load, open_store

from prefixd.transformers import Splice


def main() -> None:
    parser = arguments("A chat with a persisted system prompt and past")
    parser.add_argument("--system", default="A conversation.\n")
    parser.add_argument("--history", help="JSON file with what was said so far; made when missing")
    given = parser.parse_args()
    model, tokens = load(given.model)
    history = Path(given.history) if given.history else None
    # The lineage names what this chat generated under a budget: nobody else attaches to that.
    if history and history.exists():
        said = json.loads(history.read_text())
        past, lineage = said["tokens"], said["lineage"]
    else:
        past, lineage = tokens.encode(given.system, first=True), ""
    with open_store(given.store) as store:
        splice = Splice(store, model)
        for line in sys.stdin:
            past += tokens.encode(line, first=False)
            ids = torch.tensor([past], device=model.device)
            with splice.cache(ids, label="chat", lineage=lineage) as cache:
                out = model.generate(
                    ids,
                    past_key_values=cache,
                    max_new_tokens=given.answer_tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
                reused = cache.attached[0]
                cache.persist()  # the answer becomes a segment of its own
                lineage = cache.lineage
            answer = out[0, ids.shape[1] :].tolist()
            past += answer
            print(
                f"{tokens.decode(answer)}   ({reused} of {ids.shape[1]} tokens reused)",
                flush=True,
            )
    if history:
        history.write_text(json.dumps({"tokens": past, "lineage": lineage}))


if __name__ == "__main__":
    main()
