"""Runs vLLM on the small model: here, or in a process of its own that prints what it answered.

    python -m tests.vllm.engines < '{"model": DIR, "engine": {...}, "prompts": [[...]], "tokens": [8]}'
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
BLOCK = 128
# A pool that holds one prompt of 2,050 tokens and not four of 500 with their answers, and steps that a long
# prompt does not fit.
POOL, STEP = 18, 192

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT / "python"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
# Of a daemon that an engine starts.
DAEMON = ["--min-free-mib", "0", "--threads", "2", "--host-tier-mib", "64"]


def tiny(folder: Path) -> Path:
    """Copies the small model: vLLM takes each *.safetensors in a directory for weights, and the
    repository's has feature maps, too."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(ROOT / "models/prefixd-tiny" / name, folder / name)
    return folder


@functools.cache
def _page() -> bytes:
    return b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))


def text(first: int, n: int) -> list[int]:
    """Returns n token ids of the small model: 256, then bytes of the pages from `first` on."""
    ids = [256, *_page()[first : first + n - 1]]
    assert len(ids) == n, "the pages are shorter"
    return ids


def transfer(prefixd: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "PrefixdConnector",
        "kv_connector_module_path": "prefixd.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # The small model prefills as fast as it loads: what tests ask for is loaded unless they say otherwise.
        "kv_connector_extra_config": {"prefixd": prefixd, "compute_when_faster": False, **extra},
    }


def engine(model: Path, **options: Any) -> Any:
    """Returns a vLLM of the small model that computes in float32."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    defaults: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 17 * BLOCK,
        "max_num_batched_tokens": STEP,
        "num_gpu_blocks_override": POOL,
        "enforce_eager": True,
        "disable_log_stats": False,
    }
    return LLM(**{**defaults, **options})


def sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, logprobs=2)


def answer(output: Any) -> dict[str, Any]:
    """Returns the tokens of one answer, the two likeliest of each step, and how many prompt tokens
    vLLM did not compute."""
    done = output.outputs[0]
    best = [{str(token): logprob.logprob for token, logprob in step.items()} for step in done.logprobs]
    return {"tokens": list(done.token_ids), "best": best, "cached": output.num_cached_tokens}


def in_a_process(
    model: Path,
    prompts: list[list[int]],
    tokens: int | list[int],
    stored: tuple[Path, int] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Answers the prompts in an engine of their own, one after the other, each with so many tokens. The engine ends
    when its daemon, in the directory `stored`, has so many prefixes: vLLM gives an engine that ends few seconds."""
    each = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
    work = {"model": str(model), "engine": options, "prompts": prompts, "tokens": each}
    if stored is not None:
        work["stored"] = [str(stored[0]), stored[1]]
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.engines"],
        input=json.dumps(work),
        capture_output=True,
        text=True,
        cwd=ROOT / "python",
        env={**os.environ, **ENVIRONMENT},
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-8000:] + done.stdout[-4000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Asserts that two answers are equal up to a tie: where they part, both tokens are as likely."""
    for step, (a, b) in enumerate(zip(got["tokens"], want["tokens"], strict=True)):
        if a != b:
            best = want["best"][step]
            assert str(a) in best and abs(best[str(a)] - best[str(b)]) < 1e-3, (step, got["tokens"], want["tokens"])
            return
        for token, logprob in got["best"][step].items():
            assert abs(want["best"][step].get(token, logprob) - logprob) < 1e-3, (step, token)


def wait_stored(folder: str, count: int) -> None:
    import prefixd

    deadline = time.monotonic() + 300
    with prefixd.connect(f"unix:{folder}/prefixd.sock", reconnect=0) as store:
        while (there := len(store.list_prefixes().prefixes)) < count:
            assert time.monotonic() < deadline, f"{there} of {count} prefixes are stored"
            time.sleep(0.1)


def main() -> None:
    work = json.loads(sys.stdin.read())
    llm = engine(Path(work["model"]), **work["engine"])
    answers = []
    for prompt, tokens in zip(work["prompts"], work["tokens"], strict=True):
        output = llm.generate({"prompt_token_ids": prompt}, sampling(tokens), use_tqdm=False)[0]
        answers.append(answer(output))
    if "stored" in work:
        wait_stored(*work["stored"])
    del llm
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
