"""Lists the ways of reading that are compared, at equal budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixd.errors import InvalidArgument

# Segments below it have no codes, so that the default selector searches them exactly
# (store.codes_min_tokens).
CODES_FROM = 4096


@dataclass(frozen=True)
class Method:
    """`policy` is what a session is told; `budgeted`: it takes a budget; `usual`: it is measured
    unless methods are named; `compress`: the document is compressed first."""

    label: str
    policy: dict[str, Any]
    budgeted: bool = True
    usual: bool = True
    compress: dict[str, Any] | None = None


METHODS = {
    "full": Method("Full attention", {"mode": "full"}, budgeted=False),
    "anchors": Method("Sink + tail", {"mode": "anchors"}, budgeted=False),
    "topk": Method("Top-K", {"estimator": "none", "selector": "exact"}),
    "topk-codes": Method("Top-K, default selector", {"estimator": "none", "selector": "auto"}),
    "auto": Method("Per-head choice", {"estimator": "auto", "selector": "exact"}),
    "auto-codes": Method("Per-head choice, default selector", {"estimator": "auto", "selector": "auto"}),
    "even": Method("Per-head choice, budget not spread", {"estimator": "auto", "selector": "exact", "spread": False},
                   usual=False),
    "even-codes": Method("Per-head choice, budget not spread, default selector",
                         {"estimator": "auto", "selector": "auto", "spread": False}, usual=False),
    "moment": Method("Moments alone", {"estimator": "moment", "selector": "exact"}),
}
# What is left of a compressed document is searched exactly. These come last: what they give up does not
# come back.
METHODS |= {
    f"keep{share:g}-{policy}": Method(f"{share:.0%} of the rows kept by {policy}, per-head choice",
                                      {"estimator": "auto", "selector": "exact"}, usual=False,
                                      compress={"keep": share, "policy": policy})
    for share in (0.5, 0.25, 0.1) for policy in ("window", "local", "snapkv", "global", "gkv", "kvpop")
}
# What a session does that was told nothing: where there are codes it selects by them.
DEFAULT, DEFAULT_TOPK = "auto-codes", "topk-codes"


def name(method: str, budget: float | None) -> str:
    return method if budget is None else f"{method}@{budget:g}"


def at_length(method: str, length: int) -> str:
    """Returns the method that stands for this one at a length: without codes the search is exact."""
    return method.removesuffix("-codes") if length < CODES_FROM else method


def needs_scorers(method: str) -> bool:
    """Says whether the method compresses by trained scorers."""
    return (METHODS[method].compress or {}).get("policy") == "kvpop"


def readings(
    methods: Sequence[str], budgets: Sequence[float], length: int, scorers: Path | None = None
) -> list[dict[str, Any]]:
    """Returns the policies of a document of this length, each with its name; full attention is always
    measured and not among them. `scorers` is the file for methods that need one."""
    out: dict[str, dict[str, Any]] = {}
    for method in methods:
        own = METHODS[at_length(method, length)]
        for budget in budgets if own.budgeted else [None]:
            key = name(at_length(method, length), budget)
            out[key] = {"name": key, **own.policy} | ({} if budget is None else {"budget": budget})
            if own.compress:
                out[key]["compress"] = own.compress
                if needs_scorers(method):
                    if scorers is None:
                        raise InvalidArgument(f"{method} needs a file of scorers")
                    out[key]["compress"] = own.compress | {"scorers": str(scorers)}
    out.pop("full", None)
    return sorted(out.values(), key=lambda r: str(r.get("compress", "")))
