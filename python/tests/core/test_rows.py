"""Tests puts and reads of rows with NumPy alone: embedded and against the real daemon."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import prefixd
from tests.prompts import DIM, FULL, KV_HEADS, LAYERS, SMALL, Prompt, spec


class Elsewhere:
    """Imitates an array of another library, in host memory or (as it claims) on a device."""

    def __init__(self, data: np.ndarray, kind: int = 1) -> None:
        self.data, self.kind = data, kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, **options: object) -> object:
        return self.data.__dlpack__(**options)


def test_arrays_of_other_libraries_and_on_devices(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    with store.attach("m", Elsewhere(prompt.tokens), policy=FULL) as session:
        want = session.step(0, prompt.q[0])
        np.testing.assert_array_equal(session.step(0, Elsewhere(prompt.q[0]))[0], want[0])
        with pytest.raises(prefixd.InvalidArgument, match=r"Elsewhere lies on device 0 \(CUDA\)"):
            session.step(0, Elsewhere(prompt.q[0], kind=2))
    other = Prompt(seed=1)
    with (
        pytest.raises(prefixd.InvalidArgument, match="CUDA"),
        store.begin_put("m", other.tokens) as put,
    ):
        put.write(0, 0, Elsewhere(other.k[0], kind=2), other.v[0])
    assert len(store.list_prefixes().prefixes) == 1


def test_rows_selection_and_listing(store: prefixd.Store) -> None:
    prompt = Prompt()
    prefix = prompt.put(store, label="text").prefix
    with store.attach("m", prefix=prefix, n_tokens=250, policy=FULL) as session:
        assert session.n_tokens == 250
        rows = session.read_range(1, 1, 7, 9)
        np.testing.assert_array_equal(rows.keys, prompt.k[1, 7:9, 1])
        np.testing.assert_array_equal(rows.values, prompt.v[1, 7:9, 1])
        np.testing.assert_array_equal(
            session.read_rows(1, 1, [0, 249]).keys, prompt.k[1, [0, 249], 1]
        )
        ids, cuts = session.select(0, 0, prompt.q[0, :2], 20)
        scores = 0.25 * prompt.q[0, :2] @ prompt.k[0, :250, 0].T
        unread = np.setdiff1d(np.arange(4, 250 - 16), ids)
        assert len(ids) == 20 and (np.diff(ids) > 0).all()
        for head, cut in enumerate(cuts):
            assert cut.kind == "exact" and scores[head, unread].max() <= cut.score + 1e-5
    assert store.match("m", prompt.tokens[:100]).n_tokens == 100
    assert [p["label"] for p in store.list_prefixes().prefixes] == ["text"]
    assert store.list_models().models == [spec_as_stored()]
    assert store.explain("m", prompt.tokens[:100])["misses"] == []
    other = np.array(prompt.tokens, copy=True)
    other[40] += 1
    why = store.explain("m", other, identity={"weights": "another"})
    assert why["match"]["n_tokens"] == 40 and why["asked_tokens"] == len(other)
    assert [m["reason"] for m in why["misses"]] == ["diverges", "model_differs"]
    assert store.rewrite(prefix, "compact")["segments"] == 1
    with pytest.raises(prefixd.InvalidArgument, match="recluster, compact or encrypt"):
        store.rewrite(prefix, "fold")
    store.set_lifetime(prefix, pinned=True)
    assert store.prefix(prefix)["summary"]["pinned"]
    assert store.verify()["damaged"] == [] and store.stats()["puts"] == 1
    page = store.list_prefixes(limit=1, tenant="")
    assert len(page.prefixes) == 1 and page.next == ""
    with pytest.raises(prefixd.InvalidArgument, match="after"):
        store.list_prefixes(after="x")
    assert store.model("m") == spec_as_stored()
    with pytest.raises(prefixd.FailedPrecondition, match="used by 1 stored"):
        store.remove_model("m")
    store.remove(prefix)
    assert store.list_prefixes().prefixes == []
    store.remove_model("m")
    with pytest.raises(prefixd.NotFound):
        store.model("m")


def spec_as_stored() -> prefixd.ModelSpec:
    plain = spec()
    return prefixd.ModelSpec(**{**plain.__dict__, "layers": tuple(plain.layers), "value_dim": DIM})


def test_bf16_rows_are_bits_for_numpy_and_what_is_stored_outlives_the_process(
    tmp_path: Path,
) -> None:
    prompt = Prompt()
    bits = (
        (prompt.k.view(np.uint32) >> 16).astype(np.uint16),
        (prompt.v.view(np.uint32) >> 16).astype(np.uint16),
    )
    with prefixd.open(tmp_path, **SMALL) as store:
        store.register_model(spec("bf16"))
        with store.begin_put("m", prompt.tokens) as put:
            for layer in range(LAYERS):
                put.write(layer, 0, bits[0][layer], bits[1][layer])
        with pytest.raises(prefixd.FailedPrecondition):
            put.commit()
        with pytest.raises(prefixd.PrefixdError, match="(?i)lock|use"):
            prefixd.open(tmp_path, **SMALL)
    with pytest.raises(prefixd.FailedPrecondition, match="closed"):
        store.stats()
    with prefixd.open(tmp_path, **SMALL) as store:
        with store.attach("m", prompt.tokens, policy=FULL) as session:
            rows = session.read_range(0, 1, 0, 5)
            np.testing.assert_array_equal(rows.keys, bits[0][0, :5, 1])


def test_restore_brings_every_row_back(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    seen: list[int] = []

    def progress(done: int, total: int, unit: str) -> None:
        assert unit == "bytes" and 0 < done <= total
        seen.append(total - done)

    with store.attach("m", prompt.tokens, policy=FULL) as session:
        n = session.n_tokens
        k, v = np.zeros_like(prompt.k[:, :n]), np.zeros_like(prompt.v[:, :n])
        for run in session.restore(buffer_bytes=1, progress=progress):
            k[run.layer, run.begin : run.end] = run.k
            v[run.layer, run.begin : run.end] = run.v
        np.testing.assert_array_equal(k, prompt.k[:, :n])
        np.testing.assert_array_equal(v, prompt.v[:, :n])
        assert seen[-1] == 0
        with session.restore(5, 9, layers=(1, 2), head_major=True) as restore:
            (run,) = restore
        np.testing.assert_array_equal(run.k, prompt.k[1, 5:9].swapaxes(0, 1))
        with pytest.raises(prefixd.Cancelled):
            list(session.restore(progress=lambda *_: False))
        restore = session.restore()
        restore.cancel()
        with pytest.raises(prefixd.Cancelled):
            list(restore)
        with pytest.raises(prefixd.InvalidArgument, match="tokens"):
            session.restore(0, n + 1)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_restore_into_an_engines_own_arrays(store: prefixd.Store, dtype: str) -> None:
    prompt = Prompt()
    bits = {"f32": lambda a: a, "f16": lambda a: a.astype(np.float16),
            "bf16": lambda a: (a.view(np.uint32) >> 16).astype(np.uint16)}[dtype]  # fmt: skip
    k, v = bits(prompt.k), bits(prompt.v)
    store.register_model(spec(dtype, dtype))
    with store.begin_put(dtype, prompt.tokens) as put:
        for layer in range(LAYERS):
            put.write(layer, 0, k[layer], v[layer])
    with store.attach(dtype, prompt.tokens, policy=FULL) as session:
        n = session.n_tokens
        cache = [(np.zeros_like(k[0]), np.zeros_like(v[0])) for _ in range(LAYERS)]
        session.restore_into(cache)
        for layer, (keys, values) in enumerate(cache):
            np.testing.assert_array_equal(keys[:n], k[layer, :n])
            np.testing.assert_array_equal(values[:n], v[layer, :n])
            assert not keys[n:].any() and not values[n:].any()
        own = (np.ones_like(k[0]), np.ones_like(v[0]))
        session.restore_into([own], 5, 9, layers=(1, 2))
        np.testing.assert_array_equal(own[0][:4], k[1, 5:9])
        np.testing.assert_array_equal(own[1][4:], np.ones_like(v[0][4:]))
        if dtype == "bf16" and (torch := sys.modules.get("torch")):
            keys, values = (torch.zeros(k[0].shape, dtype=torch.bfloat16) for _ in range(2))
            session.restore_into([(keys, values)], layers=(0, 1))
            np.testing.assert_array_equal(keys.view(torch.int16).numpy().view(np.uint16)[:n], k[0, :n])


def test_restore_into_refuses_what_does_not_fit(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    with store.attach("m", prompt.tokens, policy=FULL) as session:
        n, whole = session.n_tokens, np.zeros_like(prompt.k[0])
        turned = np.zeros((KV_HEADS, len(prompt.tokens), DIM), np.float32).swapaxes(0, 1)
        fixed = np.zeros_like(whole)
        fixed.flags.writeable = False
        wide, flat = np.zeros((n, KV_HEADS, DIM + 1), np.float32), np.zeros(n, np.float32)
        for bad in (whole[: n - 1], turned, fixed, wide, flat):
            for pair in ((bad, whole), (whole, bad)):
                with pytest.raises(prefixd.InvalidArgument, match="written in place"):
                    session.restore_into([(whole, whole), pair])
        with pytest.raises(prefixd.InvalidArgument, match="not f32"):
            session.restore_into([(whole.astype(np.float16),) * 2] * LAYERS)
        with pytest.raises(prefixd.InvalidArgument, match="the cache has 1"):
            session.restore_into([(whole, whole)])
        with pytest.raises(prefixd.InvalidArgument, match="not a run"):
            session.restore_into([(whole, whole)] * LAYERS, 0, n + 1)
        assert not whole.any()


def test_rows_can_be_stored_in_half_the_space(tmp_path: Path) -> None:
    prompt = Prompt()
    with prefixd.open(tmp_path, **SMALL) as store:
        store.register_model(spec())
        result = prompt.put(store, encoding="int8")
        assert result.extra["encoding"] == "int8"
        with store.attach("m", prompt.tokens, policy=FULL) as session:
            y, _ = session.step(0, prompt.q[0])
        np.testing.assert_allclose(y, prompt.reference(0, prompt.q[0])[0], atol=0.1)
        with pytest.raises(prefixd.InvalidArgument):
            store.begin_put("m", prompt.tokens, encoding="int3")
