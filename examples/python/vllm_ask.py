"""Asks an API server of vLLM (vllm_serve.sh) a question of a long text, by the OpenAI client.

    .venv/bin/python examples/python/vllm_ask.py --question "Who may copy this?"

The text comes first and the question last: prompts that begin with the same text share what is stored."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--text", type=Path, default=Path("/usr/share/common-licenses/GPL-3"))
    parser.add_argument("--characters", type=int, default=9000, help="so much of the text")
    parser.add_argument("--question", default="What is this text about? Answer in one sentence.")
    parser.add_argument("--tokens", type=int, default=40, help="so many tokens of an answer at most")
    parser.add_argument("--salt", help="share stored prompts with this salt alone")
    parser.add_argument(
        "--policy",
        type=json.loads,
        metavar="JSON",
        help="""how generated tokens read an attached prompt: '{"budget": 0.05}', '{"mode": "full"}'""",
    )
    arguments = parser.parse_args()

    extra: dict[str, Any] = {}
    if arguments.salt:
        extra["cache_salt"] = arguments.salt
    if arguments.policy:
        extra["kv_transfer_params"] = {"prefixd": arguments.policy}
    client = OpenAI(base_url=arguments.url, api_key="none", timeout=1800)
    (model,) = client.models.list().data
    text = arguments.text.read_text()[: arguments.characters]
    started = time.perf_counter()
    first, answer, usage = 0.0, "", None
    chunks = client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": f"{text}\n\n{arguments.question}"}],
        max_tokens=arguments.tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
    )
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - started
            answer += chunk.choices[0].delta.content
        usage = chunk.usage or usage
    details = usage.prompt_tokens_details if usage else None
    cached = details.cached_tokens if details else 0
    tokens = usage.prompt_tokens if usage else 0
    print(f"{tokens} tokens, {cached or 0} of them were cached: first token after {first:.2f} s")
    print(answer.strip())


if __name__ == "__main__":
    main()
