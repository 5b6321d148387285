"""Makes a small model and prompts of random numbers, with attention over them by definition."""

from __future__ import annotations

import numpy as np

import prefixd

LAYERS, Q_HEADS, KV_HEADS, DIM, TOKENS = 2, 4, 2, 16, 300
SMALL = {"host_tier_bytes": 64 << 20, "min_free_bytes": 0, "threads": 2}
FULL = prefixd.Policy(mode="full")


def spec(dtype: str = "f32", name: str = "m") -> prefixd.ModelSpec:
    return prefixd.ModelSpec(
        name=name,
        layers=[prefixd.Layer(0.25)] * LAYERS,
        n_q_heads=Q_HEADS,
        n_kv_heads=KV_HEADS,
        key_dim=DIM,
        dtype=dtype,
        identity={"weights": "random"},
    )


class Prompt:
    def __init__(self, seed: int = 0, tokens: int = TOKENS) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(0, 50000, tokens, dtype=np.uint32)
        self.k = rng.standard_normal((LAYERS, tokens, KV_HEADS, DIM), dtype=np.float32)
        self.v = rng.standard_normal((LAYERS, tokens, KV_HEADS, DIM), dtype=np.float32)
        self.q = rng.standard_normal((3, Q_HEADS, DIM), dtype=np.float32)

    def put(self, store: prefixd.Store, model: str = "m", **options: object) -> prefixd.PutResult:
        with store.begin_put(model, self.tokens, **options) as put:
            for layer in range(LAYERS):
                put.write(layer, 0, self.k[layer], self.v[layer])
                put.write_queries(layer, len(self.tokens) - 3, self.q)
        store.wait_ready(put.result().prefix)
        return put.result()

    def reference(self, layer: int, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Attends q [Hq, d] over the whole prompt, in float64."""
        k = self.k[layer].repeat(Q_HEADS // KV_HEADS, axis=1).astype(np.float64)
        v = self.v[layer].repeat(Q_HEADS // KV_HEADS, axis=1).astype(np.float64)
        scores = 0.25 * np.einsum("hd,thd->ht", q.astype(np.float64), k)
        lse = np.log(np.exp(scores).sum(1))
        return np.einsum("ht,thd->hd", np.exp(scores - lse[:, None]), v), lse
