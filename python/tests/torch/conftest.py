"""Provides fixtures for tests that need PyTorch: one thread, small shapes, a generated corpus."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from prefixd.train.corpus import Corpus

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """Returns repetitive prose, so that a few steps of training already help."""
    from prefixd.train.corpus import Corpus

    rng = np.random.default_rng(0)
    vocabulary = "a store keeps keys and values on disk for any decoder that asks".split()
    lines = [" ".join(rng.choice(vocabulary, 9)) + ".\n" for _ in range(4000)]
    text = np.frombuffer("".join(lines).encode(), np.uint8).copy()
    return Corpus(text, np.zeros(1, np.int64), [text[:40000].tobytes()])
