"""Trains KVpop's scorers on recorded texts of a frozen model, all layers at once, and keeps them in a file.
The paper distils the whole model beside its scorers; here nothing but the scorers learns."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from prefixd.errors import InvalidArgument
from prefixd.retention.boundary import boundaries, boundary_loss, weights
from prefixd.retention.kvpop import Scorer
from prefixd.retention.policies import WINDOW
from prefixd.retention.record import Recorded
from prefixd.retention.scorers import Mlp, MlpScorer, Mlstm, MlstmScorer
from prefixd.retention.target import future_attention

SINKS = 4
FORMAT = "prefixd-scorers-v1"
# Of each step: positions at which the boundary is looked at, the same ones for all heads.
POSITIONS = {"kvpop-mlp": 32, "kvpop-mlstm": 64}
STEPS = {"kvpop-mlp": 1200, "kvpop-mlstm": 200}
RATE = 3e-3


@dataclass
class Text:
    """Keys, values [N, T, d] and targets [N, T] of all heads of all layers of one text."""

    k: Tensor
    v: Tensor
    target: Tensor


def load(one: Recorded, layers: Sequence[int], prompt: int) -> Text:
    seen = [one.layer(i, prompt) for i in layers]
    return Text(
        torch.cat([s.k for s in seen]), torch.cat([s.v for s in seen]),
        torch.cat([future_attention(s, WINDOW) for s in seen]),
    )  # fmt: skip


def _positions(first: int, tokens: int, count: int) -> Tensor:
    """Returns positions from `first` on, half of them the likelier the later they stand."""
    u = torch.rand(count)
    u[count // 2 :] = u[count // 2 :].sqrt()
    return (first + u * (tokens - first)).long().clamp(max=tokens - 1)


def _loss(heads: Mlp | Mlstm, text: Text, best: int, count: int) -> tuple[Tensor, Tensor]:
    """Returns the loss at random positions, and the share of the teacher's decisions that the scorer makes,
    too."""
    queries = _positions(SINKS + WINDOW + best, text.k.shape[1], count)
    decay = heads.log_decay
    b = boundaries(text.target, decay.detach(), queries, SINKS, WINDOW, best)
    rows = torch.arange(len(text.k))[:, None]
    if isinstance(heads, Mlp):
        both = torch.cat([b.new.expand_as(b.last), b.last], 1)
        scores = heads(heads.inputs(text.k[rows, both], text.v[rows, both]))
        raw = scores.chunk(2, 1)
    else:
        scores = heads.delayed(heads.inputs(text.k, text.v), WINDOW)
        raw = scores[:, b.new], scores.gather(1, b.last)
    new = raw[0] + WINDOW * decay[:, None]
    last = raw[1] + (queries - b.last) * decay[:, None]
    agree = ((new - last >= 0) == (b.label > 0)).float().mean()
    return boundary_loss(new, last, b.label, weights(b)), agree.detach()


def train(
    name: str, texts: Sequence[Text], bests: Sequence[int], progress: Callable[[int, float, float], None],
    steps: int | None = None, seed: int = 0,
) -> Mlp | Mlstm:
    """Returns a scorer of all heads. `bests` are the sizes k that it will serve, drawn by turns."""
    torch.manual_seed(seed)
    n, width = len(texts[0].k), texts[0].k.shape[2] + texts[0].v.shape[2]
    heads: Mlp | Mlstm = Mlp(n, width) if name == "kvpop-mlp" else Mlstm(n, width)
    every = torch.cat([torch.cat([t.k, t.v], -1)[:, ::8] for t in texts], 1)
    heads.mean.copy_(every.mean(1, keepdim=True))
    heads.scale.copy_(every.std(1, keepdim=True).clamp(min=1e-6))
    optimizer = torch.optim.AdamW(heads.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=1e-4)
    total = steps or STEPS[name]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * i / total))
    )
    for step in range(total):
        text = texts[step % len(texts)]
        best = bests[int(torch.randint(len(bests), ()))]
        loss, agree = _loss(heads, text, best, POSITIONS[name])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(step + 1, float(loss.detach()), float(agree))
    return heads


def save(heads: Mlp | Mlstm, name: str, layers: Sequence[int], weights_digest: str, path: Path) -> None:
    """Writes tensors layers.N.NAME [Hkv, ...]; `weights_digest` is the checkpoint's."""
    of_layer = len(heads.decay) // len(layers)
    tensors = {}
    for key, value in heads.state_dict().items():
        for place, layer in enumerate(layers):
            tensors[f"layers.{layer}.{key}"] = value[place * of_layer : (place + 1) * of_layer].contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    # A daemon may have the old file mapped, and a torn one would be taken for a whole one.
    part = path.with_name(path.name + ".part")
    try:
        save_file(tensors, part, {"format": FORMAT, "scorer": name, "weights": weights_digest, "window": str(WINDOW)})
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def scorer_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def has_scorers(folder: Path, weights_digest: str, layers: Sequence[int], name: str) -> bool:
    """Says whether all these layers have a scorer for these weights."""
    path = scorer_path(folder, name)
    if not path.is_file():
        return False
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        return file.metadata().get("weights") == weights_digest and all(f"layers.{i}.mean" in names for i in layers)


def load_scorer(folder: Path, weights_digest: str, layer: int, name: str) -> Scorer:
    """Returns the scorer of a layer, at its beginning."""
    path = scorer_path(folder, name)
    if not path.is_file():
        raise InvalidArgument(f"{path} is not there: python -m prefixd.retention --train makes it")
    with safe_open(path, "pt") as file:
        meta = file.metadata()
        if meta.get("format") != FORMAT or meta.get("scorer") != name:
            raise InvalidArgument(f"{path} holds no scorer {name}")
        if meta["weights"] != weights_digest:
            raise InvalidArgument(f"{path} was trained for another model's weights")
        prefix = f"layers.{layer}."
        tensors = {k.removeprefix(prefix): file.get_tensor(k) for k in file.keys() if k.startswith(prefix)}
    if not tensors:
        raise InvalidArgument(f"{path} has no scorer of layer {layer}: --train with --layer-step 1 makes one of each")
    n, width = tensors["mean"].shape[0], tensors["mean"].shape[2]
    if name == "kvpop-mlp":
        mlp = Mlp(n, width, tensors["w1"].shape[2])
        mlp.load_state_dict(tensors)
        return MlpScorer(mlp)
    mlstm = Mlstm(n, width)
    mlstm.load_state_dict(tensors)
    return MlstmScorer(mlstm)
