"""prefixd: stored prompts for any decoder.

    import prefixd

    with prefixd.open("/srv/kv") as store:            # or prefixd.connect("unix:/run/prefixd/prefixd.sock")
        with store.attach("llama", tokens) as session:
            y, lse = session.step(layer, q)           # attention over the stored prompt

`prefixd.transformers` splices stored prompts into Hugging Face models, `prefixd.vllm` is a KV
connector of vLLM, `prefixd.train` trains feature maps, `prefixd.evaluate` measures quality by read
budget. Each module is loaded on its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "errors": [
        "AlreadyExists",
        "Cancelled",
        "Corrupt",
        "DeadlineExceeded",
        "FailedPrecondition",
        "Infeasible",
        "Internal",
        "InvalidArgument",
        "IoError",
        "NotFound",
        "PrefixdError",
        "ResourceExhausted",
        "Unavailable",
    ],
    "estimate": ["EngineSpeed", "ReuseEstimate", "TimeEstimate"],
    "model": ["Layer", "LayerShape", "ModelSpec", "Policy"],
    "_core": ["PagedRows"],
    "put": ["Put", "PutResult"],
    "restore": ["Restore", "Run"],
    "session": ["Cut", "Rows", "Session", "merge_own_tokens", "merge_states", "step_batch"],
    "store": ["ModelPage", "PendingMatch", "PrefixMatch", "PrefixPage", "Store", "connect", "open"],
}
_WHERE = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_WHERE)

if TYPE_CHECKING:  # `as` exports the name to a type checker
    __version__: str
    from prefixd._core import PagedRows as PagedRows
    from prefixd.errors import AlreadyExists as AlreadyExists
    from prefixd.errors import Cancelled as Cancelled
    from prefixd.errors import Corrupt as Corrupt
    from prefixd.errors import DeadlineExceeded as DeadlineExceeded
    from prefixd.errors import FailedPrecondition as FailedPrecondition
    from prefixd.errors import Infeasible as Infeasible
    from prefixd.errors import Internal as Internal
    from prefixd.errors import InvalidArgument as InvalidArgument
    from prefixd.errors import IoError as IoError
    from prefixd.errors import NotFound as NotFound
    from prefixd.errors import PrefixdError as PrefixdError
    from prefixd.errors import ResourceExhausted as ResourceExhausted
    from prefixd.errors import Unavailable as Unavailable
    from prefixd.estimate import EngineSpeed as EngineSpeed
    from prefixd.estimate import ReuseEstimate as ReuseEstimate
    from prefixd.estimate import TimeEstimate as TimeEstimate
    from prefixd.model import Layer as Layer
    from prefixd.model import LayerShape as LayerShape
    from prefixd.model import ModelSpec as ModelSpec
    from prefixd.model import Policy as Policy
    from prefixd.put import Put as Put
    from prefixd.put import PutResult as PutResult
    from prefixd.restore import Restore as Restore
    from prefixd.restore import Run as Run
    from prefixd.session import Cut as Cut
    from prefixd.session import Rows as Rows
    from prefixd.session import Session as Session
    from prefixd.session import merge_own_tokens as merge_own_tokens
    from prefixd.session import merge_states as merge_states
    from prefixd.session import step_batch as step_batch
    from prefixd.store import ModelPage as ModelPage
    from prefixd.store import PendingMatch as PendingMatch
    from prefixd.store import PrefixMatch as PrefixMatch
    from prefixd.store import PrefixPage as PrefixPage
    from prefixd.store import Store as Store
    from prefixd.store import connect as connect
    from prefixd.store import open as open


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("prefixd._core").__version__
    if name not in _WHERE:
        raise AttributeError(f"module 'prefixd' has no attribute '{name}'")
    return getattr(importlib.import_module(f"prefixd.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
