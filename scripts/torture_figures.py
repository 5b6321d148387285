#!/usr/bin/env python3
"""Collects the counts that torture and fuzzing reached, from their state, into one JSON and one
table.

torture_figures.py STATE_DIR JSON [--fuzz CORPUS_DIR] [--commit ID]

STATE_DIR is prefixd_torture's (build/torture), CORPUS_DIR scripts/fuzz.sh's (build/fuzz/corpus).
Harnesses without a state keep the figures that JSON has. The table for docs/reliability.md is
printed.
"""
import argparse
import json
import pathlib

ORDER = ["disk", "faults", "kill", "power", "damage", "random"]
AT_POINT = "killed at "


def table(figures):
    yield "| harness | cycles | what was counted | violations | commit |"
    yield "|---|---|---|---|---|"
    for h in figures["harnesses"]:
        counts = [f"{n:,} {name}" for name, n in h["counts"].items()
                  if not name.startswith(AT_POINT)]
        points = sum(name.startswith(AT_POINT) for name in h["counts"])
        if points:
            counts.append(f"kills at {points} different points")
        yield (f"| `{h['harness']}` | {h['cycles']:,} of {h['of']:,} | {', '.join(counts)} | "
               f"{len(h['violations'])} | {h.get('commit', '')} |")
    fuzz = figures.get("fuzz", {})
    if fuzz:
        targets = ", ".join(f"{n / 1e6:.1f} `{name}`" for name, n in fuzz["executions"].items())
        yield ""
        yield (f"Fuzzing: {sum(fuzz['executions'].values()) / 1e6:.1f} million executions, "
               f"{fuzz['findings']} findings (in millions: {targets}).")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=pathlib.Path)
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument("--fuzz", type=pathlib.Path)
    parser.add_argument("--commit", help="what the harnesses with a state ran on")
    args = parser.parse_args()
    figures = json.loads(args.json.read_text()) if args.json.exists() else {"harnesses": []}
    harnesses = {h["harness"]: h for h in figures["harnesses"]}
    for name in ORDER:
        state = args.state / f"{name}.json"
        if not state.exists():
            continue
        harnesses[name] = json.loads(state.read_text())
        if args.commit:
            harnesses[name]["commit"] = args.commit
    figures["harnesses"] = [harnesses[name] for name in ORDER if name in harnesses]
    if args.fuzz:
        books = sorted(args.fuzz.glob("*.executions"))
        findings = args.fuzz.parent / "findings"
        figures["fuzz"] = {
            "executions": {book.stem: int(book.read_text()) for book in books},
            "findings": len(list(findings.iterdir())) if findings.exists() else 0,
        }
    args.json.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    print("\n".join(table(figures)))


if __name__ == "__main__":
    main()
