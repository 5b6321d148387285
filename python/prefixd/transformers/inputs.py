"""Checks what a model is given together with a PrefixCache. The cache stores what the model computes under its
prompts' token ids, for everybody: rows of other tokens, at other positions, behind other masks or beside images
must not get there, and stored ones must not serve them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from prefixd.errors import FailedPrecondition, InvalidArgument
from prefixd.transformers import identity
from prefixd.transformers.cache import PrefixCache

# Arguments of a forward pass on which no row depends, or which are checked here. Any other tensor is an input
# that the token ids do not tell.
_KNOWN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "cache_position"}
_KNOWN |= {"labels", "logits_to_keep"}
_TYPES = {"token_type_ids", "mm_token_type_ids"}  # all 0: text
# Parts of a configuration under which it names ids that stand for something else than text.
_MEDIA = ("image", "video", "audio", "vision", "boi", "eoi", "boa", "eoa")


def before_forward(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward hook of the spliced model. Fills in positions and the mask of a padded batch, where they are not
    given."""
    given = _named(module, args, kwargs)
    cache = given.get("past_key_values")
    if not isinstance(cache, PrefixCache):
        return None
    ids = given.get("input_ids")
    if ids is None:
        raise InvalidArgument("a PrefixCache needs input_ids: the tokens of inputs_embeds are not known")
    _check_others(given)
    _check_adapters(module, cache)
    tokens = ids.detach().to("cpu")
    _check_tokens(cache, tokens)
    first, n = cache.get_seq_length(), ids.shape[1]
    pads = torch.tensor(cache.rows.pads).repeat_interleave(len(ids) // len(cache.rows))[:, None]
    given["position_ids"] = _positions(given.get("position_ids"), ids, first, pads)
    given["attention_mask"] = _mask(given.get("attention_mask"), ids, first + n, pads)
    cache.announce(tokens)
    return (), given


def after_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = _named(module, args, kwargs).get("past_key_values")
    if isinstance(cache, PrefixCache) and cache.recorder is not None:
        cache.recorder.commit_finished()


def _named(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments by their names."""
    if not args:
        return dict(kwargs)
    names = inspect.signature(module.forward).parameters
    return dict(zip(names, args, strict=False)) | kwargs


def _check_others(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in _KNOWN or value is None:
            continue
        if name == "adapter_names":
            raise InvalidArgument(
                "adapter_names: the rows of one batch would be of several models; make a Splice for each adapter"
            )
        if name in _TYPES and isinstance(value, torch.Tensor) and not bool(value.any()):
            continue
        if any(isinstance(one, torch.Tensor) for one in _leaves(value)):
            raise InvalidArgument(
                f"{name}: prefixes are stored under their token ids alone, which do not tell this input (images and "
                "sounds of different prompts have the same ids); run such prompts without a PrefixCache"
            )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _check_adapters(module: torch.nn.Module, cache: PrefixCache) -> None:
    # Looking at all modules takes a while, and most models have none.
    if cache.adapters is None and not getattr(module, "_hf_peft_config_loaded", False):
        return
    if identity.adapters(module) != cache.adapters:
        raise FailedPrecondition(
            "adapters of the model were switched, enabled, disabled or scaled since this cache was made; make another "
            "Splice and another cache, so that their rows are not mistaken for these"
        )


def _check_tokens(cache: PrefixCache, ids: torch.Tensor) -> None:
    """Refuses tokens [B, n] that are not those of the prompts, as far as these go."""
    rows, first, n = cache.rows, cache.get_seq_length(), ids.shape[1]
    if len(ids) == 0 or len(ids) % len(rows):
        raise InvalidArgument(f"the cache was made for {len(rows)} prompts, the model was given {len(ids)}")
    if first >= cache.prompt_ids.shape[1]:
        return
    times = len(ids) // len(rows)
    prompts = cache.prompt_ids[rows.prompts].repeat_interleave(times, dim=0)
    pads = torch.tensor(rows.pads).repeat_interleave(times)[:, None]
    if _same(ids, prompts[:, first : first + n], first, pads):
        return
    if first > 0 and _same(ids, prompts[:, :n], 0, pads):
        raise InvalidArgument(
            f"the model was given the first {n} tokens of the prompts, and this cache has their first {first}: give it "
            f"those from {first} on. generate does that by itself, but not with prefill_chunk_size, which cuts whole "
            "prompts, whatever a cache has: leave it out"
        )
    raise InvalidArgument(
        f"the model was given other tokens at position {first} than the prompts that this cache was made for (its "
        "stored beginning would not be theirs)"
    )


def _same(ids: torch.Tensor, expected: torch.Tensor, first: int, pads: torch.Tensor) -> bool:
    """Whether ids [B, n] begin with those expected in the columns from `first` on; the padding's do not count."""
    columns = torch.arange(first, first + expected.shape[1])[None, :]
    return bool(((ids[:, : expected.shape[1]] == expected) | (columns < pads)).all())


def _positions(given: Any, ids: torch.Tensor, first: int, pads: torch.Tensor) -> torch.Tensor:
    """Returns the positions [B, n] of the tokens: row b's token in column c is its prompt's (c - pads[b])th."""
    columns = torch.arange(first, first + ids.shape[1])[None, :]
    own = (columns - pads).clamp(min=0)
    if given is None:
        return own.to(ids.device)
    if not isinstance(given, torch.Tensor) or given.ndim != 2 or given.shape[1] != ids.shape[1]:
        raise InvalidArgument(
            f"position_ids must be [batch, {ids.shape[1]}] with a PrefixCache, or left out: rows are stored by the "
            "positions of a text"
        )
    same = (given.detach().to("cpu") == own) | (columns < pads)
    if not bool(same.all()):
        raise InvalidArgument(
            f"position_ids of the tokens from column {first} on are not those of the cache's prompts, which begin "
            "behind their padding with 0: rows of other positions would be stored, and served to everybody. Leave "
            "position_ids out, and pass generate the same attention_mask as Splice.cache"
        )
    return given


def _mask(given: Any, ids: torch.Tensor, columns: int, pads: torch.Tensor) -> torch.Tensor | None:
    """Returns the mask [B, columns], which hides the padding alone; None where there is none."""
    own = torch.arange(columns)[None, :] >= pads
    if given is None:
        return own.long().to(ids.device) if bool((pads > 0).any()) else None
    if not isinstance(given, torch.Tensor) or given.shape != (len(ids), columns):
        shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise InvalidArgument(
            f"attention_mask must be [{len(ids)}, {columns}] with this PrefixCache, its stored columns and the new "
            f"ones, not {shape}"
        )
    if not torch.equal(given.detach().to("cpu").bool(), own):
        raise InvalidArgument(
            "attention_mask hides other columns than the padding of the prompts that this cache was made for; pass "
            "Splice.cache and generate the same one"
        )
    return given


def pads_of(ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """Returns how many columns of padding each of the prompts [B, T] begins with."""
    if attention_mask is None:
        return [0] * len(ids)
    mask = attention_mask.detach().to("cpu").bool()
    if mask.shape != ids.shape:
        raise InvalidArgument(
            f"attention_mask is {tuple(mask.shape)}, input_ids are {tuple(ids.shape)}"
        )
    pads = (~mask).sum(dim=1)
    left = torch.arange(ids.shape[1])[None, :] >= pads[:, None]
    if not torch.equal(left, mask):
        raise InvalidArgument(
            "prompts must be padded on the left (tokenizer.padding_side = 'left')"
        )
    if int(pads.max()) == ids.shape[1]:
        raise InvalidArgument("a prompt of the batch is empty")
    return [int(pad) for pad in pads]


def check_padding_is_said(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Refuses prompts that seem to be padded, where no mask says so."""
    generation = model.generation_config
    pad = getattr(generation, "pad_token_id", None)
    if pad is None or pad == getattr(generation, "bos_token_id", None):
        return
    padded = (ids[:, 0] == pad).nonzero().flatten().tolist()
    if padded:
        raise InvalidArgument(
            f"prompt {padded[0]} begins with the padding token ({pad}): pass attention_mask, which says where prompts "
            "begin (all 1 where this one does begin with it)"
        )


def check_text(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Refuses prompts with ids that stand for images, sounds or videos."""
    config = model.config
    if config.get_text_config(decoder=True) is config:
        return  # a model of texts, in which all ids are
    for name, value in config.to_dict().items():
        media = name.split("_")[0] in _MEDIA and name.endswith(("_token_id", "_token_index"))
        if media and isinstance(value, int) and bool((ids == value).any()):
            raise InvalidArgument(
                f"the prompt has token {value} ({name}), which stands for something else than text: prefixes are "
                "stored under their token ids alone, which are the same for every image; run it without a PrefixCache"
            )
