"""Joins one model and one store: makes caches whose beginnings are stored."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from prefixd.errors import AlreadyExists, FailedPrecondition, Infeasible, InvalidArgument, NotFound
from prefixd.estimate import EngineSpeed
from prefixd.model import ModelSpec, Policy
from prefixd.put import Put, PutResult
from prefixd.session import PolicyLike, Session
from prefixd.store import PrefixMatch, Store
from prefixd.transformers import attention, identity, inputs
from prefixd.transformers.cache import PrefixCache
from prefixd.transformers.plain_cache import plain_layers
from prefixd.transformers.recorder import Recorder
from prefixd.transformers.rows import Rows

# What sessions keep in memory of the tokens that are handed over to them (Policy.own_window).
OWN_MEMORY_TOKENS = 4096

logger = logging.getLogger("prefixd.transformers")


class Splice:
    """Registers the model with the store and makes it attend through prefixd. Without a PrefixCache
    the model works as before (as with "sdpa").

    policy: how steps read while decoding; None is the store's default budget, and everything where a
      prefix is too short for a budget to pay for its anchors.
    name: the model's name in the store; by default family and fingerprint.
    checkpoint: its directory, needed with `feature_maps`.
    prefill_tokens_per_second: how fast the model prefills here, for estimates (PrefixCache.estimates); 0: as
      the store has learnt from prompts that were stored while they were prefilled."""

    def __init__(
        self,
        store: Store,
        model: PreTrainedModel,
        *,
        name: str | None = None,
        policy: PolicyLike | None = None,
        tenant: str = "",
        checkpoint: str | Path | None = None,
        feature_maps: Sequence[str | Path] = (),
        prefill_tokens_per_second: float = 0.0,
    ) -> None:
        self.store = store
        self.model = model
        self.policy = policy
        self.tenant = tenant
        self.engine = EngineSpeed(prefill_tokens_per_second)
        self.spec = identity.describe(model, name, feature_maps, checkpoint)
        try:
            store.register_model(self.spec)
        except AlreadyExists as error:
            stored = self._stored_spec(self.spec.name)
            raise AlreadyExists(
                f"the store has another model named '{self.spec.name}': "
                f"{identity.differences(stored, self.spec) if stored else error}"
            ) from None
        attention.register()
        model.set_attn_implementation(attention.NAME)
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != attention.NAME:
            raise InvalidArgument(
                f"{type(model).__name__} does not take its attention from AttentionInterface, so nothing "
                "can be spliced into it"
            )
        # The hooks are registered once, even if a model is spliced with several stores.
        if inputs.before_forward not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(inputs.before_forward, with_kwargs=True)
            model.register_forward_hook(inputs.after_forward, with_kwargs=True)

    # ---- caches ----

    def cache(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        policy: PolicyLike | None = None,
        prefix: str | None = None,
        require: bool = False,
        exact_prompt: bool = True,
        store: bool = True,
        label: str = "",
        pinned: bool = False,
        ttl_seconds: int = 0,
        lineage: str = "",
        accept_approximate: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> PrefixCache:
        """A cache for these prompts [B, T], left-padded where attention_mask is 0, to be given to
        `generate` together with them and the same mask, or to the model, which may be given no position_ids
        and no mask: they are then the prompts' own. Other tokens, positions or masks are refused, and inputs
        beside the tokens (images, sounds). Each row attends to the longest stored prefix that all rows' stored
        parts reach (one row without any leaves nothing to attach to).

        prefix: the id of a prefix that must be used: refused when another model stored it or when the
          prompts do not begin with it. require: NotFound when nothing is attached.
        exact_prompt: the prompts' new tokens attend to the stored part exactly, and what is generated as
          the policy says; False: the policy holds for all of them (to measure it on a given text).
        store: the prompts' new tokens are stored while they are prefilled; label, pinned and ttl_seconds are
          theirs.
        lineage: of the cache whose conversation this one continues (PrefixCache.lineage), to attach to what
          it generated under a budget, too. accept_approximate: to such rows of anybody."""
        self._check_weights()
        ids = input_ids.detach().to("cpu")
        if ids.ndim != 2 or ids.numel() == 0:
            raise InvalidArgument(f"input_ids must be [batch, tokens], not {tuple(ids.shape)}")
        pads = inputs.pads_of(ids, attention_mask)
        inputs.check_text(self.model, ids)
        if prefix is not None:
            detail = self.check_prefix(prefix)
            for row, pad in zip(ids, pads, strict=True):
                self._check_begins(row[pad:], prefix, detail, accept_approximate, lineage)
        # The model always runs the last token, because its logits are needed.
        matches = [
            self.store.match(
                self.spec.name,
                row[pad:-1],
                tenant=self.tenant,
                accept_approximate=accept_approximate,
                lineage=lineage,
                engine=self.engine,
            )
            for row, pad in zip(ids, pads, strict=True)
        ]
        lineage = lineage or secrets.token_hex(16)  # of all rows that this cache derives
        wanted = policy if policy is not None else self.policy
        own_window = self._own_window(wanted)
        derived = any(match.derived for match in matches) or (
            not exact_prompt
            and not _reads_everything(wanted)
            and any(match.n_tokens > 0 for match in matches)
        )

        def begin_put(tokens: Sequence[int], derived: bool, lineage: str, prefills: bool) -> Put:
            return self.store.begin_put(
                self.spec.name,
                list(tokens),
                tenant=self.tenant,
                label=label,
                pinned=pinned,
                ttl_seconds=ttl_seconds,
                derived=derived,
                accept_approximate=accept_approximate,
                lineage=lineage,
                prefill_from=0 if prefills else None,
                progress=progress,
            )

        recorder = None
        if store:
            pad_token = getattr(self.model.generation_config, "pad_token_id", None)
            recorder = Recorder(
                len(self.spec.layers), ids, pads, begin_put, pad_token, derived, lineage
            )
        try:
            ends = [pad + match.n_tokens for pad, match in zip(pads, matches, strict=True)]
            if recorder is not None:
                # A put may begin before the end of the stored part: a short beginning that two
                # prompts share is stored twice, so that one prompt does not depend on the other.
                missing = zip(ends, recorder.first_missing(), strict=True)
                ends = [min(end, first) for end, first in missing]
            columns = min(ends)
            sessions = self._attach(matches, pads, columns, wanted)
            if own_window is not None and any(session is None for session in sessions):
                own_window = None  # there is no session to hand tokens over to
            if own_window is not None and recorder is not None:
                recorder.end_conversation(
                    "own_window: rows of the answer were handed over and are not kept for persist; "
                    "leave own_window out, or put the conversation as the next prompt"
                )
            if all(session is None for session in sessions):
                columns = 0
                if require or prefix is not None:
                    raise NotFound(self._why_nothing(ids, pads))
        except BaseException:
            if recorder is not None:
                recorder.close(abort=True)
            raise
        rows = Rows(
            sessions, pads, columns, ids.shape[1] if exact_prompt else columns, own_window
        )
        cache = PrefixCache(self.spec, rows, recorder, self.model.device, lineage)
        cache.prompt_ids = ids
        cache.adapters = self.spec.identity.get("adapter")
        cache.estimates = [match.estimate for match in matches]
        return cache

    def persist(
        self,
        input_ids: torch.Tensor,
        past_key_values: Cache,
        attention_mask: torch.Tensor | None = None,
        *,
        label: str = "",
        pinned: bool = False,
    ) -> list[PutResult]:
        """Stores the prompts [B, T], left-padded where attention_mask is 0, of an ordinary DynamicCache that
        holds every column of them (after a prefill of text without a PrefixCache). The model must have been
        given the same mask, and positions that begin with 0 behind the padding, as generate makes them of it: a
        cache does not tell. Caches that dropped or quantised tokens are refused, and prompts that begin with
        the padding token without a mask."""
        self._check_weights()
        ids = input_ids.detach().to("cpu")
        if attention_mask is None:
            inputs.check_padding_is_said(self.model, ids)
        pads = inputs.pads_of(ids, attention_mask)
        inputs.check_text(self.model, ids)
        layers = plain_layers(past_key_values, self.spec, *ids.shape)
        results = []
        for b, (row, pad) in enumerate(zip(ids, pads, strict=True)):
            with self.store.begin_put(
                self.spec.name, row[pad:], tenant=self.tenant, label=label, pinned=pinned
            ) as put:
                part = slice(pad + put.missing.start, pad + put.missing.stop)
                for index, (keys, values) in enumerate(layers):
                    k, v = (t[b, :, part].transpose(0, 1) for t in (keys, values))
                    put.write(index, put.missing.start, k, v)
            results.append(put.result())
        return results

    def check_prefix(self, prefix: str) -> dict[str, Any]:
        """Refuses a prefix that another model stored, naming what differs. Returns what the store says of it."""
        detail = self.store.prefix(prefix)
        name = detail["summary"]["model"]
        if name == self.spec.name:
            return detail
        stored = self._stored_spec(name)
        what = (
            identity.differences(stored, self.spec) if stored else "it is not registered any more"
        )
        raise InvalidArgument(
            f"prefix {prefix} was stored by model '{name}', which is not this one ('{self.spec.name}'): "
            f"{what or 'only its name differs'}"
        )

    # ---- inside ----

    def _check_begins(
        self,
        row: torch.Tensor,
        prefix: str,
        detail: dict[str, Any],
        accept_approximate: bool,
        lineage: str,
    ) -> None:
        """Refuses a prompt that does not begin with the prefix."""
        n = detail["summary"]["n_tokens"]
        # Of exactly so many tokens, so that what continues the prefix does not match instead of it.
        match = self.store.match(
            self.spec.name,
            row[:n],
            tenant=self.tenant,
            accept_approximate=accept_approximate,
            lineage=lineage,
        )
        # A compacted prefix is found by the name of the segment that it ends in now.
        if match.n_tokens < n or match.prefix not in (prefix, detail["chain"][-1]):
            raise InvalidArgument(
                f"the prompt does not begin with the {n} tokens of prefix {prefix}, or may not use them (another "
                f"tenant's, or derived ones without their lineage): {match.n_tokens} of its tokens are stored"
            )

    def _attach(
        self,
        matches: Sequence[PrefixMatch],
        pads: Sequence[int],
        columns: int,
        wanted: PolicyLike | None,
    ) -> list[Session | None]:
        sessions: list[Session | None] = []
        for match, pad in zip(matches, pads, strict=True):
            n = columns - pad
            if n <= 0 or match.n_tokens == 0:
                sessions.append(None)
                continue
            try:
                session = self._attach_one(match.prefix, n, wanted)
            except Infeasible:
                if wanted is not None:
                    raise
                session = self._attach_one(match.prefix, n, Policy(mode="full"))
            sessions.append(session)
        return sessions

    def _attach_one(self, prefix: str, n: int, policy: PolicyLike | None) -> Session:
        # The match has taken only what was asked for.
        own_window = self._own_window(policy)
        if isinstance(policy, Policy):
            policy = replace(policy, own_window=None)  # it is for this class
        return self.store.attach(
            self.spec.name,
            prefix=prefix,
            n_tokens=n,
            tenant=self.tenant,
            policy=policy,
            accept_approximate=True,
            own_memory_tokens=0 if own_window is None else OWN_MEMORY_TOKENS,
        )

    def _own_window(self, policy: PolicyLike | None) -> int | None:
        window = policy.own_window if isinstance(policy, Policy) else None
        if window is None:
            return None
        if window < 1:
            raise InvalidArgument(f"own_window is at least 1 token, not {window}")
        if any(layer.sliding_window for layer in self.spec.layers):
            raise InvalidArgument(
                "own_window: tokens of a model with sliding windows stay in its cache; leave it out"
            )
        return window

    def _stored_spec(self, name: str) -> ModelSpec | None:
        try:
            return self.store.model(name)
        except NotFound:
            return None

    def _check_weights(self) -> None:
        digest = "blake2b:" + identity._tensor_digest(self.model)
        if digest != self.spec.identity["tensors"]:
            raise FailedPrecondition(
                "the model's weights have changed since this Splice was made; make another, so that its "
                "prompts are not mistaken for the old ones"
            )
        adapters, was = identity.adapters(self.model), self.spec.identity.get("adapter")
        if adapters != was:
            raise FailedPrecondition(
                f"the model's adapters have changed since this Splice was made ({was} then, {adapters} now); make "
                "another, so that its prompts are not mistaken for the old ones"
            )

    def _why_nothing(self, ids: torch.Tensor, pads: Sequence[int]) -> str:
        """Says why nothing matched: the other model under which it would have, and what differs."""
        after = ""
        while True:
            page = self.store.list_models(after=after)
            for spec in page.models:
                if spec.name == self.spec.name:
                    continue
                found = self.store.match(spec.name, ids[0, pads[0] :], tenant=self.tenant)
                if found.n_tokens > 0:
                    return (
                        f"nothing that begins these prompts is stored for this model; prefix {found.prefix} "
                        f"has {found.n_tokens} of the tokens, but of another one ('{spec.name}'): "
                        f"{identity.differences(spec, self.spec) or 'only its name differs'}"
                    )
            after = page.next
            if not after:
                break
        return "nothing that begins these prompts is stored for this model"


def _reads_everything(policy: PolicyLike | None) -> bool:
    if isinstance(policy, Policy):
        return policy.mode == "full"
    return policy is not None and policy.get("mode") == "full"
