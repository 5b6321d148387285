"""Tests what a spliced model may be given: rows are stored for everybody, so that those of other positions, masks,
adapters or inputs must not get there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

import prefixd
from prefixd.transformers import PrefixCache, Splice
from tests.torch.splicing import CONFIGS, FULL, VOCAB, make, native, open_store, spliced, tokens

PAD = 9  # not the model's padding token, so that generate infers no mask of its own


@pytest.fixture
def store(tmp_path: Path) -> Iterator[prefixd.Store]:
    with open_store(tmp_path) as opened:
        yield opened


def batch(seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Returns two prompts, and their left-padded batch with its mask."""
    prompts = [tokens(40, seed=seed)[0], tokens(27, seed=seed + 1)[0]]
    ids, mask = torch.full((2, 40), PAD), torch.zeros(2, 40, dtype=torch.long)
    for b, prompt in enumerate(prompts):
        ids[b, 40 - len(prompt) :], mask[b, 40 - len(prompt) :] = prompt, 1
    return prompts, ids, mask


@torch.no_grad()
def check_stored(store: prefixd.Store, splice: Splice, model: PreTrainedModel, prompt: torch.Tensor) -> None:
    """Compares what is stored of a prompt with what the model computes for it alone."""
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    cache = DynamicCache()
    own(prompt[None], past_key_values=cache)
    with store.attach(splice.spec.name, prompt, policy=FULL) as session:
        assert session.n_tokens == len(prompt)
        for layer, computed in enumerate(cache.layers):
            for head in range(computed.keys.shape[1]):
                k, v = session.read_range(layer, head, 0, len(prompt)).torch()
                torch.testing.assert_close(k, computed.keys[0, head], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(v, computed.values[0, head], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_positions_and_mask_of_a_padded_batch_are_its_prompts_own(family: str, store: prefixd.Store) -> None:
    model = make(family)
    splice = Splice(store, model, policy=FULL)
    prompts, ids, mask = batch()
    want = native(model, ids, mask)
    with splice.cache(ids, mask) as cache, torch.no_grad():
        logits = model(ids, past_key_values=cache).logits  # neither positions nor mask
        assert (logits[:, -1] - want[:, -1]).abs().max() < 1e-3
    for prompt in prompts:
        check_stored(store, splice, model, prompt)
    # Behind the stored part, and by position in the call.
    with splice.cache(ids, mask) as cache, torch.no_grad():
        assert cache.attached == [39, 26]
        logits = model(ids[:, 39:], mask, None, cache).logits
        assert (logits[:, -1] - want[:, -1]).abs().max() < 1e-3


@torch.no_grad()
def test_other_positions_and_masks_are_refused_and_not_stored(store: prefixd.Store) -> None:
    model = make("llama")
    splice = Splice(store, model, policy=FULL)
    prompts, ids, mask = batch()
    columns = torch.arange(40)[None, :]
    own = (mask.cumsum(1) - 1).clamp(min=0)
    wrong: dict[str, dict[str, Any]] = {
        "position_ids of": {"position_ids": columns},  # a forward pass without any makes these
        "position_ids must": {"position_ids": own[None].expand(3, -1, -1)},
        "hides other columns": {"attention_mask": torch.ones_like(mask)},
        r"attention_mask must be \[2, 40\]": {"attention_mask": mask[:, 1:]},
        "attention_mask must": {"attention_mask": mask[:, None, None, :].bool()},
    }
    for why, given in wrong.items():
        cache = splice.cache(ids, mask)
        with pytest.raises(prefixd.InvalidArgument, match=why):
            model(ids, past_key_values=cache, **given)
        cache.close(abort=True)
    # The mask went to the cache alone, and generate takes all columns for tokens.
    cache = splice.cache(ids, mask)
    with pytest.raises(prefixd.InvalidArgument, match="same attention_mask"):
        model.generate(ids, past_key_values=cache, max_new_tokens=2)
    cache.close(abort=True)
    for prompt in prompts:
        assert store.match(splice.spec.name, prompt).n_tokens == 0
    with splice.cache(ids, mask) as cache:
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)
    for prompt in prompts:
        check_stored(store, splice, model, prompt)


@torch.no_grad()
def test_a_part_of_the_model_is_refused(store: prefixd.Store) -> None:
    model = make("llama")
    splice = Splice(store, model, policy=FULL)
    ids = tokens(30)
    cache = splice.cache(ids)
    with pytest.raises(prefixd.InvalidArgument, match="a part of it"):
        model.model(tokens(30, seed=5), past_key_values=cache)
    cache.close(abort=True)
    assert store.match(splice.spec.name, ids[0]).n_tokens == 0


@torch.no_grad()
def test_a_padded_cache_is_stored_by_its_prompts(store: prefixd.Store) -> None:
    model = make("llama")
    splice = Splice(store, model, policy=FULL)
    prompts, ids, mask = batch()
    cache = DynamicCache()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    results = splice.persist(ids, cache, mask)
    assert [result.n_tokens for result in results] == [40, 27]
    for prompt in prompts:
        assert store.match(splice.spec.name, prompt).n_tokens == len(prompt)
        check_stored(store, splice, model, prompt)
    # Prompts whose padding nobody speaks of could never be found.
    ids[mask == 0] = model.generation_config.pad_token_id
    with pytest.raises(prefixd.InvalidArgument, match="prompt 1 begins with the padding token"):
        splice.persist(ids, cache)
    with pytest.raises(prefixd.InvalidArgument, match="holds 2 prompts"):
        splice.persist(ids[:1], cache, mask[:1])


class Adapted(torch.nn.Module):
    """A linear layer with PEFT's low-rank adapters, as far as the flags and the sum go."""

    def __init__(self, base: torch.nn.Linear, names: list[str]) -> None:
        super().__init__()
        self.base = base
        self.out_features = base.out_features
        self._active_adapter = names[:1]
        self._disable_adapters = False
        self.scaling = dict.fromkeys(names, 1.0)
        self.adapters = torch.nn.ParameterDict(
            {name: 0.3 * torch.randn(base.out_features, base.in_features) for name in names}
        )

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        for name in [] if self._disable_adapters else self._active_adapter:
            y = y + self.scaling[name] * (x @ self.adapters[name].T)
        return y


@torch.no_grad()
def test_adapters_are_told_apart_by_what_the_layers_apply(store: prefixd.Store) -> None:
    model = make("llama")
    torch.manual_seed(1)
    adapted = []
    for layer in model.model.layers:
        layer.self_attn.k_proj = Adapted(layer.self_attn.k_proj, ["one", "two"])
        adapted.append(layer.self_attn.k_proj)
    ids = tokens(50)
    splice = Splice(store, model, policy=FULL)
    with splice.cache(ids) as cache:
        spliced(model, ids, cache)
    check_stored(store, splice, model, ids[0])

    def switch(**flags: Any) -> None:
        for module in adapted:
            for name, value in flags.items():
                setattr(module, name, value)

    ways = {
        "switched": {"_active_adapter": ["two"]},
        "disabled": {"_disable_adapters": True},
        "scaled": {"scaling": {"one": 0.5, "two": 1.0}},
    }
    names = {splice.spec.name}
    for way, flags in ways.items():
        before = {name: getattr(adapted[0], name) for name in flags}
        begun = splice.cache(ids)  # a model that was changed in between
        switch(**flags)
        with pytest.raises(prefixd.FailedPrecondition, match="adapters"):
            spliced(model, ids, begun)
        begun.close(abort=True)
        with pytest.raises(prefixd.FailedPrecondition, match="adapters have changed"):
            splice.cache(ids)
        other = Splice(store, model, policy=FULL)
        names.add(other.spec.name)
        with other.cache(ids) as cache:
            assert cache.attached == [0], f"rows of another adapter serve one that was {way}"
            spliced(model, ids, cache)
        check_stored(store, other, model, ids[0])
        switch(**before)
    assert len(names) == 4
    with splice.cache(ids) as cache:
        assert cache.attached == [49]
    # One layer alone, too.
    adapted[0]._disable_adapters = True
    assert Splice(store, model).spec.name not in names


IMAGE, BEGIN = VOCAB - 1, VOCAB - 2


def make_multimodal() -> PreTrainedModel:
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=copy.deepcopy(CONFIGS["gemma3"]),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
    )
    return Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()


@torch.no_grad()
def test_inputs_beside_the_tokens_are_refused(store: prefixd.Store) -> None:
    model = make_multimodal()
    splice = Splice(store, model, policy=FULL)
    ids = tokens(40).clamp(max=BEGIN - 1)
    want = copy.deepcopy(model)(ids).logits
    with splice.cache(ids) as cache:  # a text serves as with any model
        assert (model(ids, past_key_values=cache).logits - want).abs().max() < 1e-3
    with splice.cache(ids) as cache:
        assert cache.attached == [39]
        assert (spliced(model, ids, cache)[:, -1] - want[:, -1]).abs().max() < 1e-3
    for token in (IMAGE, BEGIN):
        image = ids.clone()
        image[0, 5] = token
        with pytest.raises(prefixd.InvalidArgument, match="something else than text"):
            splice.cache(image)
        with pytest.raises(prefixd.InvalidArgument, match="something else than text"):
            splice.persist(image, DynamicCache())
    other = tokens(40, seed=2).clamp(max=BEGIN - 1)
    pixels = torch.randn(1, 3, 28, 28)
    for given in ({"pixel_values": pixels}, {"mm_encoder_outputs": [pixels]}, {"token_type_ids": torch.ones_like(ids)}):
        cache = splice.cache(other)
        with pytest.raises(prefixd.InvalidArgument, match=next(iter(given))):
            model(other, past_key_values=cache, **given)
        cache.close(abort=True)
    assert store.match(splice.spec.name, other[0]).n_tokens == 0


@torch.no_grad()
@pytest.mark.parametrize("kept", [[0, 2], [2, 0], [1, 2, 0]])
def test_rows_that_are_selected_go_on(kept: list[int], store: prefixd.Store) -> None:
    model = make("llama")
    splice = Splice(store, model, policy=FULL)
    start = tokens(150, seed=1)
    with splice.cache(start) as cache:
        spliced(model, start, cache)

    def move(cache: PrefixCache) -> None:
        indices = torch.tensor(kept)
        if len(kept) == 3:
            cache.reorder_cache(indices)
        else:
            cache.batch_select_indices(indices)

    # Behind the prompts' end, ...
    ids = torch.cat([start.expand(3, -1), tokens(30, seed=2, batch=3)], dim=1)
    want = native(model, ids)[kept]
    with splice.cache(ids[:, :170]) as cache:
        assert cache.attached == [150] * 3
        spliced(model, ids[:, :170], cache)
        move(cache)
        for t in range(170, 180):
            got = model(ids[kept, t : t + 1], past_key_values=cache).logits
            assert torch.allclose(got[:, 0], want[:, t], atol=1e-3)
        assert [put.n_tokens for put in cache.stored() if put is not None] == [170] * 3
    # ... and before it: whose rows are no longer theirs are not stored under their tokens.
    ids = torch.cat([start.expand(3, -1), tokens(30, seed=3, batch=3)], dim=1)
    want = native(model, ids)[kept]
    with splice.cache(ids) as cache:
        model(ids[:, 150:160], past_key_values=cache)
        move(cache)
        with pytest.raises(prefixd.InvalidArgument, match="other tokens at position 160"):
            model(ids[kept[::-1], 160:170], past_key_values=cache)
        got = model(ids[kept, 160:], past_key_values=cache).logits
        assert torch.allclose(got, want[:, 160:], atol=1e-3)
        with pytest.raises(prefixd.FailedPrecondition, match="not prefilled to its end"):
            cache.stored()
    assert [store.match(splice.spec.name, row).n_tokens for row in ids] == [150] * 3
