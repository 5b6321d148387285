"""Arguments that the programs of this package share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns what parses "a,b" and refuses a name that is not known."""

    def parse(value: str) -> list[str]:
        names = [v.strip() for v in value.split(",") if v.strip()]
        if wrong := [v for v in names if v not in known]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(wrong)}; there are {', '.join(known)}")
        return names

    return parse
