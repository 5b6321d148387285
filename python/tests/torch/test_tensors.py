"""Tests tensors where the core takes arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prefixd
from tests.prompts import DIM, FULL, Q_HEADS, Prompt


def test_tensors_are_taken_and_those_without_data_refused(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    ids = torch.from_numpy(prompt.tokens.astype(np.int64))
    with store.attach("m", ids, policy=FULL) as session:
        want = session.step(0, prompt.q[0])
        y, lse = session.step(0, torch.from_numpy(prompt.q[0]))
        assert isinstance(y, torch.Tensor) and isinstance(lse, torch.Tensor)
        np.testing.assert_array_equal(y.numpy(), want[0])
        meta = torch.empty((Q_HEADS, DIM), device="meta")
        with pytest.raises(prefixd.InvalidArgument, match="meta device has no data"):
            session.step(0, meta)
        with pytest.raises(prefixd.InvalidArgument, match="is on meta"):
            prefixd.merge_states(meta, meta[:, 0], *want)
