"""The .safetensors format: reads a file's header (checked) and its tensors (mapped), and writes files a
tensor at a time.

A file is a length of eight bytes, a JSON header of that length, and the tensors' bytes without gaps. The
`safetensors` package reads FP8 and bfloat16 only with PyTorch; here they are NumPy arrays with ml_dtypes
types.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from ..formats import bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu
from .replace import PathLike

__all__ = ["DTYPES", "Tensor", "TensorFile", "by_alignment", "dtype_name", "header_of", "nbytes"]

#: dtypes of NumPy and ml_dtypes by their names in headers
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_), "U8": np.dtype(np.uint8), "I8": np.dtype(np.int8), "F8_E4M3": float8_e4m3fn,
    "F8_E5M2": float8_e5m2, "F8_E8M0": float8_e8m0fnu, "U16": np.dtype(np.uint16), "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16), "BF16": bfloat16, "U32": np.dtype(np.uint32), "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32), "U64": np.dtype(np.uint64), "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64), "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: bits of an element; F4 and F6 are packed, and can only be copied
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, **{name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}}
_LONGEST_HEADER = 100_000_000                   # bytes; same bound as the `safetensors` package
_ALIGNMENT = 8
_MOST_DIMENSIONS = 64                           # limit of NumPy's arrays


class Tensor(NamedTuple):
    """A tensor's header entry. start, stop: its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class TensorFile:
    """A .safetensors file with a checked header: names, dtypes and places are consistent with each other and
    with the file.

    Raises OSError if the file cannot be opened, ValueError that names the file if it is damaged.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = os.fspath(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            try:
                self.tensors, self.metadata = _read_header(file, size)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{self.path}: not a .safetensors file, or a damaged one ({error})") from None

    def read(self, name: str) -> np.ndarray:
        """Return a tensor, mapped and read-only; aligned to its elements only if the file aligns it. F4 and
        F6 are returned as the bytes of their rows."""
        tensor = self.tensors[name]
        shape, dtype = tensor.shape, DTYPES.get(tensor.dtype, np.dtype(np.uint8))
        if tensor.dtype not in DTYPES:
            *outer, row = shape or (1,)
            shape = (*outer, row * _BITS[tensor.dtype] // 8) if row * _BITS[tensor.dtype] % 8 == 0 else (-1,)
        if not tensor.nbytes:
            return np.empty([max(n, 0) for n in shape], dtype)
        return self._mapped[tensor.start:tensor.stop].view(dtype).reshape(shape)

    @cached_property
    def _mapped(self) -> np.ndarray:
        """The whole file, mapped once: a mapping for each tensor would need as many file descriptors."""
        return np.asarray(np.memmap(self.path, np.uint8, "r"))

    def read_bytes(self, name: str, start: int, count: int) -> np.ndarray:
        """Read some bytes of a tensor into new memory."""
        found = np.fromfile(self.path, np.uint8, count, offset=self.tensors[name].start + start)
        if len(found) != count:
            raise ValueError(f"{self.path}: {name} ends early; the file was cut off while it was read")
        return found


def dtype_name(name: str, dtype: np.dtype[Any]) -> str:
    """Return a dtype's name in headers. TypeError, which begins with the tensor's name, for one that the
    format does not have."""
    if dtype not in _NAMES:
        raise TypeError(f"{name}: .safetensors files have no dtype {dtype}; expected one of "
                        f"{', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
              | None = None) -> bytes:
    """Return the header of a file with these tensors (the dtype's name and the shape of each by name, in the
    order of their bytes)."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor."""
    return math.prod(shape) * _BITS[dtype] // 8


def by_alignment(tensors: Iterable[tuple[str, str]]) -> list[str]:
    """Order names of tensors so that each is aligned to its elements, as the `safetensors` package does.
    tensors: name and dtype of each."""
    return [name for name, _ in sorted(tensors, key=lambda item: (-_BITS[item[1]], item[0]))]


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    if size < 8:
        raise ValueError(f"{size} bytes, too few for a header")
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _LONGEST_HEADER):
        raise ValueError(f"a header of {length} bytes is claimed, the file has {size}")
    header = json.loads(file.read(length).decode(), object_pairs_hook=_unique, parse_constant=_no_number)
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is no object of strings")
    tensors = {name: _tensor(name, about, 8 + length) for name, about in header.items()}
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if tensor.start != end:
            raise ValueError(f"{name} begins at byte {tensor.start}, expected {end}")
        end = tensor.stop
    if end != size:
        raise ValueError(f"the tensors end at byte {end}, the file has {size}")
    return tensors, metadata


def _tensor(name: str, about: Any, start: int) -> Tensor:
    if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name!r}: no name of a tensor") from None
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{name}: unknown dtype {dtype!r}")
    for numbers, what in ((shape, "shape"), (offsets, "data_offsets")):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"{name}: {what} is no list of numbers from 0 on")
    if len(offsets) != 2 or math.prod(shape) * _BITS[dtype] != 8 * (offsets[1] - offsets[0]):
        raise ValueError(f"{name}: bytes {offsets} are not those of {dtype} {shape}")
    if len(shape) > _MOST_DIMENSIONS or any(n >= 2**63 for n in shape):
        raise ValueError(f"{name}: shape {shape} is none that arrays have")
    return Tensor(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in the header")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} in the header")
