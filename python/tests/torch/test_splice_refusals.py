"""Tests which caches may be stored, which prefixes a model may use, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer

import prefixd
from prefixd.transformers import PrefixCache, Splice
from tests.torch.splicing import CONFIGS, FULL, TINY, make, native, open_store, spliced, tokens


@pytest.fixture
def store(tmp_path: Path) -> Iterator[prefixd.Store]:
    with open_store(tmp_path) as client:
        yield client


class Quantised(QuantizedLayer):
    """Implements transformers' base class, whose own subclasses need packages for their
    arithmetic."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return (tensor * 8).round().to(torch.int8)

    def _dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() / 8


def test_an_ordinary_prefill_can_be_stored_afterwards(store: prefixd.Store) -> None:
    model = make("llama")
    splice = Splice(store, model, policy=FULL)
    prompt = tokens(120)
    with torch.no_grad():
        plain = model(prompt, past_key_values=DynamicCache(config=model.config)).past_key_values
    assert splice.persist(prompt, plain)[0].stored_tokens == 120
    ids = torch.cat([prompt, tokens(4, seed=1)], dim=1)
    with splice.cache(ids) as cache:
        assert cache.attached == [120]
        assert torch.allclose(spliced(model, ids, cache), native(model, ids)[:, 120:], atol=1e-3)
    fixed = StaticCache(config=model.config, max_cache_len=256)
    with torch.no_grad():
        model(prompt, past_key_values=fixed)
    with pytest.raises(prefixd.InvalidArgument, match="StaticLayer"):
        splice.persist(prompt, fixed)
    quantised = Cache(layers=[Quantised(residual_length=32) for _ in model.model.layers])
    with torch.no_grad():
        model(prompt, past_key_values=quantised)
    with pytest.raises(prefixd.InvalidArgument, match="Quantised, whose rows are not those"):
        splice.persist(prompt, quantised)
    window = make("mistral-window")
    with torch.no_grad():
        dropped = window(prompt, past_key_values=DynamicCache(config=window.config)).past_key_values
    with pytest.raises(prefixd.InvalidArgument, match="dropped tokens outside of its window"):
        Splice(store, window).persist(prompt, dropped)


def test_another_models_prefix_is_refused_with_what_differs(store: prefixd.Store) -> None:
    prompt = tokens(100)
    splice = Splice(store, make("llama"))
    with splice.cache(prompt) as cache:
        spliced(splice.model, prompt, cache)
    prefix = cache.stored()[0].prefix
    longer = torch.cat([prompt, tokens(4, seed=1)], dim=1)
    for begins in (longer, prompt):
        splice.cache(begins, prefix=prefix, store=False).close()
    with splice.cache(longer) as cache:
        spliced(splice.model, longer, cache)
    splice.cache(longer, prefix=prefix, store=False).close()  # what continues it is attached
    for not_begins in (torch.cat([prompt[:, :90], tokens(40, seed=2)], dim=1), prompt[:, :90]):
        for _ in range(2):
            with pytest.raises(prefixd.InvalidArgument, match="does not begin with the 100 tokens"):
                splice.cache(not_begins, prefix=prefix)
            with splice.cache(not_begins) as cache:  # a branch that shares some of its tokens
                spliced(splice.model, not_begins, cache)

    rope = copy.deepcopy(CONFIGS["llama"])
    rope.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    other_rope = AutoModelForCausalLM.from_config(rope)
    other_rope.load_state_dict(splice.model.state_dict())
    cases = [
        (make("llama", seed=1), "weights differ"),
        (other_rope, "RoPE settings differ"),
        (make("llama", dtype=torch.bfloat16), "dtype differs.*f32 stored, bf16 here"),
        (make("qwen3"), "architecture differ"),
    ]
    for model, sentence in cases:
        other = Splice(store, model)
        with pytest.raises(prefixd.InvalidArgument, match=sentence):
            other.cache(longer, prefix=prefix)
        with pytest.raises(prefixd.NotFound, match=sentence):
            other.cache(longer, require=True)
        with other.cache(longer, store=False) as nothing:  # an absent prefix is no error here
            assert nothing.attached == [0]
        with pytest.raises(prefixd.AlreadyExists, match=sentence):
            Splice(store, model, name=splice.spec.name)
    with pytest.raises(prefixd.NotFound, match="nothing that begins"):
        splice.cache(tokens(50, seed=9), require=True)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 1024,
            "factor": 2.0,
        },
    ],
)
def test_rope_that_depends_on_the_length_is_refused(rope: dict, store: prefixd.Store) -> None:
    config = copy.deepcopy(CONFIGS["llama"])
    config.rope_parameters = rope
    with pytest.raises(prefixd.InvalidArgument, match=f"'{rope['rope_type']}'.*current length"):
        Splice(store, AutoModelForCausalLM.from_config(config))


def test_feature_maps_of_another_model_are_refused(store: prefixd.Store) -> None:
    maps = [TINY / "phi-2048.safetensors"]
    model = make("prefixd-tiny")
    with pytest.raises(prefixd.InvalidArgument, match="pass checkpoint="):
        Splice(store, model, feature_maps=maps)
    Splice(store, model, feature_maps=maps, checkpoint=TINY)
    with pytest.raises(prefixd.InvalidArgument):
        Splice(store, make("llama"), feature_maps=maps, checkpoint=TINY)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    with pytest.raises(prefixd.InvalidArgument, match="the model was changed since"):
        Splice(store, model, feature_maps=maps, checkpoint=TINY)


class Broken:
    """Stands for a put whose writes fail."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def write(self, *given: Any) -> None:
        raise prefixd.Unavailable("the daemon closed the connection")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def test_a_put_that_fails_is_said_when_it_is_asked_for(store: prefixd.Store) -> None:
    model = make("llama")
    splice = Splice(store, model, policy=FULL)
    ids = tokens(60)
    with splice.cache(ids) as cache:
        spliced(model, ids, cache)
    longer = torch.cat([ids, tokens(20, seed=1)], dim=1)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def ask(then: Callable[[PrefixCache], Any]) -> None:
        with splice.cache(longer) as cache:
            assert cache.recorder is not None
            (put,) = cache.recorder._puts
            assert put is not None
            put.core = Broken(put.core)
            out = model.generate(longer, past_key_values=cache, **options)
            assert torch.equal(out, model.generate(longer, **options))
            sessions.extend(cache.sessions)
            then(cache)

    sessions: list[Any] = []
    for then in (PrefixCache.stored, PrefixCache.persist, lambda cache: None):
        with pytest.raises(prefixd.Unavailable, match="closed the connection"):
            ask(then)
    assert all(session.final_report is not None for session in sessions)
    with pytest.raises(KeyError):  # and does not hide what went wrong in the block
        ask(lambda cache: {}["nothing"])
    assert store.match(splice.spec.name, longer[0]).n_tokens == 60


def test_misuse_is_said(store: prefixd.Store) -> None:
    model = make("llama")
    splice = Splice(store, model)
    ids = tokens(40)
    with splice.cache(ids) as cache:
        with pytest.raises(prefixd.InvalidArgument, match="other tokens at position 0"):
            spliced(model, tokens(40, seed=1), cache)
        with pytest.raises(prefixd.FailedPrecondition, match="not prefilled to its end"):
            cache.stored()
        with pytest.raises(prefixd.InvalidArgument, match="no_grad"):
            model(ids, past_key_values=cache)
    assert store.list_prefixes().prefixes == []  # an unfinished prompt leaves nothing
    with pytest.raises(prefixd.InvalidArgument, match="input_ids"):
        splice.cache(tokens(40)[0])
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(prefixd.FailedPrecondition, match="weights have changed"):
        splice.cache(ids)
