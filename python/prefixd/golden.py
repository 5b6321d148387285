"""Makes the committed golden checkpoints and logits with Hugging Face transformers (float32).

``python -m prefixd.golden --data tests/data --model models/prefixd-tiny``
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from prefixd.extras import require

require("prefixd.golden", "research", "torch", "transformers")

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

LAST = 4
SHARED: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def untied() -> LlamaForCausalLM:
    """Makes a Llama with untied embeddings, three query heads to a KV head, bf16 weights."""
    return LlamaForCausalLM(LlamaConfig(
        **SHARED, num_attention_heads=6, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=False,
    ))


def llama3_rope() -> LlamaForCausalLM:
    """Makes a Llama with frequencies scaled as in Llama 3.1, tied embeddings, float32 weights."""
    return LlamaForCausalLM(LlamaConfig(
        **SHARED, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5,
        rope_parameters={**LLAMA3_ROPE, "rope_theta": 50000.0}, tie_word_embeddings=True,
    ))


def qwen3() -> Qwen3ForCausalLM:
    """Makes a Qwen3 with QK-norm, tied embeddings, head_dim that is not hidden / heads, bf16
    weights."""
    return Qwen3ForCausalLM(Qwen3Config(
        **SHARED, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, tie_word_embeddings=True,
    ))


CASES = {
    "tiny-llama-untied": (untied, torch.bfloat16),
    "tiny-llama3-rope": (llama3_rope, torch.float32),
    "tiny-qwen3": (qwen3, torch.bfloat16),
}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draws normal weights, large enough that logits differ by several units and attention is not
    flat."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=gen)
            if p.dim() == 1:
                p.copy_(1.0 + 0.2 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                p.copy_(0.5 * noise)
            elif "q_proj" in name or "k_proj" in name:
                p.copy_(noise * 1.6 * p.shape[1] ** -0.5)
            else:
                p.copy_(noise * p.shape[1] ** -0.5)


def logits_of(folder: Path, prompt: list[int]) -> list[list[float]]:
    """Returns logits at the prompt's last positions, weights upcast to float32, eager attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        out = model(torch.tensor([prompt])).logits[0, -LAST:].float()
    return [[float(np.float32(x)) for x in row] for row in out.numpy()]


def both_rope_forms(path: Path) -> None:
    """Adds ``rope_theta`` and ``rope_scaling`` for readers older than transformers 5."""
    c = json.loads(path.read_text())
    rope = c["rope_parameters"]
    c["rope_theta"] = rope["rope_theta"]
    rest = {k: v for k, v in rope.items() if k != "rope_theta"}
    c["rope_scaling"] = rest if rope["rope_type"] != "default" else None
    c["torch_dtype"] = c["dtype"]
    path.write_text(json.dumps(c, indent=2, sort_keys=True) + "\n")


def golden_json(folder: Path, prompt: list[int], out: Path) -> None:
    rows = logits_of(folder, prompt)
    body = json.dumps({"prompt": prompt, "positions": [len(prompt) - LAST + i for i in range(LAST)],
                       "logits": rows, "dtype": "float32"})
    out.write_text(body + "\n")


def tiny_prompt() -> list[int]:
    """Returns about 300 ids for the small model: text, three needles, a question with its first
    digits."""
    text = (
        "prefixd keeps the keys and values of long prompts on disk.\n[key of bakemo is 40718.]\n"
        "A decoder attends over a stored prompt and reads about one hundredth of it.\n"
        "[key of turila is 93526.]\nWhat is left unread is estimated, not dropped.\n"
        "[key of gosevu is 15087.]\n\n[key of turila is 93526.]\n[key of bakemo is 40"
    )
    return [256, *text.encode()]


def main(argv: list[str] | None = None) -> int:
    a = argparse.ArgumentParser(prog="python -m prefixd.golden", description=__doc__)
    a.add_argument("--data", type=Path, required=True, help="folder of the goldens (tests/data)")
    a.add_argument("--model", type=Path, help="also write prefixd-tiny-golden.json for this model")
    a.add_argument("--only-model", action="store_true", help="leave the random checkpoints alone")
    o = a.parse_args(argv)
    if not o.only_model:
        for seed, (name, (build, dtype)) in enumerate(CASES.items()):
            folder = o.data / name
            folder.mkdir(parents=True, exist_ok=True)
            model: Any = build()
            randomize(model, seed)
            model.to(dtype).save_pretrained(folder)
            both_rope_forms(folder / "config.json")
            (folder / "generation_config.json").unlink(missing_ok=True)
            prompt = np.random.default_rng(seed).integers(0, SHARED["vocab_size"], 160).tolist()
            (folder / "model.safetensors").chmod(0o644)
            golden_json(folder, prompt, folder / "golden.json")
            print(f"wrote {folder}")
    if o.model:
        golden_json(o.model, tiny_prompt(), o.data / "prefixd-tiny-golden.json")
        print(f"wrote {o.data / 'prefixd-tiny-golden.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
