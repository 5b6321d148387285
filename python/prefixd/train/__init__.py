"""Trains feature maps for any model (``python -m prefixd.train``) and the small model (``python -m
prefixd.train.model``)."""

from prefixd.extras import require

require("prefixd.train", "research", "torch", "transformers", "safetensors")
