"""Stores a small prefix or checks it against attention by definition: wheel_use.py put|attach
STORE"""

import sys

import numpy as np

import prefixd

what, where = sys.argv[1:]
rng = np.random.default_rng(0)
layers, q_heads, kv_heads, dim, n = 2, 4, 2, 16, 300
tokens = rng.integers(0, 50000, n, dtype=np.uint32)
k, v = rng.standard_normal((2, layers, n, kv_heads, dim), dtype=np.float32)
q = rng.standard_normal((q_heads, dim), dtype=np.float32)

if where.startswith("unix:"):
    store = prefixd.connect(where)
else:
    store = prefixd.open(where, host_tier_bytes=64 << 20, min_free_bytes=0, threads=2)
with store:
    if what == "put":
        spec = prefixd.ModelSpec(
            name="m",
            layers=[prefixd.Layer(0.25)] * layers,
            n_q_heads=q_heads,
            n_kv_heads=kv_heads,
            key_dim=dim,
            dtype="f32",
            identity={"weights": "random"},
        )
        store.register_model(spec)
        with store.begin_put("m", tokens) as put:
            for layer in range(layers):
                put.write(layer, 0, k[layer], v[layer])
        store.wait_ready(put.result().prefix)
    with store.attach("m", tokens, policy=prefixd.Policy(mode="full")) as session:
        assert session.n_tokens == n
        for layer in range(layers):
            y, lse = session.step(layer, q)
            keys, values = (a[layer].repeat(q_heads // kv_heads, axis=1) for a in (k, v))
            scores = 0.25 * np.einsum("hd,thd->ht", q, keys)
            want = np.log(np.exp(scores).sum(1))
            weights = np.exp(scores - want[:, None])
            np.testing.assert_allclose(lse, want, atol=1e-4)
            np.testing.assert_allclose(y, np.einsum("ht,thd->hd", weights, values), atol=1e-4)
    with store.attach("m", tokens, policy=prefixd.Policy(k=64)) as session:
        assert np.isfinite(session.step(0, q)[0]).all()
