"""Describes a model and a read policy. Options that this package does not know (a newer store's)
can be given as `extra` fields under their names on the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SHAPE = ("n_q_heads", "n_kv_heads", "key_dim", "value_dim")


@dataclass(frozen=True)
class Layer:
    """Scores are scale * q.k, softcapped where softcap > 0 (then exact or selection only). prefixd
    stores the rows of a layer with a sliding window, and the engine computes its attention. Heads
    and dimensions are the model's where they are None. A layer that is not stored has no rows."""

    scale: float
    softcap: float = 0.0
    sliding_window: int = 0
    n_q_heads: int | None = None
    n_kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    stored: bool = True

    def to_wire(self) -> dict[str, Any]:
        """Leaves out what is as the model's."""
        fields = asdict(self)
        own = {name: fields[name] for name in SHAPE if fields[name]}
        wire = {name: fields[name] for name in ("scale", "softcap", "sliding_window")} | own
        return wire if self.stored else wire | {"stored": False}

    @classmethod
    def from_wire(cls, layer: Mapping[str, Any]) -> Layer:
        own = {name: layer[name] for name in SHAPE if layer.get(name)}
        return cls(
            layer["scale"],
            layer["softcap"],
            layer["sliding_window"],
            stored=layer.get("stored", True),
            **own,
        )


@dataclass(frozen=True)
class LayerShape:
    """Heads and dimensions of one layer; both numbers of heads are 0 where it has no rows."""

    n_q_heads: int
    n_kv_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, geometry: Mapping[str, Any], layer: int) -> LayerShape:
        """Returns a layer's shape in a geometry as sessions and stores describe it; the model's for
        a layer that it has not, which calls refuse."""
        layers = geometry["layers"]
        own = layers[layer] if 0 <= layer < len(layers) else {}
        if not own.get("stored", True):
            return cls(0, 0, 0, 0)
        return cls(*(int(own.get(name) or geometry[name]) for name in SHAPE))


@dataclass(frozen=True)
class ModelSpec:
    """Identity and geometry make the fingerprint: a prefix is only matched under the same one."""

    name: str
    layers: Sequence[Layer]
    n_q_heads: int
    n_kv_heads: int
    key_dim: int
    dtype: str  # dtype of the stored rows: "f32", "f16", "bf16"
    identity: Mapping[str, str] = field(default_factory=dict)  # weights digest, rope, adapter, ...
    value_dim: int | None = None  # key_dim if None
    feature_maps: Sequence[str] = ()  # paths on the machine that runs the store

    def geometry(self) -> dict[str, Any]:
        return {
            "n_layers": len(self.layers),
            "n_q_heads": self.n_q_heads,
            "n_kv_heads": self.n_kv_heads,
            "key_dim": self.key_dim,
            "value_dim": self.key_dim if self.value_dim is None else self.value_dim,
            "dtype": self.dtype,
            "layers": [layer.to_wire() for layer in self.layers],
        }

    def shape(self, layer: int) -> LayerShape:
        own = self.layers[layer]
        if not own.stored:
            return LayerShape(0, 0, 0, 0)
        value_dim = self.key_dim if self.value_dim is None else self.value_dim
        return LayerShape(
            own.n_q_heads or self.n_q_heads,
            own.n_kv_heads or self.n_kv_heads,
            own.key_dim or self.key_dim,
            own.value_dim or value_dim,
        )

    def to_json(self) -> str:
        return json.dumps(
            {
                "name": self.name,
                "geometry": self.geometry(),
                "identity": [[str(k), str(v)] for k, v in self.identity.items()],
                "feature_maps": [str(path) for path in self.feature_maps],
            }
        )

    @classmethod
    def from_wire(cls, spec: Mapping[str, Any]) -> ModelSpec:
        geometry = spec["geometry"]
        return cls(
            name=spec["name"],
            layers=tuple(Layer.from_wire(layer) for layer in geometry["layers"]),
            n_q_heads=geometry["n_q_heads"],
            n_kv_heads=geometry["n_kv_heads"],
            key_dim=geometry["key_dim"],
            dtype=geometry["dtype"],
            identity=dict(spec["identity"]),
            value_dim=geometry["value_dim"],
            feature_maps=tuple(spec["feature_maps"]),
        )


@dataclass(frozen=True)
class Policy:
    """Says how steps read. `Policy(mode="full")` reads everything, `Policy(k=64)` a fixed number of
    tokens, `Policy(budget=0.01)` a hundredth of the prompt."""

    mode: str = "retrieve"  # "full", "anchors", "retrieve"
    budget: float | None = None  # fraction of the prefix per step; None: the store's default
    k: int | None = None  # fixed K instead of a budget
    estimator: str = "auto"  # for what is not read: "auto", "none", "moment", "phi", ...
    l_gen: int = 1  # generated tokens that share the summary's cost
    selector: str = "auto"  # "auto", "exact", "codes", "ivf"
    adaptive: bool = False  # heads share the budget by what each is estimated to miss
    spread: bool = True  # heads share the budget by what each was measured to lose
    report_missing: bool = False  # steps report what they have not read, with a bound
    # Steps whose queries are alike share sets: {"block": 16, "similarity": 0.9, "dilation": 1}.
    sharing: Mapping[str, Any] | None = None
    # Rows that the next step may want are prefetched: {"forward": 4}.
    prefetch: Mapping[str, Any] | None = None
    # Of a session's own tokens that moved to the store (own_memory_tokens, own_window), each KV head keeps so
    # many in memory, and exact: {"tokens": 256, "by": "local"}.
    retain: Mapping[str, Any] | None = None
    # Heads for which the estimator is given: {"layer": 0, "kv_head": 1, "estimator": "moment"}.
    fixed: Sequence[Mapping[str, Any]] = ()
    # For Splice: the process keeps so many of the generated tokens' rows, and hands older ones over to
    # the session, which moves them to the store beyond some thousands. None: it keeps all of them. Refused
    # by sessions themselves (Store.attach), which have own_memory_tokens.
    own_window: int | None = None
    # Options of a newer daemon, by their names on the wire.
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        wire = {
            "mode": self.mode,
            "estimator": self.estimator,
            "l_gen": self.l_gen,
            "selector": self.selector,
            "adaptive": self.adaptive,
            "spread": self.spread,
            "report_missing": self.report_missing,
            **self.extra,
        }
        if self.budget is not None:
            wire["budget"] = self.budget
        if self.k is not None:
            wire["k"] = self.k
        if self.sharing is not None:
            wire["sharing"] = dict(self.sharing)
        if self.prefetch is not None:
            wire["prefetch"] = dict(self.prefetch)
        if self.retain is not None:
            wire["retain"] = dict(self.retain)
        if self.fixed:
            wire["fixed"] = [dict(head) for head in self.fixed]
        return wire
