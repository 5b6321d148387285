"""Records what a model's attention sees while it reads a long prompt and answers: keys, values and
queries of every layer, in one file that the benchmarks of selection, estimators, row layout and steps
take (``--trace FILE``).

    python -m prefixd.trace --model build/models/smollm2 --out traces

docs/bench.md describes the file."""

from prefixd.extras import require

require(
    "prefixd.trace", "research", "jinja2", "numpy", "safetensors", "tokenizers", "torch", "transformers"
)

from prefixd.trace.conversations import Conversation, Turn  # noqa: E402
from prefixd.trace.record import Trace, record  # noqa: E402

__all__ = ["Conversation", "Trace", "Turn", "record"]
