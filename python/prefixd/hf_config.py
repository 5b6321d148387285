"""What a Hugging Face configuration says of keys and values. The splice and the vLLM connector both
tell models apart by it, so both must leave out the same."""

from __future__ import annotations

# RoPE whose frequencies do not depend on the current length.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
# Keys and values do not depend on these entries, or they have a field of their own.
IRRELEVANT = {
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
