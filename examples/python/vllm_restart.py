"""Asks a question of a long text with vLLM, ends, and asks again: the second start answers at once.

    make python-module model-smollm2 && scripts/setup_python.sh vllm
    PYTHONPATH=python .venv/bin/python examples/python/vllm_restart.py build/models/smollm2 /tmp/kv

Run it twice. The keys and values of the text are stored in /tmp/kv by a daemon that the engine starts
and ends."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory with a checkpoint")
    parser.add_argument("prefixd", help="a directory for the store, or a daemon's address (unix:/path)")
    parser.add_argument("--text", type=Path, default=Path("/usr/share/common-licenses/GPL-3"))
    parser.add_argument("--tokens", type=int, default=2000, help="so many tokens of the text")
    parser.add_argument("--question", default="What is this text about? Answer in one sentence.")
    arguments = parser.parse_args()

    # Before the import: a vLLM for CPUs reads them there. Both cores compute, none is reserved.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    store: dict[str, object] = {"prefixd": arguments.prefixd}
    if not arguments.prefixd.startswith(("unix:", "tcp:", "tls:")):
        store["daemon"] = ["--min-free-mib", "256"]
    llm = LLM(
        model=arguments.model,
        dtype="float32",
        max_model_len=8192,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "PrefixdConnector",
            "kv_connector_module_path": "prefixd.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": store,
        },
    )
    tokenizer = llm.get_tokenizer()
    text = tokenizer.decode(tokenizer(arguments.text.read_text()).input_ids[: arguments.tokens])
    asked = [{"role": "user", "content": f"{text}\n\n{arguments.question}"}]

    llm.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)  # what the first request compiles
    started = time.perf_counter()
    (first,) = llm.chat(asked, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    seconds = time.perf_counter() - started
    (answer,) = llm.chat(asked, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    prompt = len(first.prompt_token_ids)
    print(f"{prompt} tokens, {first.num_cached_tokens} of them were stored: first token after {seconds:.2f} s")
    print(answer.outputs[0].text.strip())


if __name__ == "__main__":
    main()
