"""Runs what its first word says: ``compare`` and ``report`` need no PyTorch, all else does."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    if given[:1] in (["compare"], ["report"]):
        from prefixd.evaluate.compare import program as compare

        return compare.main(given[1:]) if given[0] == "compare" else compare.report_main(given[1:])
    from prefixd.evaluate import program

    return program.main(given)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
