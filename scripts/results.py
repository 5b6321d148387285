#!/usr/bin/env python3
"""Writes docs/results.md from the figures of the last runs.

    results.py                    write the page
    results.py --check            fail when the page is not what the figures give
    results.py take FILE RUN      keep the JSON that a benchmark wrote as the run RUN, and write the page

docs/results/promises.toml lists the promises and where their figures are; docs/results/*.json are
the output of the benchmarks. RUN is a file's name there ("step"), or a part of one ("storage/rows")
where it takes several calls of a benchmark. The script needs only the standard library.
"""
import argparse
import json
import pathlib
import shlex
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
FACTS = ("commit", "command", "date", "machine")
COLUMNS = ("measured", "target", "today", "floor or peer", "command", "commit", "date", "machine")


class Mistake(Exception):
    """Says what is wrong with promises.toml or the figures, in a sentence."""


def select(figures, pointer):
    """Returns the number at `pointer`, "/speed/name=random rows, cold/ratio/median". Each part is a
    member, a position, or the first element of a list whose members match
    ("method=topk&budget=0.01"). A "/" within a name is "~1", "#" is the length of a list; " | 1e-6"
    multiplies."""
    path, _, factor = pointer.partition(" | ")
    at = figures
    for step in (part.replace("~1", "/") for part in path.strip("/").split("/")):
        if isinstance(at, list) and "=" in step:
            wanted = [pair.split("=", 1) for pair in step.split("&")]
            found = [one for one in at if all(str(one.get(name)) == value for name, value in wanted)]
            if not found:
                raise Mistake(f"{pointer}: nothing there has {step}")
            at = found[0]
        elif isinstance(at, list) and step.lstrip("-").isdigit() and -len(at) <= int(step) < len(at):
            at = at[int(step)]
        elif isinstance(at, dict) and step in at:
            at = at[step]
        elif isinstance(at, list) and step == "#":
            at = len(at)
        else:
            raise Mistake(f"{pointer}: no '{step}' there")
    if isinstance(at, bool) or not isinstance(at, (int, float)):
        raise Mistake(f"{pointer} is no number")
    return at * float(factor) if factor else at


class Runs:
    """Returns the kept figures, and the facts of each run from its JSON, else from
    promises.toml."""

    def __init__(self, folder, stated):
        self.figures = {f.stem: json.loads(f.read_text()) for f in sorted(folder.glob("*.json"))}
        self.stated = stated
        self.used = set()

    def names(self):
        for file, figures in self.figures.items():
            if is_parted(figures):
                yield from (f"{file}/{part}" for part in figures)
            else:
                yield file

    def of(self, name):
        file, _, part = name.partition("/")
        try:
            run = self.figures[file][part] if part else self.figures[file]
        except KeyError:
            raise Mistake(f"there is no run '{name}' in docs/results") from None
        self.used.add(name)
        return run

    def facts(self, name):
        facts = dict(self.of(name).get("run", {}))
        for key, value in self.stated.get(name, {}).items():
            if key in facts:
                raise Mistake(f"promises.toml states the {key} of '{name}', whose JSON says it itself")
            facts[key] = value
        missing = [key for key in FACTS if not facts.get(key)]
        if missing:
            raise Mistake(f"'{name}' lacks: {', '.join(missing)}")
        return facts


def is_parted(figures):
    return bool(figures) and all(isinstance(v, dict) and "run" in v for v in figures.values())


def met(row, values):
    """Returns whether the row's target is reached; None where it has none."""
    value = values[row.get("compare", next(iter(values)))]
    for bound, holds in (("at_least", float.__ge__), ("at_most", float.__le__)):
        if bound in row:
            return holds(float(value), float(values.get(row[bound], row[bound])))
    return None


def machine_text(machine):
    return " ".join(machine.replace("(R)", "").replace(" Processor", "").split())


def row_cells(row, runs):
    run = runs.of(row["run"])
    values = {name: select(run, pointer) for name, pointer in row["get"].items()}
    try:
        reached = met(row, values)
        today, floor = (row.get(cell, "").format(**values) for cell in ("today", "floor"))
    except (KeyError, ValueError) as error:
        raise Mistake(f"'{row['what']}': {error} is neither a number nor one of `get`") from None
    if (reached is False) != ("why" in row):
        raise Mistake(f"'{row['what']}': " + ("is unmet and does not say why" if reached is False
                                               else "says why it is unmet, and is not"))
    if (reached is None) != ("target" not in row):
        raise Mistake(f"'{row['what']}': a target needs at_least or at_most, and the other way round")
    facts = runs.facts(row["run"])
    cells = [row["what"], row.get("target", ""),
             f"**{today}: not reached**" if reached is False else today,
             floor, f"`{facts['command']}`", facts["commit"],
             facts["date"], machine_text(facts["machine"])]
    return reached, [cell.replace("|", "\\|") for cell in cells]


def table(rows):
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|" + "---|" * len(COLUMNS)
    for cells in rows:
        yield "| " + " | ".join(cells) + " |"


def page(folder):
    promises = tomllib.loads((folder / "promises.toml").read_text())
    runs = Runs(folder, promises.get("run", {}))
    tables, unmet = [], []
    for promise in promises["promise"]:
        cells = []
        for row in promise["row"]:
            reached, line = row_cells(row, runs)
            cells.append(line)
            if reached is False:
                unmet.append(f"- **{row['what']}** ({line[1]}): {line[2].strip('*').split(': not')[0]}. "
                             f"{row['why']}")
        tables += ["", f"## {promise['title']}", "", promise["text"].strip(), "", *table(cells)]
    unused = sorted(set(runs.names()) - runs.used)
    if unused:
        raise Mistake(f"no promise uses the run {', '.join(unused)}: remove it or show it")
    unknown = sorted(set(promises.get("run", {})) - set(runs.names()))
    if unknown:
        raise Mistake(f"promises.toml states facts of runs that are not there: {', '.join(unknown)}")
    lines = ["<!-- Made by scripts/results.py from docs/results/: change those, then `make results`. -->",
             "# Results", "", promises["intro"].strip(), "", "## What is not reached", "",
             *(unmet or ["Every target below is reached."]), *tables]
    return "\n".join(lines) + "\n"


def public_command(command):
    """Returns the command as others call it: words replace folders of this machine, --json is
    dropped."""
    out, words = [], iter(shlex.split(command))
    for word in words:
        if word == "--json":
            next(words, None)
        elif word.startswith("/"):
            out.append(out[-1].lstrip("-").upper() if out and out[-1].startswith("-") else word.split("/")[-1])
        else:
            out.append(shlex.quote(word))
    return " ".join(out)


def take(source, name, folder):
    figures = json.loads(pathlib.Path(source).read_text())
    facts = figures.get("run")
    if not isinstance(facts, dict) or any(not facts.get(key) for key in FACTS):
        raise Mistake(f"{source} does not say which run it is of ('run' with {', '.join(FACTS)})")
    if "with changes" in facts["commit"] or facts["commit"] == "unknown":
        raise Mistake(f"{source} was made by a build of no commit ({facts['commit']}): commit, build, run again")
    facts["command"] = public_command(facts["command"])
    file, _, part = name.partition("/")
    path = folder / f"{file}.json"
    if part:
        kept = json.loads(path.read_text()) if path.exists() else {}
        if kept and not is_parted(kept):
            raise Mistake(f"{path.name} is one run, and has no parts")
        kept[part] = figures
        figures = kept
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="the repository")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is stale")
    parser.add_argument("take", nargs="*", metavar="take FILE RUN")
    args = parser.parse_args(argv)
    if args.take and (len(args.take) != 3 or args.take[0] != "take" or args.check):
        parser.error("either nothing, --check, or: take FILE RUN")
    folder, target = args.root / "docs/results", args.root / "docs/results.md"
    try:
        if args.take:
            take(*args.take[1:], folder)
        text = page(folder)
    except Mistake as mistake:
        print(f"results.py: {mistake}", file=sys.stderr)
        return 1
    if not args.check:
        target.write_text(text)
    elif not target.exists() or target.read_text() != text:
        print("results.py: docs/results.md is stale: run `make results`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
