"""Shows answers as they come, and tables."""

from __future__ import annotations

from typing import Any

from job import Job
from text import shown

NAMES = {"own": "full attention, no prefixd", "alone": "without the document", "full": "everything read",
         "topk_auto": "budget", "sink_tail": "first and last tokens"}


def name_of(method: str, budget: float | None) -> str:
    if method == "topk_auto" and budget is not None:
        return f"budget {100 * budget:g}%"
    return NAMES.get(method, method)


def mark(right: bool | None) -> str:
    return "" if right is None else "  ✓" if right else "  ✗"


class Streams:
    """Prints the answers of real questions token by token; planted facts are only counted."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._question: int | None = None
        self._reading: tuple[str, float | None] | None = None
        self._ids: list[int] = []
        self._printed = 0

    def token(self, event: dict[str, Any]) -> None:
        if self._job.facts:
            return
        self._begin(event)
        self._ids.append(event["token"])
        text = self._text()
        if not text.endswith("�"):  # a character may take several tokens
            print(text[self._printed :], end="", flush=True)
            self._printed = len(text)

    def end(self, event: dict[str, Any], right: bool | None) -> None:
        if self._job.facts:
            return
        self._begin(event)
        speed = ""
        if len(event["tokens"]) > 1:
            speed = f"  [{(len(event['tokens']) - 1) / event['seconds']:.1f} tokens/s]"
        print(self._text()[self._printed :] + mark(right) + speed, flush=True)
        self._reading = None

    def infeasible(self, event: dict[str, Any]) -> None:
        if not self._job.facts:
            print(f"     {name_of(event['method'], event['budget']):<28}- infeasible: {event['reason']}")

    def _begin(self, event: dict[str, Any]) -> None:
        if event["question"] != self._question:
            self._question = event["question"]
            print(f"\n   {self._job.questions[self._question].text}")
        reading = (event["method"], event["budget"])
        if reading != self._reading:
            self._reading, self._ids, self._printed = reading, [], 0
            print(f"     {name_of(*reading):<28}{self._job.questions[event['question']].begun}", end="", flush=True)

    def _text(self) -> str:
        return shown(self._job.text.decode(self._ids)).replace("\n", " ")


def _budget(row: dict[str, Any]) -> str:
    return f"{100 * row['budget']:g}%" if row["budget"] else "all"


def table(rows: list[dict[str, Any]], small: bool) -> None:
    print(f"\n   {'method':<11} {'budget':>6} {'answers':>7} {'nll':>8} {'rel. l1':>8} {'tok-equiv':>9} {'K':>6} "
          f"{'bytes/step':>11} {'of it SSD':>11} {'ms/token':>9} {'tokens/s':>9}")
    for row in rows:
        if not row["feasible"]:
            print(f"   {row['method']:<11} {_budget(row):>6}  - infeasible: {row['reason']}")
            continue
        answers = "-" if row["correct"] is None else f"{row['correct']}/{row['questions']}"
        print(f"   {row['method']:<11} {_budget(row):>6} {answers:>7} {row['nll']:>8.4f} {row['rel_l1']:>8.4f} "
              f"{row['tokens_per_step']:>9.1f} {row['k']:>6} {row['bytes_per_step']:>11.0f} "
              f"{row['ssd_bytes_per_step']:>11.0f} {row['ms_per_token']:>9.2f} {row['tokens_per_s']:>9.1f}")
    print("\n   A step is one token through all layers. tok-equiv: per KV head, the whole summary charged to\n"
          "   every step. Bytes are physical (pages from SSD, rows from host memory)."
          + (" The model is small:\n   it finds planted needles and answers no real questions." if small else ""))


def cold_table(rows: list[dict[str, Any]]) -> None:
    print(f"\n   {'method':<11} {'budget':>6} {'SSD bytes/step':>16} {'ms/token':>14}")
    for row in rows:
        if row.get("cold_ms_per_token") is not None:
            print(f"   {row['method']:<11} {_budget(row):>6} {row['cold_bytes_per_step']:>16.0f} "
                  f"{row['cold_ms_per_token']:>14.2f}")
