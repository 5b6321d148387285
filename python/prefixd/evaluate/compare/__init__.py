"""Compares ways of reading with full attention on real texts: ``python -m prefixd.evaluate compare``.

prefixd's own decoder does the work, so PyTorch is not needed."""

from prefixd.extras import require

require("prefixd.evaluate.compare", "models", "jinja2", "numpy", "tokenizers")
