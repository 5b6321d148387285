"""Tests stored prompts in Hugging Face models: with a full budget, spliced must equal native."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import prefixd
from prefixd.transformers import Splice
from tests.conftest import ROOT
from tests.torch.splicing import CONFIGS, FULL, make, make_uneven, native, open_store, spliced, tokens


@pytest.fixture
def store(tmp_path: Path) -> Iterator[prefixd.Store]:
    with open_store(tmp_path) as client:
        yield client


@pytest.mark.parametrize("common", [1, 9, 15, 16, 17, 40])
def test_prompts_that_begin_alike_are_stored_however_little_they_share(
    common: int, store: prefixd.Store
) -> None:
    model = make("llama")
    splice = Splice(store, model, policy=FULL)
    start = tokens(common, seed=1)
    for seed in (2, 3):
        ids = torch.cat([start, tokens(60, seed=seed)], dim=1)
        with splice.cache(ids) as cache:
            logits = spliced(model, ids, cache)
        assert torch.allclose(logits[:, -50:], native(model, ids)[:, -50:], atol=1e-3)
        assert store.match(splice.spec.name, ids[0]).n_tokens == 60 + common


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("window", [1, 8])
def test_tokens_beyond_a_window_are_handed_over(batch: int, window: int, store: prefixd.Store) -> None:
    model = make("llama")
    splice = Splice(store, model, policy=prefixd.Policy(mode="full", own_window=window))
    prompts = tokens(60, seed=6, batch=batch)
    with splice.cache(prompts) as cache:
        spliced(model, prompts, cache)
    # A question of 20 tokens, then one token at a time.
    ids = torch.cat([prompts, tokens(70, seed=7, batch=batch)], dim=1)
    want = native(model, ids)
    with splice.cache(ids[:, :80]) as cache:
        assert cache.attached == [60] * batch
        got = [model(ids[:, 60:80], past_key_values=cache).logits]
        for t in range(80, 130):
            got.append(model(ids[:, t : t + 1], past_key_values=cache).logits)
            assert cache.get_seq_length() == t + 1
            assert all(layer.keys.shape[2] == window for layer in cache.layers)
        assert torch.allclose(torch.cat(got, dim=1), want[:, 60:], atol=1e-3)
        assert [s.own_tokens for s in cache.sessions if s is not None] == [70 - window] * batch
        assert cache.recorder is not None and not any(cache.recorder._later)  # memory stays bounded
        with pytest.raises(prefixd.FailedPrecondition, match="own_window"):
            cache.persist()
        with pytest.raises(prefixd.FailedPrecondition, match="own_window"):
            cache.crop(-1)
        with pytest.raises(prefixd.FailedPrecondition, match="own_window"):
            model(ids[:, :2], past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 8])
def test_a_long_question_attends_in_runs(
    window: int | None, store: prefixd.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama")
    splice = Splice(store, model, policy=prefixd.Policy(mode="full", own_window=window))
    prompts = tokens(60, seed=6, batch=2)
    with splice.cache(prompts) as cache:
        spliced(model, prompts, cache)
    runs = []
    attend_exact = prefixd.Session.attend_exact

    def attend(session: prefixd.Session, layer: int, q: torch.Tensor) -> object:
        runs.append(len(q))
        return attend_exact(session, layer, q)

    monkeypatch.setattr(prefixd.Session, "attend_exact", attend)
    ids = torch.cat([prompts, tokens(610, seed=7, batch=2)], dim=1)
    with splice.cache(ids[:, :660], store=False) as cache:
        assert cache.attached == [60, 60]
        got = [spliced(model, ids[:, :660], cache)]
        for t in range(660, 670):
            got.append(model(ids[:, t : t + 1], past_key_values=cache).logits)
    assert torch.allclose(torch.cat(got, dim=1), native(model, ids)[:, 60:], atol=1e-3)
    assert max(runs) == 256 and sum(runs) == 600 * 2 * 2  # rows, layers


@torch.no_grad()
def test_cropped_tokens_are_run_again(store: prefixd.Store) -> None:
    model = make("llama")
    splice = Splice(store, model, policy=FULL)
    prompt = tokens(60, seed=6)
    with splice.cache(prompt) as cache:
        spliced(model, prompt, cache)
    ids = torch.cat([prompt, tokens(30, seed=7)], dim=1)
    want = native(model, ids)
    with splice.cache(ids[:, :70]) as cache:
        model(ids[:, 60:70], past_key_values=cache)
        # Negative: so many tokens go. Positive: so many stay, of the stored ones, too.
        for crop, left in ((-4, 76), (73, 73)):
            model(ids[:, cache.get_seq_length() : 80], past_key_values=cache)
            cache.crop(crop)
            assert cache.get_seq_length() == left
        model(ids[:, 73:80], past_key_values=cache)
        for nothing in (0, 80, 200):
            cache.crop(nothing)
            assert cache.get_seq_length() == 80
        for crop in (-21, 59):
            with pytest.raises(prefixd.FailedPrecondition, match="cannot be cropped"):
                cache.crop(crop)
        got = model(ids[:, 80:], past_key_values=cache).logits
        assert torch.allclose(got, want[:, 80:], atol=1e-3)
        assert cache.persist()[0].n_tokens == 90
    assert store.match(splice.spec.name, ids[0]).n_tokens == 90


@torch.no_grad()
def test_a_refused_crop_leaves_layers_that_slide_as_they_are(store: prefixd.Store) -> None:
    model = make("gemma2")  # its first layer slides, and could be cropped further
    splice = Splice(store, model, policy=FULL)
    ids = tokens(28, seed=8)
    want = native(model, ids)
    with splice.cache(ids[:, :20]) as cache:
        spliced(model, ids[:, :20], cache)
    with splice.cache(ids[:, :22]) as cache:
        model(ids[:, 20:25], past_key_values=cache)
        with pytest.raises(prefixd.FailedPrecondition, match="cannot be cropped"):
            cache.crop(-10)
        assert [layer.get_seq_length() for layer in cache.layers] == [25] * len(cache.layers)
        got = model(ids[:, 25:], past_key_values=cache).logits
    assert torch.allclose(got, want[:, 25:], atol=1e-3)


def test_beams_hand_tokens_over_each_to_its_own(store: prefixd.Store) -> None:
    model = make("llama")
    splice = Splice(store, model, policy=prefixd.Policy(mode="full", own_window=4))
    ids = tokens(70, seed=8)
    with splice.cache(ids[:, :60]) as cache:
        spliced(model, ids[:, :60], cache)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = copy.deepcopy(model).generate(ids, num_beams=3, **options)
    with splice.cache(ids, store=False) as cache:
        assert torch.equal(model.generate(ids, past_key_values=cache, num_beams=3, **options), want)


def test_a_window_is_refused_where_tokens_cannot_be_handed_over(store: prefixd.Store) -> None:
    ids = tokens(40, seed=9)
    with pytest.raises(prefixd.InvalidArgument, match="at least 1"):
        Splice(store, make("llama"), policy=prefixd.Policy(own_window=0)).cache(ids)
    with pytest.raises(prefixd.InvalidArgument, match="sliding"):
        Splice(store, make("mistral-window"), policy=prefixd.Policy(own_window=4)).cache(ids)


def test_layers_may_differ_in_their_heads(tmp_path: Path) -> None:
    ids = tokens(300, seed=4)
    more = torch.cat([ids, tokens(6, seed=5)], dim=1)
    with open_store(tmp_path) as store:
        splice = Splice(store, make_uneven())
        shapes = [splice.spec.shape(layer) for layer in range(3)]
        assert [(own.n_q_heads, own.n_kv_heads) for own in shapes] == [(4, 2), (4, 1), (2, 2)]
        with splice.cache(ids) as cache:
            logits = spliced(splice.model, ids, cache)
        assert torch.allclose(logits, native(splice.model, ids), atol=1e-3)
        assert cache.stored()[0].stored_tokens == 300
    with open_store(tmp_path) as store:
        splice = Splice(store, make_uneven(), policy=FULL)
        with splice.cache(more, store=False) as cache:
            assert cache.attached == [300]
            got = spliced(splice.model, more, cache)
        assert torch.allclose(got, native(splice.model, more)[:, 300:], atol=1e-3)


LENGTHS = [1, 2, 15, 16, 17, 33, 300]


@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        ("llama", [*LENGTHS, 4096]),
        ("llama3-rope", [300]),
        ("qwen3", [*LENGTHS, 4096]),
        ("mistral", [*LENGTHS, 4096]),
        ("mistral-window", [*LENGTHS, 4096]),
        ("gemma2", [*LENGTHS, 4096]),
        ("gemma3", [*LENGTHS, 4096]),
        ("prefixd-tiny", [*LENGTHS, 4096]),
    ],
)
def test_spliced_logits_are_native_across_a_restart(
    family: str, lengths: list[int], tmp_path: Path
) -> None:
    model = make(family)
    prompts = {n: tokens(n, seed=n) for n in lengths}
    with open_store(tmp_path) as store:
        splice = Splice(store, model)
        for ids in prompts.values():
            with splice.cache(ids) as cache:
                assert cache.attached == [0]
                logits = spliced(model, ids, cache)  # this prefill stores the prompt
            assert torch.allclose(logits, native(model, ids), atol=1e-3)
            assert cache.stored()[0].stored_tokens == ids.shape[1]
    with open_store(tmp_path) as store:
        splice = Splice(store, make(family), policy=FULL)  # loads the same weights again
        for n, prompt in prompts.items():
            ids = torch.cat([prompt, tokens(5, seed=n + 1)], dim=1)
            with splice.cache(ids, store=False) as cache:
                assert cache.attached == [n]
                more = torch.cat([ids, tokens(3, seed=n + 2)], dim=1)
                want = native(splice.model, more)
                got = spliced(splice.model, ids, cache)  # the question in one block ...
                assert torch.allclose(got, want[:, n : n + 5], atol=1e-3), n
                for t in range(ids.shape[1], more.shape[1]):  # ... and decoding, token by token
                    with torch.no_grad():
                        got = splice.model(more[:, t : t + 1], past_key_values=cache).logits
                    assert torch.allclose(got[:, 0], want[:, t], atol=1e-3), (n, t)


def test_the_comparison_above_can_fail() -> None:
    """Checks that the prefix changes the output far more than the tolerance, on every family."""
    for family in CONFIGS:
        model = make(family)
        ids = tokens(300)
        alone = native(model, ids[:, -5:])
        assert (alone - native(model, ids)[:, -5:]).abs().max() > 0.1, family


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "mistral", "mistral-window", "gemma2", "gemma3", "prefixd-tiny"]
)
def test_generate_gives_the_same_tokens(family: str, store: prefixd.Store) -> None:
    model = make(family)
    prompt, question = tokens(200), tokens(9, seed=1)
    ids = torch.cat([prompt, question], dim=1)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(ids, **options)
    splice = Splice(store, model, policy=FULL)
    with splice.cache(prompt) as cache:
        model.generate(prompt, past_key_values=cache, max_new_tokens=1, pad_token_id=0)
    with splice.cache(ids) as cache:
        assert cache.attached == [200]
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), want)
    with splice.cache(ids) as cache:
        assert cache.attached == [208]  # the question was stored, too; the last token always runs
        beams = model.generate(ids, past_key_values=cache, num_beams=3, **options)
    assert torch.equal(beams, copy.deepcopy(model).generate(ids, num_beams=3, **options))
    with splice.cache(ids) as cache:
        torch.manual_seed(5)
        several = model.generate(
            ids, past_key_values=cache, **{**options, "do_sample": True}, num_return_sequences=2
        )
    torch.manual_seed(5)
    assert torch.equal(
        several, model.generate(ids, **{**options, "do_sample": True}, num_return_sequences=2)
    )
    # The prefill may be cut where nothing is attached. Transformers 5.19 gives a cache the tokens that it has
    # already. They are refused, with the reason.
    other = tokens(31, seed=3)
    with splice.cache(other) as cache:
        assert cache.attached == [0]
        chunked = model.generate(other, past_key_values=cache, prefill_chunk_size=4, **options)
    assert torch.equal(chunked, model.generate(other, **options))
    with splice.cache(ids) as cache, pytest.raises(
        prefixd.InvalidArgument, match="first 4 tokens.*has their first 208.*prefill_chunk_size"
    ):
        model.generate(ids, past_key_values=cache, prefill_chunk_size=4, **options)
    longer = torch.cat([ids, tokens(20, seed=4)], dim=1)
    with splice.cache(longer) as cache, torch.no_grad():
        for piece in longer[:, cache.get_seq_length() : -1].split(7, 1):
            model(piece, past_key_values=cache)
        cut = model.generate(longer, past_key_values=cache, **options)
    assert torch.equal(cut, model.generate(longer, **options))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_batch_of_prompts_of_different_lengths(family: str, store: prefixd.Store) -> None:
    model = make(family)
    document = tokens(150)[0]
    others = tokens(90, seed=7)[0]
    rows = [
        torch.cat([document, tokens(12, seed=2)[0]]),
        torch.cat([document, tokens(3, seed=3)[0]]),
        torch.cat([others, tokens(30, seed=4)[0]]),
    ]
    width = max(map(len, rows))
    ids = torch.zeros(3, width, dtype=torch.long)
    mask = torch.zeros(3, width, dtype=torch.long)
    for b, row in enumerate(rows):
        ids[b, width - len(row) :], mask[b, width - len(row) :] = row, 1
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(ids, attention_mask=mask, **options)
    splice = Splice(store, model, policy=FULL)
    for text in (document, others):
        with splice.cache(text[None]) as cache:
            spliced(model, text[None], cache)
    with splice.cache(ids, mask) as cache:
        # The stored parts end at one column: the third row's, 42 + 90.
        assert cache.attached == [132, 123, 90]
        got = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
        assert torch.equal(got, want)
    assert all(result.stored_tokens > 0 for result in cache.stored())
    with splice.cache(ids, mask) as cache:
        assert cache.attached == [161, 152, 119]
    with pytest.raises(prefixd.InvalidArgument, match="padded on the left"):
        splice.cache(ids.flip(1), mask.flip(1))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_conversation_goes_on_in_new_segments(family: str, store: prefixd.Store) -> None:
    model = make(family)
    Splice(store, model)
    splice = Splice(store, model, policy=FULL)  # a second splice changes nothing
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids, lengths = tokens(60), []
    for turn in range(3):
        with splice.cache(ids) as cache:
            lengths.append(cache.attached[0])
            out = model.generate(ids, past_key_values=cache, **options)
            assert torch.equal(out, model.generate(ids, **options))
            result = cache.persist()[0]
            assert result.n_tokens == out.shape[1] - 1 and result.stored_tokens == 39
        ids = torch.cat([out, tokens(20, seed=turn + 1)], dim=1)
    assert lengths == [0, 99, 159]
    chain = store.prefix(result.prefix)
    assert chain["summary"]["n_tokens"] == 219 and store.verify()["damaged"] == []


def test_what_is_generated_under_a_budget_serves_its_own_conversation(store: prefixd.Store) -> None:
    model = make("llama")
    splice = Splice(store, model, policy=prefixd.Policy(budget=0.01, estimator="none"))
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = tokens(4000)
    with splice.cache(prompt) as cache:
        spliced(model, prompt, cache)
        assert not cache.derived  # nothing was stored to attach to
    ids = torch.cat([prompt, tokens(20, seed=1)], dim=1)
    with splice.cache(ids) as cache:
        assert cache.attached == [4000]
        out = model.generate(ids, past_key_values=cache, **options)
        result, lineage = cache.persist()[0], cache.lineage
        assert cache.derived and result.lineage == lineage
        assert result.n_tokens == 4049 and result.exact_tokens == 4020
        assert cache.stored()[0].lineage == ""  # the question attended exactly
    ids = torch.cat([out, tokens(20, seed=2)], dim=1)
    assert store.match(splice.spec.name, ids[0]).n_tokens == 4020
    with splice.cache(ids, policy=FULL, store=False) as cache:
        assert cache.attached == [4020]
        got = spliced(model, ids, cache)
    assert torch.allclose(got, native(model, ids)[:, 4020:], atol=1e-3)
    with splice.cache(ids, accept_approximate=True, store=False) as cache:
        assert cache.attached == [4049] and cache.derived
    # The next turn has the lineage: its rows are derived too, whatever its own policy.
    with splice.cache(ids, policy=FULL, lineage=lineage) as cache:
        assert cache.attached == [4049] and cache.derived and cache.lineage == lineage
        spliced(model, ids, cache)
    assert cache.stored()[0].lineage == lineage
    assert store.match(splice.spec.name, ids[0]).n_tokens == 4020
    with splice.cache(ids, policy=FULL) as cache:  # exact rows of the same tokens
        spliced(model, ids, cache)
    assert cache.stored()[0].stored_tokens == ids.shape[1] - 4020
    assert store.match(splice.spec.name, ids[0]).n_tokens == ids.shape[1]


def test_a_prompt_that_attends_under_a_budget_is_derived(store: prefixd.Store) -> None:
    model = make("llama")
    splice = Splice(store, model, policy=prefixd.Policy(k=8, estimator="none"))
    ids = tokens(120)
    with splice.cache(ids[:, :100], exact_prompt=False) as cache:
        spliced(model, ids[:, :100], cache)
    assert cache.stored()[0].lineage == ""  # there was nothing to attend to
    with splice.cache(ids, exact_prompt=False) as cache:
        spliced(model, ids, cache)
    assert cache.stored()[0].lineage == cache.lineage
    assert store.match(splice.spec.name, ids[0]).n_tokens == 100
    assert store.match(splice.spec.name, ids[0], lineage=cache.lineage).n_tokens == 120


def test_decoding_reads_a_part_and_the_question_everything(store: prefixd.Store) -> None:
    model = make("prefixd-tiny")
    splice = Splice(store, model, policy=prefixd.Policy(k=40, estimator="moment"))
    text = (ROOT / "README.md").read_bytes()[:1500]
    prompt = torch.tensor([[1, *text]]) % model.config.vocab_size
    with splice.cache(prompt) as cache:
        spliced(model, prompt, cache)
    store.wait_ready(cache.stored()[0].prefix)
    ids = torch.cat([prompt, prompt[:, 100:110]], dim=1)
    want = native(model, torch.cat([ids, prompt[:, 110:111]], dim=1))
    with splice.cache(ids, store=False) as cache:
        got = spliced(model, ids, cache)
        assert torch.allclose(got, want[:, -11:-1], atol=1e-3)  # exact
        total = cache.reports()[0]["total"]
        assert total["steps"] == 0 and total["logical_bytes"] > 0
        with torch.no_grad():
            got = model(prompt[:, 110:111], past_key_values=cache).logits[0, -1]
        total = cache.reports()[0]["total"]
        heads = model.config.num_key_value_heads * model.config.num_hidden_layers
        assert total["steps"] == heads and total["retrieved_tokens"] == 40 * heads
    shown, whole = got.softmax(-1), want[0, -1].softmax(-1)
    assert 0 < (shown - whole).abs().sum() < 0.5  # an estimate that is close


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, store: prefixd.Store) -> None:
    model = make("llama", dtype=dtype)
    splice = Splice(store, model, policy=FULL)
    prompt, ids = tokens(200), torch.cat([tokens(200), tokens(6, seed=1)], dim=1)
    with splice.cache(prompt) as cache:
        spliced(model, prompt, cache)
    with splice.cache(ids) as cache:
        assert cache.attached == [200]
        got = spliced(model, ids, cache).float()
    want = native(model, ids)[:, 200:].float()
    assert (got - want).abs().max() < 0.1 * want.abs().max()
    assert splice.spec.dtype == ("bf16" if dtype == torch.bfloat16 else "f16")


def test_a_missing_budget_is_everything_on_short_prompts(store: prefixd.Store) -> None:
    model = make("llama")
    splice = Splice(store, model)
    with splice.cache(tokens(100)) as cache:
        spliced(model, tokens(100), cache)
    ids = torch.cat([tokens(100), tokens(3, seed=1)], dim=1)
    with splice.cache(ids) as cache:
        assert cache.sessions[0].policy["mode"] == "full"
    with pytest.raises(prefixd.Infeasible):
        splice.cache(ids, policy=prefixd.Policy(budget=0.01))
