"""Tests attached prefixes with a real model: questions about a text of 2,000 tokens, in a cache that the
text alone does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.conftest import Daemon, eventually, own_model
from tests.vllm.engines import BLOCK, ROOT, in_a_process, same, transfer

MODEL = ROOT / "build/models/smollm2"
TOKENS, ANSWER, POOL = 2000, 24, 8


@pytest.mark.skipif(not MODEL.exists(), reason="make model-smollm2 fetches the weights")
def test_answers_over_a_long_text_are_equal(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    try:
        attach(daemon)
    finally:
        daemon.stop()


def attach(daemon: Daemon) -> None:
    from tokenizers import Tokenizer

    text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text[:40000], add_special_tokens=False).ids
    prefix, questions = ids[:TOKENS], (ids[4000:4050], ids[5000:5105])
    prompts = [prefix + question for question in questions]
    room = {"max_model_len": 2560, "max_num_batched_tokens": 2560, "num_gpu_blocks_override": 24}

    # vLLM computes everything, and the prefix is kept.
    storing = transfer(daemon.address, load=False)
    _, *wanted = in_a_process(MODEL, [prefix, *prompts], ANSWER, kv_transfer_config=storing, **room)
    with daemon.store() as store:
        model = own_model(store)
        for prompt in prompts:
            eventually(lambda prompt=prompt: store.match(model, prompt).n_tokens == len(prompt))
            store.remove(store.match(model, prompt).prefix)
            assert store.match(model, prompt).n_tokens == TOKENS

    attaching = transfer(
        daemon.address, match_seconds=60, store=False, attach=True, attach_tokens=0, policy={"mode": "full"}
    )
    attaching["kv_load_failure_policy"] = "fail"
    room["num_gpu_blocks_override"] = POOL
    got = in_a_process(MODEL, prompts, ANSWER, kv_transfer_config=attaching, **room)
    for one, want in zip(got, wanted, strict=True):
        same(one, want)
        assert one["cached"] == TOKENS // BLOCK * BLOCK
