"""Training: ``python -m prefixd.train.model`` and ``python -m prefixd.train.phi``."""
