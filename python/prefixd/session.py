"""Runs steps over one stored prefix and returns partial attention states."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from prefixd import _core, arrays
from prefixd.errors import InvalidArgument, PrefixdError
from prefixd.estimate import ReuseEstimate
from prefixd.model import LayerShape, Policy
from prefixd.put import PutResult
from prefixd.restore import Restore

if TYPE_CHECKING:
    from prefixd.arrays import Array
    from prefixd.store import Progress

PolicyLike = Policy | Mapping[str, Any]

# A run of KV heads: the first, and how many; 0: to the last.
ALL_HEADS = (0, 0)


def policy_wire(policy: PolicyLike | None) -> dict[str, Any]:
    if policy is None:
        return {}
    if isinstance(policy, Policy) and policy.own_window is not None:
        raise InvalidArgument(
            "own_window is for prefixd.transformers.Splice, which hands tokens of the model's cache over; elsewhere "
            "the engine appends them itself: attach with own_memory_tokens, which bounds what stays in memory"
        )
    return policy.to_wire() if isinstance(policy, Policy) else dict(policy)


@dataclass(frozen=True)
class Cut:
    """No unread token of this query head scores above `score`, where kind is "exact"."""

    score: float
    kind: str  # "none", "approximate", "exact"


@dataclass(frozen=True)
class Rows:
    """Holds verified rows of one KV head: `data` is [n][key_dim + value_dim] in the model's dtype
    (bf16 as its bits in uint16). Keys and values are views."""

    data: np.ndarray
    dtype: str
    key_dim: int

    @property
    def keys(self) -> np.ndarray:
        return self.data[:, : self.key_dim]

    @property
    def values(self) -> np.ndarray:
        return self.data[:, self.key_dim :]

    def torch(self) -> Any:
        """Returns (keys, values) as tensors over the same memory."""
        tensor = arrays.as_torch(self.data, self.dtype)
        return tensor[:, : self.key_dim], tensor[:, self.key_dim :]


class Session:
    """Store.attach makes it. Threads may step one session at once (different layers or batches). It
    ends with `detach`, at the end of its `with` block, or when it is garbage-collected."""

    def __init__(self, core: _core.Session) -> None:
        self.core = core
        self.final_report: dict[str, Any] | None = None
        self._exact: bool | None = None  # of the policy; None: not asked yet

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.final_report is not None:
            return
        try:
            self.detach()
        except PrefixdError:
            if kind is None:
                raise  # else what ended the block is what its caller needs to know

    @cached_property
    def info(self) -> dict[str, Any]:
        """Returns model, tenant, prefix, n_tokens, geometry, anchors, estimator, ..."""
        info: dict[str, Any] = json.loads(self.core.info())
        return info

    @property
    def n_tokens(self) -> int:
        return int(self.info["n_tokens"])

    @property
    def estimate(self) -> ReuseEstimate:
        """How long the ways to these tokens' keys and values took when it was attached."""
        return ReuseEstimate.from_wire(self.info["estimate"])

    @property
    def derives(self) -> bool:
        """Returns whether what is computed behind a step of this session is derived: the policy
        reads less than everything, or the prefix has derived tokens."""
        if self._exact is None:
            self._exact = bool(self.policy["mode"] == "full")
        return not self._exact or int(self.info["exact_tokens"]) < self.n_tokens

    @property
    def policy(self) -> dict[str, Any]:
        policy: dict[str, Any] = json.loads(self.core.policy())
        return policy

    def set_policy(self, policy: PolicyLike | None) -> None:
        """Replaces the policy of the following steps. Raises Infeasible when the budget cannot pay
        for it."""
        self.core.set_policy(json.dumps(policy_wire(policy)))
        self._exact = None

    def layer_shape(self, layer: int) -> LayerShape:
        """Returns the layer's heads and dimensions."""
        return LayerShape.of(self.info["geometry"], layer)

    def _shapes(
        self, layer: int, heads: tuple[int, int], *leading: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        own = self.layer_shape(layer)
        groups = heads[1] or max(own.n_kv_heads - heads[0], 0)
        shape = (*leading, groups * (own.n_q_heads // max(own.n_kv_heads, 1)))
        return (*shape, own.value_dim), shape

    def step(
        self, layer: int, q: Array, *, heads: tuple[int, int] = ALL_HEADS
    ) -> tuple[Array, Array]:
        """Computes the attention of one decode step over the prefix: q [n_q_heads][key_dim], after
        RoPE -> y [n_q_heads][value_dim] and lse [n_q_heads] (natural log), float32, of q's library
        and device. A float32 q in host memory is read in place. `heads` (the first KV head, and how
        many; 0: to the last) steps these alone: q, y and lse are of the query heads of their
        groups, and equal a part of what all heads get."""
        source = arrays.as_float32(q)
        y_shape, lse_shape = self._shapes(layer, heads)
        y, lse = arrays.empty_like(source, y_shape), arrays.empty_like(source, lse_shape)
        self.core.step(layer, source, y, lse, heads)
        return arrays.back_to(y, q), arrays.back_to(lse, q)

    def attend_exact(
        self, layer: int, q: Array, *, heads: tuple[int, int] = ALL_HEADS
    ) -> tuple[Array, Array]:
        """Computes exact attention of n queries in one pass over the prefix: q
        [n][n_q_heads][key_dim] -> y [n][n_q_heads][value_dim], lse [n][n_q_heads]; `heads` as in
        `step`. Where these heads have own tokens, the queries are those of the last n, and each
        attends to the own tokens up to its own as well: `append` the block's rows first."""
        source = arrays.as_float32(q)
        y_shape, lse_shape = self._shapes(layer, heads, source.shape[0])
        y, lse = arrays.empty_like(source, y_shape), arrays.empty_like(source, lse_shape)
        self.core.attend_exact(layer, source, y, lse, heads)
        return arrays.back_to(y, q), arrays.back_to(lse, q)

    def append(self, layer: int, k: Array, v: Array, *, heads: tuple[int, int] = ALL_HEADS) -> None:
        """Appends n own tokens of one layer, in order: k [n][n_kv_heads][key_dim] after RoPE and
        v [n][n_kv_heads][value_dim], in the model's dtype (bf16 also as its bits in uint16), of the KV
        heads of `heads`. The session keeps them until it ends, so that the engine need not: in memory, unless it
        was attached with `own_memory_tokens`.
        A refused call has changed nothing."""
        self.core.append(layer, arrays.as_input(k), arrays.as_input(v), heads)

    def step_append(
        self, layer: int, q: Array, k: Array, v: Array, *, heads: tuple[int, int] = ALL_HEADS
    ) -> tuple[Array, Array]:
        """Decodes one token of a layer: appends its row (k [n_kv_heads][key_dim], v
        [n_kv_heads][value_dim], as in `append`) and attends with q, over the prefix as `step` does
        and exactly over all own tokens, the appended one included. A call that fails has appended
        nothing and may be repeated."""
        source = arrays.as_float32(q)
        y_shape, lse_shape = self._shapes(layer, heads)
        y, lse = arrays.empty_like(source, y_shape), arrays.empty_like(source, lse_shape)
        self.core.step_append(layer, source, arrays.as_input(k), arrays.as_input(v), y, lse, heads)
        return arrays.back_to(y, q), arrays.back_to(lse, q)

    @property
    def own_tokens(self) -> int:
        """Returns the own tokens of the KV head that has the most."""
        return int(self.report()["own_tokens"])

    @property
    def own_moved(self) -> int:
        """Returns how many of the own tokens, the first, have moved to the store by now
        (own_memory_tokens)."""
        return int(self.report()["own_moved"])

    @property
    def own_retained(self) -> int:
        """Returns how many of the moved own tokens stay in memory (`Policy.retain`): of the KV head that has the
        most."""
        return int(self.report()["own_retained"])

    def truncate(self, n: int) -> None:
        """Keeps the first n own tokens of every head; a head with no more keeps all of its."""
        self.core.truncate(n)

    def fork(self) -> Session:
        """Attaches another session to the same prefix, with this one's policy and own tokens. Both
        share memory and go on apart."""
        return Session(self.core.fork())

    def persist(
        self,
        tokens: Any,
        *,
        label: str = "",
        pinned: bool = False,
        ttl_seconds: int = 0,
        encoding: str | None = None,
        derived: bool = False,
        wait: float = 0.0,
        alone: bool = False,
    ) -> PutResult:
        """Stores the first own tokens, whose ids these are, as a prefix that continues the session's;
        durable and visible when it returns. Rows that are stored already are not stored again. Rows
        from the first token on that was not whole when a step below mode "full" began are derived,
        and so are all where `derived` says so for a reason of the engine's own. The session goes on
        as before; a refused call has changed nothing of it. The other arguments are those of
        Store.begin_put."""
        spec: dict[str, Any] = {
            "label": label,
            "pinned": pinned,
            "ttl_seconds": ttl_seconds,
            "derived": derived,
            "wait_ms": round(wait * 1000),
            "alone": alone,
        }
        if encoding is not None:
            spec["encoding"] = encoding
        stored = self.core.persist(json.dumps(spec), arrays.tokens_array(tokens))
        return PutResult.from_wire(json.loads(stored))

    def fork_persisted(self, window: int = 0) -> Session:
        """Goes on over what was persisted last: as `fork`, but attached to the stored own tokens, all
        but the last `window` of them, with the others as its own tokens. Detach this session then,
        which frees their memory. Store.wait_ready(PutResult.prefix) waits for what its steps
        need."""
        return Session(self.core.fork_persisted(window))

    def _rows(self, layer: int, n: int) -> Rows:
        own = self.layer_shape(layer)
        dtype = self.info["geometry"]["dtype"]
        data = np.empty((n, own.key_dim + own.value_dim), arrays.NUMPY_TYPES[dtype])
        return Rows(data, dtype, own.key_dim)

    def read_rows(self, layer: int, kv_head: int, ids: Sequence[int] | np.ndarray) -> Rows:
        """Reads the rows of these tokens (ascending)."""
        positions = arrays.tokens_array(ids)
        rows = self._rows(layer, len(positions))
        # NumPy's halves and 16-bit integers have different type codes; the core takes the integers.
        out = rows.data.view(np.uint16) if rows.dtype == "f16" else rows.data
        self.core.read_rows(layer, kv_head, positions, out)
        return rows

    def read_range(self, layer: int, kv_head: int, begin: int, end: int) -> Rows:
        """Reads the rows of tokens [begin, end)."""
        rows = self._rows(layer, max(end - begin, 0))
        out = rows.data.view(np.uint16) if rows.dtype == "f16" else rows.data
        self.core.read_range(layer, kv_head, begin, end, out)
        return rows

    def restore(
        self,
        begin: int = 0,
        end: int = 0,
        *,
        layers: tuple[int, int] = (0, 0),
        head_major: bool = False,
        buffer_bytes: int = 128 << 20,
        progress: Progress | None = None,
    ) -> Restore:
        """Restores tokens [begin, end) (0: to the end) of layers [first, last) (0: to the last) of
        every KV head, layer by layer: `for run in session.restore(): ...`. The next runs are read
        while the loop's body works, within `buffer_bytes`. `progress(done, total, "bytes")` may
        return False to cancel."""
        return Restore(
            self,
            begin=begin,
            end=end,
            layers=layers,
            head_major=head_major,
            buffer_bytes=buffer_bytes,
            progress=progress,
        )

    def restore_into(
        self,
        cache: Sequence[tuple[Array, Array]],
        begin: int = 0,
        end: int = 0,
        *,
        layers: tuple[int, int] = (0, 0),
    ) -> None:
        """Restores tokens [begin, end) (0: to the end) of layers [first, last) (0: to the last) to where
        an engine keeps them, without a copy in between: cache[i] has keys and values of the i-th layer,
        [n or more][n_kv_heads][dim] in the model's dtype (bf16 also as its bits in uint16), contiguous
        arrays or tensors in host memory. Row 0 is token `begin`; rows behind the last token stay.
        After an error some rows may have been written; `cancel` ends it."""
        wanted = range(layers[0], layers[1] or int(self.info["geometry"]["n_layers"]))
        end = end or self.n_tokens
        if len(cache) != len(wanted):
            raise InvalidArgument(f"{len(wanted)} layers are to be restored, and the cache has {len(cache)}")
        if not 0 <= begin <= end <= self.n_tokens:
            raise InvalidArgument(f"tokens {begin}..{end} are not a run of the prefix's {self.n_tokens}")
        half = self.info["geometry"]["dtype"] == "f16"
        reads = []
        for layer, pair in zip(wanted, cache, strict=True):
            own = self.layer_shape(layer)
            if own.n_kv_heads:
                dims = (own.key_dim, own.value_dim)
                k, v = (
                    arrays.rows_in_place(rows, end - begin, (own.n_kv_heads, dim), half)
                    for rows, dim in zip(pair, dims, strict=True)
                )
                reads.append((layer, k, v))
        self.core.read_layers(begin, end, reads)

    def select(self, layer: int, kv_head: int, q: Array, k: int) -> tuple[np.ndarray, list[Cut]]:
        """Selects without attending: returns the ids of at most k tokens, and a cut for each of the
        group's queries q [n_q_heads / n_kv_heads][key_dim]."""
        ids, cuts = self.core.select(layer, kv_head, arrays.as_float32(q), k)
        kinds = ("none", "approximate", "exact")
        return np.asarray(ids, np.uint32), [Cut(score, kinds[kind]) for score, kind in cuts]

    def cancel(self) -> None:
        """Ends the calls of this session that run now, on any thread, with Cancelled. Later calls are
        not concerned, and what was ended may be repeated. Does not wait."""
        self.core.cancel()

    def report(self) -> dict[str, Any]:
        """Returns what was read so far: info, total and per_head (ledgers); after `detach` what that
        returned. It is asked for each time, and fails as any other call does: with Unavailable where
        the daemon went away with the session's own tokens or stays away."""
        if self.final_report is not None:
            return self.final_report
        report: dict[str, Any] = json.loads(self.core.report())
        return report

    def detach(self) -> dict[str, Any]:
        """Ends the session and releases the store; returns the report. A daemon that went away has
        ended the session: the report is then the last that was asked for."""
        _ = self.info  # the last value stays readable
        report: dict[str, Any] = json.loads(self.core.detach())
        self.final_report = report
        return report


def step_batch(
    sessions: Sequence[Session],
    layer: int,
    q: Array,
    *,
    heads: tuple[int, int] = ALL_HEADS,
    k: Array | None = None,
    v: Array | None = None,
) -> tuple[Array, Array]:
    """Runs one layer step of each of several sessions of one store and of one shape together: q
    [B][n_q_heads][key_dim] -> y [B][n_q_heads][value_dim], lse [B][n_q_heads]; `heads` as in
    `Session.step`. With k [B][n_kv_heads][key_dim] and v [B][n_kv_heads][value_dim] each is a
    `Session.step_append`; when some fail the first error is raised, and the others have appended."""
    source = arrays.as_float32(q)
    if len(source) != len(sessions):
        raise ValueError(f"q has {len(source)} entries for {len(sessions)} sessions")
    if not sessions:
        raise ValueError("a batch needs at least one session")
    y_shape, lse_shape = sessions[0]._shapes(layer, heads, len(sessions))
    y, lse = arrays.empty_like(source, y_shape), arrays.empty_like(source, lse_shape)
    own_k, own_v = (None if rows is None else arrays.as_input(rows) for rows in (k, v))
    _core.step_batch([session.core for session in sessions], layer, source, y, lse, heads, own_k, own_v)
    return arrays.back_to(y, q), arrays.back_to(lse, q)


def merge_states(y_a: Array, lse_a: Array, y_b: Array, lse_b: Array) -> None:
    """Merges the partial states (y_b, lse_b) into (y_a, lse_a), in place: y [...][value_dim],
    lse [...], float32 in host memory, C order. Either side may be empty (lse = -inf)."""
    outputs: tuple[Any, Any] = (y_a, lse_a)  # tensors are allowed, too; the stub knows NumPy only
    for output in outputs:
        arrays.check_in_place(output)
    _core.merge_states(*outputs, arrays.as_input(y_b), arrays.as_input(lse_b))


def merge_own_tokens(
    q: Array, k: Array, v: Array, y: Array, lse: Array, *, scale: float, softcap: float = 0.0, seen: Array | None = None
) -> None:
    """Attends to tokens that the engine holds itself, and merges them into the states (y, lse), in
    place: q [B][n_q_heads][key_dim], k [B][n_kv_heads][m][key_dim] and v [B][n_kv_heads][m][value_dim]
    of one dtype, as they lie; y [B][n_q_heads][value_dim], lse [B][n_q_heads], float32. seen [B][m]
    (uint8): 0 hides a token. On the calling thread, because one token's attention to what was just
    generated is too little to share."""
    inputs: tuple[Any, Any, Any] = (k, v, seen)  # tensors are allowed, too; the stub knows NumPy only
    outputs: tuple[Any, Any] = (y, lse)
    for output in outputs:
        arrays.check_in_place(output)
    _core.merge_own_tokens(arrays.as_float32(q), *inputs[:2], scale, softcap, inputs[2], *outputs)
