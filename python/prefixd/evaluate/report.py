"""Writes the output directory: results.json, tables.md, figures, report.html (one file, nothing
fetched)."""

from __future__ import annotations

import base64
import html
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import prefixd
from prefixd.evaluate.figures import draw
from prefixd.evaluate.rows import Rows
from prefixd.evaluate.summary import summarise
from prefixd.evaluate.tables import all_tables

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:1420px;margin:2em auto;padding:0 1.2em}
h1{font-size:1.7em;margin-bottom:.2em}h2{font-size:1.15em;margin:2em 0 .2em}
p{margin:.3em 0 .8em;max-width:75ch}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:12.5px;font-variant-numeric:tabular-nums}
th,td{padding:.25em .42em;text-align:right;white-space:nowrap;border-bottom:1px solid #e4e4e4}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:#fff}
thead th{border-bottom:2px solid #999}tr:hover td{background:#f6f8fa}
figure{margin:1.2em 0}img{max-width:100%;height:auto}figcaption{color:#555;max-width:80ch}
.note{background:#f6f8fa;border-left:3px solid #1f78b4;padding:.5em .9em;max-width:80ch}
"""


def write_report(directory: Path) -> dict[str, Any]:
    """Reads plan.json and rows.jsonl in `directory`; returns what results.json holds."""
    plan = json.loads((directory / "plan.json").read_text())
    results = summarise(plan, Rows(directory / "rows.jsonl").rows)
    results["environment"] = {
        "prefixd": prefixd.__version__, "torch": torch.__version__,
        "transformers": transformers.__version__, "machine": platform.machine(),
        "processor": _processor(), "cores": os.cpu_count() or 0,
    }
    if not results["lengths"]:
        results["note"] = "no document is done yet"
    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    tables, figures = all_tables(results), draw(results, directory / "figures")
    lead = _lead(results)
    text = "\n".join(f"{line}\n" for line in lead)
    text += "\n" + "\n".join(f"### {title}\n\n{said}\n\n{table}" for title, said, table in tables)
    (directory / "tables.md").write_text(text)
    parts = [f"<p>{html.escape(line)}</p>" for line in lead[1:]]
    for title, said, table in tables:
        parts.append(f"<h2>{html.escape(title)}</h2><p>{html.escape(said)}</p>"
                     f'<div class="scroll">{_html_table(table)}</div>')
    for name, title, said in figures:
        data = base64.b64encode((directory / "figures" / name).read_bytes()).decode()
        parts.append(
            f'<figure><h2>{html.escape(title)}</h2><img alt="{html.escape(title)}" '
            f'src="data:image/png;base64,{data}"><figcaption>{html.escape(said)}</figcaption></figure>')
    title = html.escape(lead[0].lstrip("# "))
    (directory / "report.html").write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style><h1>{title}</h1>{''.join(parts)}</html>\n")
    return results


def _lead(results: dict[str, Any]) -> list[str]:
    plan, env = results["plan"], results["environment"]
    documents = ", ".join(f"{count} of {n} tokens" for n, count in results["documents"].items())
    lines = [
        f"# Quality over stored prompts: {Path(plan['checkpoint']).name}",
        f"Documents: {documents or 'none'}; rows stored as {plan['dtype']}; selector {plan['selector']}; "
        f"feature maps: {', '.join(plan['maps']) or 'none'}; seed {plan['seed']}. prefixd "
        f"{env['prefixd']}, transformers {env['transformers']}, torch {env['torch']}, "
        f"{env['processor']}.",
        "A question attends to the document exactly; its last token and the answer read it by the "
        "method, as decoding does. Intervals are 95%.",
    ]
    failed = [p for p in results["probes"] if not p["able"]]
    if failed:
        lines.append(
            "The model itself fails, with full attention, at: "
            + "; ".join(f"{p['task']} ({p['length']} tokens, score {p['score']:.2f})" for p in failed)
            + ". The other methods were not asked there.")
    poor = [
        f"{e['kind']} ({e['length']} tokens: {e['mean']:.2f})" for e in results["accuracy"]
        if e["method"] == "full" and e["kind"] and e["mean"] < 0.5
    ]
    if poor:
        lines.append("With full attention the model itself answers less than half of: "
                     + ", ".join(poor) + ". These say little about the methods.")
    return lines


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"


def _html_table(markdown: str) -> str:
    """Turns a table of tables.markdown into HTML."""
    def cells(line: str, tag: str) -> str:
        out = []
        for cell in line.strip().strip("|").split("|"):
            text = html.escape(cell.strip())
            if text.startswith("**"):
                text = f"<b>{text.strip('*')}</b>"
            out.append(f"<{tag}>{text}</{tag}>")
        return f"<tr>{''.join(out)}</tr>"

    lines = markdown.strip().splitlines()
    body = "".join(cells(x, "td") for x in lines[2:])
    return f"<table><thead>{cells(lines[0], 'th')}</thead><tbody>{body}</tbody></table>"
