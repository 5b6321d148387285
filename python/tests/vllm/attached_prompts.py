"""The prompts of test_attached.py: questions behind prefixes that are stored."""

from __future__ import annotations

from tests.vllm import engines
from tests.vllm.engines import BLOCK, STEP

PREFIXES = {name: engines.text(first, n) for name, first, n in (("a", 300, 3000), ("b", 9000, 1300), ("c", 14700, 700))}
QUESTIONS = [engines.text(20000 + 777 * i, n)[1:] for i, n in enumerate((41, 1 + STEP, 90, 400, 20, 60))]
PROMPTS = {f"{p}{q}": prefix + question for p, prefix in PREFIXES.items() for q, question in enumerate(QUESTIONS)}
PROMPTS["ordinary"] = engines.text(33000, 300)
PROMPTS["short"] = engines.text(34000, 3 * BLOCK + 10)  # of a prefix that is too short
LONG_ANSWER = 100
# Answers that are longer than the cache of test_own_window.py.
LONGER = {"b3": 1200, "c0": 700, "ordinary": 400}
