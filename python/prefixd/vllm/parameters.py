"""What a request says of itself in its `kv_transfer_params`, beside how it attends (attached/policy.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STORE = "store"


def stores(parameters: Any) -> bool:
    """Whether the request's prompt may be stored. What is neither true nor false is a no: a prompt that is not
    stored is computed again, one that was stored is there."""
    given = parameters.get("prefixd") if isinstance(parameters, Mapping) else None
    return not isinstance(given, Mapping) or given.get(STORE, True) is True
