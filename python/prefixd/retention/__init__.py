"""Which tokens of a long generation stay exact, and what becomes of those that leave: policies of the
papers and of prefixd beside each other, on what the attention of a real model saw.

    python -m prefixd.retention --model build/models/smollm2 --out build/retention

docs/quality.md has the figures, docs/decisions/059 what they decided."""

from prefixd.extras import require

require("prefixd.retention", "research", "jinja2", "numpy", "safetensors", "tokenizers", "torch", "transformers")
