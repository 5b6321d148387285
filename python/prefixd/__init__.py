"""prefixd: stored prompts for any decoder.

    import prefixd

    with prefixd.open("/srv/kv") as store:            # or prefixd.connect("unix:/run/prefixd.sock")
        with store.attach("llama", tokens) as session:
            y, lse = session.step(layer, q)           # attention over the stored prompt

`prefixd.transformers` splices stored prompts into Hugging Face models, `prefixd.train` trains
feature maps for them, `prefixd.evaluate` measures their quality by read budget. Everything is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "client": ["Client", "PrefixMatch", "connect", "open"],
    "errors": [
        "AlreadyExists",
        "Cancelled",
        "Corrupt",
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
    "model": ["Layer", "ModelSpec", "Policy"],
    "put": ["Put", "PutResult"],
    "restore": ["Restore", "Run"],
    "session": ["Cut", "Rows", "Session", "merge_states", "step_batch"],
}
_WHERE = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_WHERE)

if TYPE_CHECKING:
    from prefixd.client import Client, PrefixMatch, connect, open
    from prefixd.errors import (
        AlreadyExists,
        Cancelled,
        Corrupt,
        FailedPrecondition,
        Infeasible,
        Internal,
        InvalidArgument,
        IoError,
        NotFound,
        PrefixdError,
        ResourceExhausted,
        Unavailable,
    )
    from prefixd.model import Layer, ModelSpec, Policy
    from prefixd.put import Put, PutResult
    from prefixd.restore import Restore, Run
    from prefixd.session import Cut, Rows, Session, merge_states, step_batch


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'prefixd' has no attribute '{name}'")
    return getattr(importlib.import_module(f"prefixd.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
