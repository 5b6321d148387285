"""Reads how a request attends over its stored prefix: its own `kv_transfer_params`, over the default of
the server.

    SamplingParams(extra_args={"kv_transfer_params": {"prefixd": {"budget": 0.01}}})
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import LogitsProcessor

from prefixd import _core
from prefixd.errors import InvalidArgument, PrefixdError
from prefixd.vllm.parameters import STORE

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

# Beside those of docs/policy.md: whether the prefix is attached, or loaded into blocks.
ATTACH = "attach"
_FIELDS = sorted({*json.loads(_core.read_policy("{}")), "k", "fixed"})


@dataclass(frozen=True)
class RequestPolicy:
    attach: bool
    policy: Mapping[str, Any]  # as prefixd takes it


def read(parameters: Any, default: Mapping[str, Any]) -> RequestPolicy:
    """Returns what the request says; InvalidArgument for what no policy has. A field of the request
    replaces the default's; a request that names its own mode, budget or k takes over none of these."""
    own = _own(parameters)
    attach, store = own.pop(ATTACH, True), own.pop(STORE, True)
    for name, value in ((ATTACH, attach), (STORE, store)):
        if type(value) is not bool:
            raise InvalidArgument(f"'{name}' of kv_transfer_params['prefixd'] is true or false, not {value!r}")
    inherited = dict(default)
    if {"mode", "budget", "k"} & set(own):
        inherited = {name: value for name, value in inherited.items() if name not in ("mode", "budget", "k")}
    policy = {**inherited, **own}
    check(policy, "kv_transfer_params['prefixd']")
    return RequestPolicy(attach, policy)


def check(policy: Mapping[str, Any], where: str) -> None:
    if unknown := sorted(set(policy) - set(_FIELDS)):
        raise InvalidArgument(f"{where} has no '{unknown[0]}'; it takes {', '.join((ATTACH, STORE, *_FIELDS))}")
    try:
        _core.read_policy(json.dumps(policy))
    except (PrefixdError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{where}: {error}") from error


def _own(parameters: Any) -> dict[str, Any]:
    given = parameters.get("prefixd") if isinstance(parameters, Mapping) else None
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"kv_transfer_params['prefixd'] is an object of policy fields, not {given!r}")
    return dict(given)


class PolicyCheck(LogitsProcessor):
    """Has vLLM refuse requests with a policy that cannot be, before they reach the engine. It is no
    logits processor but for vLLM's one hook that looks at parameters there, and changes no logits:

        LLM(..., logits_processors=["prefixd.vllm.attached.policy:PolicyCheck"])
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        try:
            read((sampling_params.extra_args or {}).get("kv_transfer_params"), {})
        except InvalidArgument as error:
            raise ValueError(str(error)) from error

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass
