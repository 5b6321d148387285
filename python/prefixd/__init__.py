"""prefixd's Python side: training of the small model and of its feature maps."""

__version__ = "0.1.0"
