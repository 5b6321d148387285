#!/usr/bin/env python3
"""The main job of prefixd on a real document; scripts/demo.sh runs this."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from programs import Interrupted, end_on_signals
from text import Stop

# Links are not followed: a checkout may be a folder of links, with a build of its own.
_ROOT = Path(os.path.abspath(__file__)).parents[2]
_SMALL = _ROOT / "models/prefixd-tiny"
_PYTHON = _ROOT / ".venv/bin/python"


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--build", type=Path, default=_ROOT / "build/release", metavar="DIR",
                        help="build folder (default: build/release)")
    work = argparse.ArgumentParser(add_help=False)
    work.add_argument("--model", type=Path, metavar="DIR",
                      help="Hugging Face checkpoint of the Llama or Qwen3 family with tokenizer and chat template "
                      "(default: SmolLM2-135M-Instruct, which is fetched once; without a network models/prefixd-tiny)")
    work.add_argument("--document", type=Path, metavar="FILE",
                      help="UTF-8 text (default: /usr/share/common-licenses/GPL-3)")
    work.add_argument("--question", action="append", metavar="TEXT",
                      help="asked about the document; repeat the option for more than one")
    work.add_argument("--tokens", type=positive, metavar="N", help="take at most the document's first N tokens")
    work.add_argument("--facts", type=positive, metavar="N",
                      help="facts planted and asked, with a byte model (default: 16)")
    work.add_argument("--continuation", type=positive, metavar="N",
                      help="held-out tokens after the prompt that are scored (default: 24; byte model: 192)")
    served = argparse.ArgumentParser(add_help=False)
    served.add_argument("--socket", type=Path, default=os.environ.get("PREFIXD_SOCKET"), metavar="PATH",
                        help="socket of a running daemon (or PREFIXD_SOCKET)")
    served.add_argument("--state", type=Path, required=True, metavar="FILE", help="what `prefill` leaves for `ask`")

    top = argparse.ArgumentParser(prog="scripts/demo.sh", description=__doc__,
                                  epilog="`make demo DEMO_ARGS='OPTIONS'` builds first. COMMAND --help lists options.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run = commands.add_parser("run", parents=[common, work], help="the whole story, with a daemon of its own (default)")
    run.add_argument("--out", type=Path, default=Path("demo-report"), metavar="DIR",
                     help="where the report and the stored prompt go; a DIR/store of anything else is refused "
                     "(default: demo-report)")
    run.add_argument("--fresh", action="store_true", help="prefill again, even if DIR holds the stored prompt")
    commands.add_parser("prefill", parents=[common, work, served], help="prefill a document and store its KV cache")
    ask = commands.add_parser("ask", parents=[common, served], help="ask one question about the stored prompt",
                              epilog="The question reads the whole prompt once, exactly; every token after the first "
                              "is a step under the budget. Bytes are physical (pages from SSD, rows from host memory).")
    ask.add_argument("--question", metavar="TEXT", help="default: the first one that was asked at `prefill`")
    ask.add_argument("--budget", default="0.02", metavar="PART",
                     help="part of the prompt that a step may read: 0.01, 1%%, or all (default: 0.02)")
    ask.add_argument("--tokens", type=positive, metavar="N", help="tokens to generate (default: 32; byte model: 7)")
    ask.add_argument("--json", action="store_true", help="print an object instead of text")
    return top


def real_model() -> Path | None:
    """Returns the checkpoint of the default model, which is made if it is not there; None: it cannot."""
    folder = _ROOT / "build/models/smollm2"
    quiet = {"stdin": subprocess.DEVNULL, "stdout": sys.stderr}
    if not (folder / "README.md").is_file() or not _PYTHON.is_file():
        print("The model, SmolLM2-135M-Instruct, is made ready once (93 MB are fetched).", flush=True)
    made = subprocess.run([_ROOT / "scripts/setup_python.sh", "models"], check=False, **quiet)
    if made.returncode == 0:
        made = subprocess.run([_PYTHON, "-m", "prefixd.models", "smollm2", folder], cwd=_ROOT / "python", check=False,
                              **quiet)
    if made.returncode == 0:
        return folder
    print("The model could not be made ready: the demo falls back to the small model of models/prefixd-tiny, which "
          "reads\nbytes and answers planted facts, no real questions. `make model-smollm2` tries again.", flush=True)
    return None


def choose_model(args: argparse.Namespace) -> None:
    given = args.model
    args.model = (given or real_model() or _SMALL).absolute()
    with_tokenizer(args.model, [] if given else ["--model", str(args.model)])


def with_tokenizer(folder: Path, more: list[str]) -> None:
    """Goes on in the Python that has the tokenizer's packages, if the checkpoint needs them."""
    if not (folder / "tokenizer.json").is_file() or Path(sys.prefix) == _PYTHON.parents[1]:
        return
    subprocess.run([_ROOT / "scripts/setup_python.sh", "models"], check=True, stdin=subprocess.DEVNULL,
                   stdout=sys.stderr)
    sys.stdout.flush()
    os.execv(_PYTHON, [str(_PYTHON), os.path.abspath(__file__), *arguments(), *more])


def arguments() -> list[str]:
    given = sys.argv[1:]
    named = bool(given) and (not given[0].startswith("-") or given[0] in ("-h", "--help"))
    return given if named else ["run", *given]


def main() -> int:
    end_on_signals()
    args = parser().parse_args(arguments())
    args.build = args.build.absolute()
    # The decoder and the daemon share the cores: idle OpenMP threads must not spin on them.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    try:
        if args.command != "run" and args.socket is None:
            raise Stop("name the daemon's --socket (or set PREFIXD_SOCKET)")
        if args.command == "ask":
            import parts

            parts.reading_of(args.budget)
            folder = Path(parts.state_of(args.state)["model_dir"])
            with_tokenizer(folder, [])
            args.tokens = args.tokens or (32 if (folder / "tokenizer.json").is_file() else 7)
            parts.ask(args)
        elif args.command == "prefill":
            import parts

            choose_model(args)
            parts.store(args)
        else:
            import story

            choose_model(args)
            story.run(args)
    except Interrupted as signal:
        print("\ndemo: stopped; no daemon is left", file=sys.stderr)
        return int(signal.args[0])
    except (Stop, OSError, subprocess.CalledProcessError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
