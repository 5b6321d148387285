"""Stores: of this process, and of a running daemon. Both behave alike."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from prefixd import _core, arrays
from prefixd.model import ModelSpec
from prefixd.put import Put
from prefixd.session import PolicyLike, Session, policy_wire

# Called with (done, total, unit); returning False cancels.
Progress = Callable[[int, int, str], bool | None]


@dataclass(frozen=True)
class PrefixMatch:
    prefix: str  # id; "" when nothing matches
    n_tokens: int
    stored_tokens: int


class Store:
    """Made by `open` or `connect`. May be shared by threads. Sessions and puts keep what they need of
    it alive, also after `close`."""

    def __init__(self, core: _core.Store) -> None:
        self.core = core

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """An embedded store is unlocked once its last session and put are gone too."""
        self.core.close()

    # ---- models ----

    def register_model(self, spec: ModelSpec) -> None:
        """Idempotent for an equal spec; AlreadyExists when the name is another model's."""
        self.core.register_model(spec.to_json())

    def models(self) -> list[ModelSpec]:
        return [ModelSpec.from_wire(spec) for spec in json.loads(self.core.models())]

    # ---- putting and attaching ----

    def begin_put(
        self,
        model: str,
        tokens: Any,
        *,
        tenant: str = "",
        label: str = "",
        pinned: bool = False,
        ttl_seconds: int = 0,
        encoding: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Put:
        """Begins to store the keys and values of a whole prompt. `encoding` is that of the rows that
        are stored ("int8"; None: the store's own). `progress` is called with the token-layers written
        and submitted, on the put's own thread."""
        spec: dict[str, Any] = {
            "model": model,
            "tenant": tenant,
            "label": label,
            "pinned": pinned,
            "ttl_seconds": ttl_seconds,
        }
        if encoding is not None:
            spec["encoding"] = encoding
        return Put(self.core.begin_put(json.dumps(spec), arrays.tokens_array(tokens)), progress)

    def match(self, model: str, tokens: Any, *, tenant: str = "") -> PrefixMatch:
        """The longest stored prefix of these tokens."""
        return PrefixMatch(*self.core.match(model, tenant, arrays.tokens_array(tokens)))

    def attach(
        self,
        model: str,
        tokens: Any = None,
        *,
        prefix: str = "",
        n_tokens: int = 0,
        tenant: str = "",
        policy: PolicyLike | None = None,
    ) -> Session:
        """A session over the longest stored prefix of `tokens`, or over the prefix named; cut to its
        first n_tokens where given. NotFound when nothing matches."""
        spec = {
            "model": model,
            "tenant": tenant,
            "prefix": prefix,
            "n_tokens": n_tokens,
            "policy": policy_wire(policy),
        }
        row = arrays.tokens_array([] if tokens is None else tokens)
        return Session(self.core.attach(json.dumps(spec), row))

    # ---- what is stored ----

    def wait_ready(self, prefix: str, progress: Progress | None = None) -> None:
        """Waits until the prefix's summaries, indexes and choices are ready, or says why not."""
        self.core.wait_ready(prefix, progress)

    def prefixes(self) -> list[dict[str, Any]]:
        prefixes: list[dict[str, Any]] = json.loads(self.core.prefixes())
        return prefixes

    def prefix(self, prefix: str) -> dict[str, Any]:
        """summary, chain, blobs, choices."""
        detail: dict[str, Any] = json.loads(self.core.prefix(prefix))
        return detail

    def remove(self, prefix: str) -> None:
        self.core.remove(prefix)

    def set_retention(
        self, prefix: str, *, pinned: bool | None = None, ttl_seconds: int | None = None
    ) -> None:
        """How long it is kept; what is None stays as it is, ttl_seconds = 0 is for ever."""
        given = {"pinned": pinned, "ttl_seconds": ttl_seconds}
        self.core.set_retention(
            prefix, json.dumps({k: v for k, v in given.items() if v is not None})
        )

    def verify(self, prefix: str = "", progress: Progress | None = None) -> dict[str, Any]:
        """Reads everything of a prefix (of the store) and checks it: segments, pages, bytes, damaged."""
        summary: dict[str, Any] = json.loads(self.core.verify(prefix, progress))
        return summary

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = json.loads(self.core.stats())
        return stats


def open(directory: str | os.PathLike[str], **options: Any) -> Store:
    """A store of this process's own; locks the directory. Options are those of the store
    (docs/reference.md, column "embedded"); a wrong name is refused with the list, a wrong value with
    its bounds."""
    given: Mapping[str, Any] = {**options, "dir": os.fspath(directory)}
    return Store(_core.open(json.dumps(given)))


def connect(
    address: str,
    *,
    tenant: str = "",
    token: str = "",
    connect_timeout: float = 5.0,
    call_timeout: float | None = 120.0,
    shared_memory: bool = True,
    admin: bool = False,
) -> Store:
    """A running daemon: "unix:/path/to.sock", a plain path, or "tcp:host:port". Times in seconds; a
    call_timeout of None waits for ever. `tenant` is that of calls that name none."""
    call_ms = 0 if call_timeout is None else max(1, round(call_timeout * 1000))
    connect_ms = max(1, round(connect_timeout * 1000))
    return Store(_core.connect(address, tenant, token, connect_ms, call_ms, shared_memory, admin))
