"""Splices stored prompts into Hugging Face models.

    store = prefixd.open("/srv/kv")                       # or prefixd.connect(...)
    splice = prefixd.transformers.Splice(store, model)
    with splice.cache(input_ids) as cache:                # attaches to the longest stored prefix
        output = model.generate(input_ids, past_key_values=cache)

The prompt's new tokens are stored while they are prefilled; the next prompt that begins alike
attends over them without a prefill. `generate` is the model's own; its weights and its code are
untouched.
"""

from prefixd.extras import require

require("prefixd.transformers", "transformers", "torch", "transformers", "safetensors")

from prefixd.transformers.cache import PrefixCache  # noqa: E402
from prefixd.transformers.splice import Splice  # noqa: E402

__all__ = ["PrefixCache", "Splice"]
