"""The policies by name, as they are compared."""

from __future__ import annotations

from collections.abc import Callable

from prefixd.errors import InvalidArgument
from prefixd.retention.compress import GKV, Global, Local, SnapKV
from prefixd.retention.greedy import H2O, Tova
from prefixd.retention.kvpop import KVpop, Scorer
from prefixd.retention.policy import Policy
from prefixd.retention.scorers import LOG_DECAY
from prefixd.retention.window import SinksAndWindow

PLAIN: dict[str, Callable[[int], Policy]] = {
    "window": SinksAndWindow,
    "tova": Tova,
    "h2o": H2O,
    "snapkv": SnapKV,
    "local": Local,
    "global-sum": lambda budget: Global(budget, "sum"),
    "global-max": lambda budget: Global(budget, "max"),
    "global-mean": lambda budget: Global(budget, "mean"),
    "gkv": GKV,
    "gkv-plus": lambda budget: GKV(budget, sign=1),
}
# KVpop's ranking, by what the future brings, without decay and with the strongest one of the paper, and by
# trained scorers.
FORESEEN = {"foreseen": 0.0, "foreseen-decay": LOG_DECAY[0]}
LEARNT = ("kvpop-mlp", "kvpop-mlstm")
NAMES = (*PLAIN, *FORESEEN, *LEARNT)
WINDOW = 64  # KVpop's, as the earlier of its papers has it at budgets like ours

Scorers = Callable[[str], Scorer]


def make(name: str, budget: int, scorer: Scorers) -> Policy:
    """Returns a policy at its beginning. `scorer` returns the scorer of a layer, at its beginning, by the
    name of the policy."""
    if name in PLAIN:
        return PLAIN[name](budget)
    if name not in NAMES:
        raise InvalidArgument(f"there is no policy {name}; there are {', '.join(NAMES)}")
    return KVpop(budget, scorer(name), window=WINDOW)
