"""NumPy arrays and PyTorch tensors side by side, without importing either library's other half."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    Array = np.ndarray | torch.Tensor

# Rows of bf16 are shown to NumPy, which has no such type, as the 16 bits they are.
NUMPY_TYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def torch_dtype(name: str) -> torch.dtype:
    import torch

    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[name]


def as_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Stored rows as a tensor over the same memory."""
    import torch

    if dtype == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def dtype_name(dtype: torch.dtype) -> str | None:
    """prefixd's name for a torch dtype; None where it stores no such rows."""
    import torch

    names = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
    return names.get(dtype)


def tokens_array(tokens: Any) -> np.ndarray:
    """Token ids as one row of uint32; a list, an array or a tensor, of one prompt."""
    if is_torch(tokens):
        tokens = tokens.detach().cpu().numpy()
    array = np.asarray(tokens)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"tokens must be one row of integers, not {array.dtype} of shape {array.shape}"
        )
    if array.size and (array.min() < 0 or array.max() > 0xFFFFFFFF):
        raise ValueError("token ids must lie between 0 and 2**32 - 1")
    return np.ascontiguousarray(array, dtype=np.uint32)


def as_input(array: Any) -> Any:
    """Something the extension module can read in place: host memory, C order, no gradient."""
    if is_torch(array):
        return array.detach().to("cpu").contiguous()
    return np.ascontiguousarray(array)


def as_float32(array: Any) -> Any:
    """Queries: a float32 array in host memory is taken as it is, anything else is converted."""
    if is_torch(array):
        import torch

        return array.detach().to(device="cpu", dtype=torch.float32).contiguous()
    return np.ascontiguousarray(array, dtype=np.float32)


def empty_like(array: Any, shape: tuple[int, ...]) -> Any:
    """A float32 output in host memory, of the input's library."""
    if is_torch(array):
        import torch

        return torch.empty(shape, dtype=torch.float32)
    return np.empty(shape, np.float32)


def back_to(array: Any, like: Any) -> Any:
    """Results go where the input came from."""
    return array.to(like.device) if is_torch(like) else array
