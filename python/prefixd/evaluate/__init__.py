"""Measures the quality of a model over stored prompts, by method, budget and length: ``python -m
prefixd.evaluate``."""
