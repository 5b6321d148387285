"""Keeps prompts apart that have a salt: they meet those of the same salt alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

# A store compares prompts from their first token on, so it is enough to change the first ones: as many as a
# digest has words.
_MASKED = 16


def token_ids(tokens: Sequence[int] | np.ndarray, salt: str | None) -> np.ndarray:
    """Returns the ids under which a prompt is stored and found: those of its tokens, of which the first 16 are
    masked with the salt's digest, if there is one. Ids of two salts, or of a salt and of none, part at the first
    token or soon behind it, as far as 512 bits can tell."""
    ids = np.array(tokens, np.uint32)
    if salt:
        mask = np.frombuffer(hashlib.blake2b(salt.encode(), digest_size=4 * _MASKED).digest(), "<u4")
        ids[:_MASKED] ^= mask[: len(ids)]
    return ids
