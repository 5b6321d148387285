"""Compares ways of reading with full attention on real texts: ``python -m prefixd.evaluate compare``."""
