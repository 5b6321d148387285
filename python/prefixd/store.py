"""Opens stores of this process and of a running daemon. Both behave alike."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from prefixd import _core, arrays
from prefixd.deadline import deadline
from prefixd.estimate import ENGINE_UNKNOWN, EngineSpeed, ReuseEstimate
from prefixd.model import ModelSpec
from prefixd.put import Put
from prefixd.session import ALL_HEADS, PolicyLike, Session, policy_wire

# Long calls call it with (done, total, unit): False cancels them, and whatever else it returns lets them go on.
Progress = Callable[[int, int, str], object]


@dataclass(frozen=True)
class PrefixMatch:
    prefix: str  # id; "" when nothing matches
    n_tokens: int
    stored_tokens: int
    exact_tokens: int  # the matched tokens before the first derived one
    estimate: ReuseEstimate
    compressed: bool = False  # of some of its tokens no rows are stored

    @classmethod
    def from_json(cls, text: str) -> PrefixMatch:
        wire = json.loads(text)
        estimate = ReuseEstimate.from_wire(wire["estimate"])
        return cls(
            wire["prefix"],
            wire["n_tokens"],
            wire["stored_tokens"],
            wire["exact_tokens"],
            estimate,
            wire["compressed"],
        )

    @property
    def derived(self) -> bool:
        return self.exact_tokens < self.n_tokens


@dataclass(frozen=True)
class PrefixPage:
    prefixes: list[dict[str, Any]]  # by tenant and id
    next: str  # `after` of the next page; "" behind the last


@dataclass(frozen=True)
class ModelPage:
    models: list[ModelSpec]  # by name
    next: str


class PendingMatch:
    """A match that `Store.match_async` began. Dropping it gives the match up."""

    def __init__(self, core: _core.PendingMatch) -> None:
        self.core = core

    def ready(self) -> bool:
        """Whether `result` returns at once: the answer is there, or the deadline has passed."""
        return self.core.ready()

    def result(self) -> PrefixMatch:
        """Waits for the answer, up to the deadline; DeadlineExceeded then. A later call returns the
        answer if it has come meanwhile."""
        return PrefixMatch.from_json(self.core.get())


class Store:
    """`open` or `connect` make it. Threads may share it. Sessions and puts keep what they need of
    it alive, even after `close`."""

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
        """Closes the store. An embedded store is unlocked once its last session and put are gone,
        too."""
        self.core.close()

    # ---- models ----

    def register_model(self, spec: ModelSpec) -> None:
        """Registers a model; an equal spec changes nothing. AlreadyExists when another model has
        the name."""
        self.core.register_model(spec.to_json())

    def model(self, name: str) -> ModelSpec:
        return ModelSpec.from_wire(json.loads(self.core.model(name)))

    def list_models(self, *, after: str = "", limit: int = 0) -> ModelPage:
        """Returns one page of the models: `limit` at most, or as many as fit a page."""
        page = json.loads(self.core.list_models(json.dumps({"after": after, "limit": limit})))
        return ModelPage([ModelSpec.from_wire(spec) for spec in page["models"]], page["next"])

    def remove_model(self, name: str) -> None:
        """Removes a model that nothing is stored for; FailedPrecondition otherwise. Over a connection
        it is for the daemon's own user and for admins."""
        self.core.remove_model(name)

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
        derived: bool = False,
        accept_approximate: bool = False,
        lineage: str = "",
        heads: tuple[int, int] = ALL_HEADS,
        wait: float = 0.0,
        alone: bool = False,
        prefill_from: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        call_timeout: float | None = None,
    ) -> Put:
        """Begins to store the keys and values of a whole prompt. `encoding` is the encoding of the
        stored rows ("int8"; None: the store's own). `derived`: a step below mode "full" went before
        the rows, or they were computed over derived tokens; they serve those alone who ask for
        them. `accept_approximate` and `lineage` (of the PutResult) say which derived rows the put
        continues. While another put stores the same tokens, waits `wait` seconds for its end; then
        raises Unavailable if `alone`, and otherwise stores them, too, unless the other one commits
        first. `progress` receives the token-layers written and submitted, on the put's own
        thread. `heads` (the first KV head, and how many; 0: to the last) makes the put a part: puts
        of other heads of the same prompt, of any processes, store one prefix with it. Its commit
        waits `wait` seconds for theirs, and the put ends for all parts when one ends before.
        `prefill_from`: rows of tokens from here on are written while the engine computes them, so
        that the store learns how fast it prefills (ReuseEstimate). `call_timeout` bounds this call
        and each of the put over a connection, in seconds, but its commit: DeadlineExceeded."""
        spec: dict[str, Any] = {
            "model": model,
            "tenant": tenant,
            "label": label,
            "pinned": pinned,
            "ttl_seconds": ttl_seconds,
            "derived": derived,
            "accept_approximate": accept_approximate,
            "lineage": lineage,
            "first_head": heads[0],
            "n_heads": heads[1],
            "wait_ms": round(wait * 1000),
            "alone": alone,
            "prefill_from": prefill_from,
        }
        if encoding is not None:
            spec["encoding"] = encoding
        with deadline(call_timeout):
            core = self.core.begin_put(json.dumps(spec), arrays.tokens_array(tokens))
        return Put(core, progress, call_timeout)

    def match(
        self,
        model: str,
        tokens: Any,
        *,
        tenant: str = "",
        accept_approximate: bool = False,
        lineage: str = "",
        engine: EngineSpeed = ENGINE_UNKNOWN,
        accept_compressed: bool = False,
    ) -> PrefixMatch:
        """Returns the longest stored prefix of these tokens. It ends before the first derived token,
        unless all are accepted or those of a lineage (PutResult.lineage). `engine` is what the
        match's estimate is for. `accept_compressed` takes compressed prefixes, too, which steps under a
        policy can attend over and nobody can load."""
        spec = {
            "model": model,
            "tenant": tenant,
            "accept_approximate": accept_approximate,
            "lineage": lineage,
            "engine": asdict(engine),
            "accept_compressed": accept_compressed,
        }
        return PrefixMatch.from_json(self.core.match(json.dumps(spec), arrays.tokens_array(tokens)))

    def match_async(
        self,
        model: str,
        tokens: Any,
        *,
        deadline: float,
        tenant: str = "",
        accept_approximate: bool = False,
        lineage: str = "",
        engine: EngineSpeed = ENGINE_UNKNOWN,
    ) -> PendingMatch:
        """Begins a match and returns at once, however slow disk or daemon are: for schedulers, which
        must not wait. The answer comes within `deadline` seconds."""
        spec = {
            "model": model,
            "tenant": tenant,
            "accept_approximate": accept_approximate,
            "lineage": lineage,
            "engine": asdict(engine),
        }
        milliseconds = max(0, round(min(deadline, 86400) * 1000))
        ids = arrays.tokens_array(tokens)
        return PendingMatch(self.core.match_async(json.dumps(spec), ids, milliseconds))

    def attach(
        self,
        model: str,
        tokens: Any = None,
        *,
        prefix: str = "",
        n_tokens: int = 0,
        tenant: str = "",
        policy: PolicyLike | None = None,
        accept_approximate: bool = False,
        lineage: str = "",
        call_timeout: float | None = None,
        engine: EngineSpeed = ENGINE_UNKNOWN,
        own_memory_tokens: int = 0,
        accept_compressed: bool = False,
    ) -> Session:
        """Returns a session over the longest stored prefix of `tokens`, or over the named prefix;
        over only its first n_tokens where given. NotFound when nothing matches; derived tokens are
        taken as by `match`, and FailedPrecondition when a named prefix has others. `call_timeout`
        bounds the attach and each call of the session, in seconds: DeadlineExceeded beyond it, and
        the session goes on. `engine` is what the estimate in the session's `info` is for. Beyond
        `own_memory_tokens` own tokens (0: no bound, else at least 256) the oldest move to the store
        in the background, and steps read them as they read the prefix. `accept_compressed` is that of
        `match`; a named prefix may be compressed."""
        spec = {
            "model": model,
            "tenant": tenant,
            "prefix": prefix,
            "n_tokens": n_tokens,
            "policy": policy_wire(policy),
            "accept_approximate": accept_approximate,
            "lineage": lineage,
            "engine": asdict(engine),
            "call_timeout_ms": 0 if call_timeout is None else max(1, round(call_timeout * 1000)),
            "own_memory_tokens": own_memory_tokens,
            "accept_compressed": accept_compressed,
        }
        row = arrays.tokens_array([] if tokens is None else tokens)
        return Session(self.core.attach(json.dumps(spec), row))

    def explain(
        self,
        model: str,
        tokens: Any,
        *,
        tenant: str = "",
        accept_approximate: bool = False,
        lineage: str = "",
        identity: Mapping[str, str] | None = None,
        engine: EngineSpeed = ENGINE_UNKNOWN,
    ) -> dict[str, Any]:
        """Says why `match` finds as many of these tokens as it does, and no more: returns `match`,
        `asked_tokens` and `misses`, each with `reason` ("diverges", "evicted", "model_differs", ...),
        a sentence `text`, and `n_tokens`, how many would match but for it. `identity` is the one that
        the engine has now, to compare with the registered model's."""
        spec = {
            "model": model,
            "tenant": tenant,
            "accept_approximate": accept_approximate,
            "lineage": lineage,
            "engine": asdict(engine),
            "identity": list((identity or {}).items()),
        }
        explanation: dict[str, Any] = json.loads(
            self.core.explain(json.dumps(spec), arrays.tokens_array(tokens))
        )
        return explanation

    # ---- what is stored ----

    def wait_ready(self, prefix: str, progress: Progress | None = None) -> None:
        """Waits until the prefix's summaries, indexes and choices are ready; raises when they
        cannot be."""
        self.core.wait_ready(prefix, progress)

    def list_prefixes(
        self, *, after: str = "", limit: int = 0, tenant: str | None = None
    ) -> PrefixPage:
        """Returns one page of the prefixes, of one tenant or of all that the caller may see: `limit`
        at most, or as many as fit a page. What is stored or removed between two pages neither skips
        nor repeats others."""
        spec = {"after": after, "limit": limit, "tenant": tenant}
        page = json.loads(self.core.list_prefixes(json.dumps(spec)))
        return PrefixPage(page["prefixes"], page["next"])

    def prefix(self, prefix: str) -> dict[str, Any]:
        """Returns summary, chain, blobs and choices of a prefix."""
        detail: dict[str, Any] = json.loads(self.core.prefix(prefix))
        return detail

    def remove(self, prefix: str) -> None:
        self.core.remove(prefix)

    def set_lifetime(
        self, prefix: str, *, pinned: bool | None = None, ttl_seconds: int | None = None
    ) -> None:
        """Sets how long the prefix is kept; None changes nothing, ttl_seconds = 0 keeps it for
        ever."""
        given = {"pinned": pinned, "ttl_seconds": ttl_seconds}
        self.core.set_lifetime(
            prefix, json.dumps({k: v for k, v in given.items() if v is not None})
        )

    def rewrite(
        self, prefix: str, kind: str, progress: Progress | None = None
    ) -> dict[str, Any]:
        """Rewrites what a prefix needs now: `kind` is "recluster", "compact" or "encrypt".
        Answers stay the same. Returns `segments`, `rewritten`, `bytes`, and `left`: why others
        stay as they are."""
        result: dict[str, Any] = json.loads(self.core.rewrite(prefix, kind, progress))
        return result

    def compress(
        self,
        prefix: str,
        *,
        keep: float = 0.25,
        policy: str = "gkv",
        scorers: str = "",
        max_error: float = 0.0,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Keeps the rows of `keep` of the tokens alone, for good, ranked by `policy`: "window", by queries
        that the put kept "local", "snapkv", "global", "global-sum", "global-mean", "gkv", "h2o" or "tova", or by
        trained `scorers` "kvpop" (a file on the
        store's machine, made by `python -m prefixd.retention --train`). First measures what that does to
        attention over the prefix, and returns it; where the mean error would be above `max_error` (0:
        any) the prefix stays as it is and `refused` says so."""
        spec = {"keep": keep, "policy": policy, "scorers": scorers, "max_error": max_error, "dry_run": dry_run}
        report: dict[str, Any] = json.loads(self.core.compress(prefix, json.dumps(spec), progress))
        return report

    def verify(self, prefix: str = "", progress: Progress | None = None) -> dict[str, Any]:
        """Reads every segment that a prefix needs (or all of the store) and checks it; returns
        segments, pages, bytes, damaged, unread (what could not be read, of which nothing is known), and
        the ids of the segments covered."""
        summary: dict[str, Any] = json.loads(self.core.verify(prefix, progress))
        return summary

    def verify_tenant(self, tenant: str, progress: Progress | None = None) -> dict[str, Any]:
        """Does what `verify` does, for all segments of one tenant."""
        summary: dict[str, Any] = json.loads(self.core.verify_tenant(tenant, progress))
        return summary

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = json.loads(self.core.stats())
        return stats


def open(directory: str | os.PathLike[str], **options: Any) -> Store:
    """Opens a store in this process and locks its directory. Options are the store's
    (docs/reference.md, column "embedded"); an unknown name is refused with the list, a value out of
    range with its bounds."""
    given: Mapping[str, Any] = {**options, "dir": os.fspath(directory)}
    return Store(_core.open(json.dumps(given)))


def connect(
    address: str,
    *,
    tenant: str = "",
    token: str = "",
    connect_timeout: float = 5.0,
    call_timeout: float | None = 120.0,
    reconnect: float = 5.0,
    shared_memory: bool = True,
    admin: bool = False,
    spin: float = 0.0,
    tls_ca: str | os.PathLike[str] = "",
    tls_certificate: str | os.PathLike[str] = "",
    tls_key: str | os.PathLike[str] = "",
) -> Store:
    """Connects to a running daemon: "unix:/path/to.sock", a plain path, "tcp:host:port" or
    "tls:host:port". Times are in seconds. A call that takes longer than `call_timeout` (None: no bound) raises
    DeadlineExceeded, and the connection stays. Calls without a tenant use `tenant`.
    Calls wait `reconnect` seconds for a daemon that went away; sessions then attach again by
    themselves and go on. 0: they fail at once, with Unavailable. A process that fork() makes, as
    multiprocessing does, connects by itself: what its parent has opened is refused there. A step's thread polls `spin`
    seconds for its answer before it sleeps, and the daemon for the next step.
    `token`: the text that the daemon knows the tenant by (docs/security.md), without the newline of its
    file; it names the tenant. `admin`: for a token with that right, calls of all tenants.
    For TLS, PEM files: `tls_ca`, who may have signed the daemon's certificate (else the environment's
    PREFIXD_TLS_CA, else whom the system trusts); `tls_certificate` and `tls_key`, this client's own,
    for a daemon that asks who it is."""
    call_ms = 0 if call_timeout is None else max(1, round(call_timeout * 1000))
    connect_ms = max(1, round(connect_timeout * 1000))
    reconnect_ms = round(reconnect * 1000)
    return Store(
        _core.connect(
            address,
            tenant,
            token,
            connect_ms,
            call_ms,
            reconnect_ms,
            shared_memory,
            admin,
            round(spin * 1_000_000),
            os.fspath(tls_ca),
            os.fspath(tls_certificate),
            os.fspath(tls_key),
        )
    )
