"""Accepts NumPy arrays, PyTorch tensors and other DLPack arrays side by side, without importing a
library that is not loaded yet. All data crosses host memory: tensors on a device are copied there
and back. Arrays of other libraries on a device are refused, because only their own library can copy
them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from prefixd.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

    Array = np.ndarray | torch.Tensor

# NumPy has no bf16, so it sees such rows as their 16 bits.
NUMPY_TYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
# DLPack's device types that the processor can read: its own memory, and pinned or managed memory.
_HOST_MEMORY = (1, 3, 11, 13)


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def torch_dtype(name: str) -> torch.dtype:
    import torch

    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[name]


def as_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Returns stored rows as a tensor over the same memory."""
    import torch

    if dtype == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def dtype_name(dtype: torch.dtype) -> str | None:
    """Returns prefixd's name for a torch dtype; None when rows cannot have it."""
    import torch

    names = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
    return names.get(dtype)


def tokens_array(tokens: Any) -> np.ndarray:
    """Returns the token ids of one prompt (a list, an array or a tensor) as one row of uint32."""
    array = _tensor(tokens).numpy() if is_torch(tokens) else _foreign(tokens)
    array = np.asarray(array)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"tokens must be one row of integers, not {array.dtype} of shape {array.shape}"
        )
    if array.size and (array.min() < 0 or array.max() > 0xFFFFFFFF):
        raise ValueError("token ids must lie between 0 and 2**32 - 1")
    return np.ascontiguousarray(array, dtype=np.uint32)


def _tensor(tensor: Any) -> Any:
    """Returns the tensor in host memory, without a gradient."""
    if tensor.is_meta:
        raise InvalidArgument("a tensor on the meta device has no data; compute it on a real one")
    return tensor.detach().to("cpu")


def _foreign(array: Any) -> Any:
    """Returns arrays of other libraries as NumPy arrays over the same memory; anything else
    unchanged."""
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack_device__"):
        return array
    kind, index = array.__dlpack_device__()
    if int(kind) not in _HOST_MEMORY:
        name = {2: "CUDA", 8: "Metal", 10: "ROCm"}.get(int(kind), f"DLPack type {int(kind)}")
        raise InvalidArgument(
            f"a {type(array).__module__}.{type(array).__name__} lies on device {index} ({name}); copy it to "
            "host memory first (PyTorch tensors are copied by prefixd)"
        )
    return np.from_dlpack(array)


def as_input(array: Any) -> Any:
    """Returns an array that the extension module can read in place: host memory, C order, no
    gradient."""
    if is_torch(array):
        return _tensor(array).contiguous()
    return np.ascontiguousarray(_foreign(array))


def as_float32(array: Any) -> Any:
    """Returns queries as float32; an array that is float32 in host memory is not copied."""
    if is_torch(array):
        import torch

        return _tensor(array).to(torch.float32).contiguous()
    return np.ascontiguousarray(_foreign(array), dtype=np.float32)


def rows_in_place(array: Any, n: int, shape: tuple[int, int], half: bool) -> Any:
    """Returns the first n rows of an engine's own array [n or more][heads][dim], to be written where they
    lie; refuses what would have to be copied."""
    if is_torch(array):
        plain = array.device.type == "cpu" and array.is_contiguous()
    else:
        plain = isinstance(array, np.ndarray) and array.flags.c_contiguous and array.flags.writeable
    if not plain or tuple(array.shape[1:]) != shape or array.shape[0] < n:
        raise InvalidArgument(
            f"rows are written in place, so they need a contiguous array in host memory of shape [{n} or more]"
            f"[{shape[0]}][{shape[1]}], not one of shape {tuple(array.shape)}"
        )
    rows = array[:n]
    # NumPy's halves and 16-bit integers have different type codes; the core takes the integers.
    return rows.view(np.uint16) if half and not is_torch(rows) else rows


def check_in_place(array: Any) -> None:
    """Refuses outputs that cannot be written in place."""
    if is_torch(array):
        if array.device.type != "cpu":
            raise InvalidArgument(
                f"states are merged in place, in host memory, and this tensor is on {array.device}: use "
                "merge of prefixd.transformers.attention there, or merge copies"
            )
    elif not isinstance(array, np.ndarray):
        raise InvalidArgument(f"states are NumPy arrays or PyTorch tensors, not {type(array).__name__}")


def empty_like(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns a new float32 output in host memory, of the input's library."""
    if is_torch(array):
        import torch

        return torch.empty(shape, dtype=torch.float32)
    return np.empty(shape, np.float32)


def back_to(array: Any, like: Any) -> Any:
    """Moves results to the device of the input."""
    return array.to(like.device) if is_torch(like) else array
