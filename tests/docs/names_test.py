#!/usr/bin/env python3
"""Checks that the names of code, and the tasks of make, that pages show between backticks exist.

    names_test.py [--source DIR]

A name is a word in CamelCase, or of two or more parts joined by "_". It must occur in a source, or be
the name of a file. Left out are what holds of the past (CHANGELOG.md, decision notes), the formulas
of mathematics.md, blocks of code, which other tests run, and FOREIGN.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from links_test import files, outside_code

# Of other programs, made up in an example, or joined from parts by a benchmark.
FOREIGN = {
    "EXTEND_TIMEOUT_USEC", "LoadCredential", "check_enough_kv_cache_memory", "sched_autogroup_enabled", "softmax_lse",
    "dynamic_cache", "remainder_NAME",
    "gather_link_fraction_k1311", "phi_stored8_overhead", "moment_rank8_overhead",
    "exact_bandwidth_fraction_128k", "topk_keys_128k_bandwidth_fraction",
    "topk_codes_128k_bandwidth_fraction", "suffix_64_tokens_128k_tflops",
    "phi_time_unfused_over_fused_k1311", "step_over_sdpa_speedup_128k",
}  # fmt: skip
WORD = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*")
CAMEL = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+$")
PARTS = re.compile(r"[A-Za-z0-9]{2,}(?:_[A-Za-z0-9]{2,})+$")
BINARY = {".bin", ".png", ".safetensors", ".gz", ".svg"}


def known(root: Path) -> tuple[set[str], set[str]]:
    """Returns the words of all sources and file names, and the tasks of make."""
    words: set[str] = set()
    for file in files(root):
        words.update(WORD.findall(file.name))
        if file.suffix not in BINARY and file.suffix != ".md":
            words.update(WORD.findall(file.read_text(errors="ignore")))
    tasks = set(re.findall(r"^([a-z0-9-]+):", (root / "Makefile").read_text(), re.M))
    return words, tasks


def unknown(text: str, words: set[str], tasks: set[str]):
    """Yields (line, name) of what a page names and nothing declares."""
    for number, line in enumerate(outside_code(text).split("\n"), 1):
        for code in re.findall(r"`([^`]+)`", line):
            for name in WORD.findall(code):
                if (CAMEL.match(name) or PARTS.match(name)) and name not in words | FOREIGN:
                    yield number, name
            for task in re.findall(r"\bmake ([a-z][a-z0-9-]*)", code):
                if task not in tasks:
                    yield number, f"make {task}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[2])
    root = parser.parse_args().source
    words, tasks = known(root)
    planted = "`NoSuchThingAnywhere` and `no_such_thing_anywhere`, after `make no-such-task`\n"
    words -= set(WORD.findall(planted))  # this file has them
    if [name for _, name in unknown(planted, words, tasks)] != WORD.findall(planted)[:1] + [
        "no_such_thing_anywhere",
        "make no-such-task",
    ]:
        print("names_test: planted names were not found")
        return 1
    failed = False
    for page in files(root):
        if page.suffix != ".md" or page.name in {"CHANGELOG.md", "mathematics.md"} or page.parent.name == "decisions":
            continue
        for line, name in unknown(page.read_text(), words, tasks):
            print(f"{page.relative_to(root)}:{line}: {name}: no source has this name")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
