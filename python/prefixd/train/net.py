"""Defines a compact Llama for training, with import and export in Hugging Face's naming."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prefixd.planted import BOS

EOS = 257


@dataclass(frozen=True)
class NetConfig:
    """Holds the model's shape. Ids 0..255 are bytes, 256 begins a prompt, 257 ends a text."""

    vocab_size: int = 264
    hidden: int = 256
    layers: int = 4
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 704
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-5
    max_positions: int = 16384

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


def rope_tables(cfg: NetConfig, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, each [max_positions, head_dim / 2], in float32."""
    half = cfg.head_dim // 2
    freq = cfg.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    pos = torch.arange(cfg.max_positions, dtype=torch.float64, device=device)
    angle = pos[:, None] * freq[None, :]
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotate-half RoPE as Hugging Face does; x [B, T, H, dh], cos, sin [B or 1, T, 1,
    dh/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        scaled: Tensor = y * self.weight
        return scaled.to(x.dtype)


Tap = Callable[[int, Tensor, Tensor, Tensor], None]


class Layer(nn.Module):
    def __init__(self, cfg: NetConfig) -> None:
        super().__init__()
        self.cfg = cfg
        width, dq, dk = cfg.hidden, cfg.q_heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        self.input_layernorm = RMSNorm(width, cfg.norm_eps)
        self.qkv = nn.Linear(width, dq + 2 * dk, bias=False)
        self.o_proj = nn.Linear(dq, width, bias=False)
        self.post_attention_layernorm = RMSNorm(width, cfg.norm_eps)
        self.gate_up = nn.Linear(width, 2 * cfg.ffn, bias=False)
        self.down_proj = nn.Linear(cfg.ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, index: int, tap: Tap | None) -> Tensor:
        c = self.cfg
        b, t, _ = x.shape
        qkv = self.qkv(self.input_layernorm(x)).view(b, t, c.q_heads + 2 * c.kv_heads, c.head_dim)
        qk = rotate(qkv[:, :, : c.q_heads + c.kv_heads], cos.to(qkv.dtype), sin.to(qkv.dtype))
        q = qk[:, :, : c.q_heads].transpose(1, 2)
        k = qk[:, :, c.q_heads :].transpose(1, 2)
        v = qkv[:, :, c.q_heads + c.kv_heads :].transpose(1, 2)
        if tap is not None:
            tap(index, q, k, v)
        group = c.q_heads // c.kv_heads
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.scale)
        x = x + self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        gate, up = self.gate_up(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down_proj(F.silu(gate) * up)
        return out


class Net(nn.Module):
    """Computes hidden states; ``logits`` applies the head where it is needed."""

    cos: Tensor
    sin: Tensor

    def __init__(self, cfg: NetConfig, seed: int = 0) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.hidden)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.layers))
        self.norm = RMSNorm(cfg.hidden, cfg.norm_eps)
        self.lm_head = nn.Linear(cfg.hidden, cfg.vocab_size, bias=False)
        cos, sin = rope_tables(cfg)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        gen = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 0.02 if ("embed" in name or "lm_head" in name) else p.shape[1] ** -0.5 * 0.6
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= (2 * cfg.layers) ** 0.5
                with torch.no_grad():
                    p.copy_(torch.randn(p.shape, generator=gen) * std)

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, tap: Tap | None = None
    ) -> Tensor:
        """ids [B, T]; positions [B, T] or None for 0..T-1. Returns hidden states [B, T, width]."""
        if positions is None:
            cos, sin = self.cos[None, : ids.shape[1]], self.sin[None, : ids.shape[1]]
        else:
            cos, sin = self.cos[positions], self.sin[positions]
        cos, sin = cos[:, :, None, :], sin[:, :, None, :]
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, i, tap)
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.lm_head(hidden)
        return out.float()


def to_hf(net: Net) -> dict[str, Tensor]:
    """Returns the weights under Hugging Face's names, float32."""
    c = net.cfg
    dq, dk = c.q_heads * c.head_dim, c.kv_heads * c.head_dim
    out = {
        "model.embed_tokens.weight": net.embed.weight,
        "model.norm.weight": net.norm.weight,
        "lm_head.weight": net.lm_head.weight,
    }
    for i, layer in enumerate(net.layers):
        assert isinstance(layer, Layer)
        p = f"model.layers.{i}."
        q, k, v = layer.qkv.weight.split((dq, dk, dk))
        gate, up = layer.gate_up.weight.chunk(2)
        out |= {
            p + "self_attn.q_proj.weight": q,
            p + "self_attn.k_proj.weight": k,
            p + "self_attn.v_proj.weight": v,
            p + "self_attn.o_proj.weight": layer.o_proj.weight,
            p + "mlp.gate_proj.weight": gate,
            p + "mlp.up_proj.weight": up,
            p + "mlp.down_proj.weight": layer.down_proj.weight,
            p + "input_layernorm.weight": layer.input_layernorm.weight,
            p + "post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
        }
    return {n: t.detach().float().cpu().contiguous().clone() for n, t in out.items()}


def from_hf(cfg: NetConfig, tensors: dict[str, Tensor]) -> Net:
    """Inverts ``to_hf``."""
    net = Net(cfg)
    own: dict[str, Tensor] = {
        "embed.weight": tensors["model.embed_tokens.weight"],
        "norm.weight": tensors["model.norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }
    for i in range(cfg.layers):
        p, o = f"model.layers.{i}.", f"layers.{i}."
        own[o + "qkv.weight"] = torch.cat(
            [tensors[p + f"self_attn.{x}_proj.weight"] for x in "qkv"]
        )
        own[o + "gate_up.weight"] = torch.cat(
            [tensors[p + f"mlp.{x}_proj.weight"] for x in ("gate", "up")]
        )
        for name in ("input_layernorm", "post_attention_layernorm"):
            own[o + name + ".weight"] = tensors[p + name + ".weight"]
        own[o + "o_proj.weight"] = tensors[p + "self_attn.o_proj.weight"]
        own[o + "down_proj.weight"] = tensors[p + "mlp.down_proj.weight"]
    net.load_state_dict({n: t.float() for n, t in own.items()})
    return net


def hf_config(cfg: NetConfig) -> dict[str, object]:
    """Returns config.json with ``rope_theta`` (older readers) and ``rope_parameters`` (transformers
    5)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden,
        "intermediate_size": cfg.ffn,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.q_heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "max_position_embeddings": cfg.max_positions,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "use_cache": True,
    }


def write_atomic(path: Path, data: bytes) -> None:
    tmp = path.with_name(path.name + ".part")
    tmp.write_bytes(data)
    os.replace(tmp, path)


def export_hf(net: Net, folder: Path, notes: dict[str, str] | None = None) -> str:
    """Writes config.json and model.safetensors (bf16); returns the SHA-256 of the weights file."""
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.to(torch.bfloat16) for n, t in to_hf(net).items()}
    blob = save(tensors, metadata={"format": "pt"} | (notes or {}))
    write_atomic(folder / "model.safetensors", blob)
    text = json.dumps(hf_config(net.cfg), indent=2) + "\n"
    write_atomic(folder / "config.json", text.encode())
    return hashlib.sha256(blob).hexdigest()


def load_hf(folder: Path) -> Net:
    """Reads a checkpoint of this family back (weights upcast to float32)."""
    from safetensors.torch import load_file

    try:
        c = json.loads((folder / "config.json").read_text())
        tensors = load_file(str(folder / "model.safetensors"))
    except OSError as e:
        raise SystemExit(f"cannot read the model in {folder}: {e}") from e
    rope = c.get("rope_parameters") or c
    cfg = NetConfig(
        vocab_size=c["vocab_size"],
        hidden=c["hidden_size"],
        layers=c["num_hidden_layers"],
        q_heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        ffn=c["intermediate_size"],
        rope_theta=rope["rope_theta"],
        norm_eps=c["rms_norm_eps"],
        max_positions=c["max_position_embeddings"],
    )
    return from_hf(cfg, tensors)
