"""The matrices of a file of any kind, one at a time: what the demo quantises."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import bfloat16, float16, float32
from .archive import MANIFEST, load, open_members
from .checkpoint import Checkpoint
from .replace import PathLike

__all__ = ["read_matrices"]

_DTYPES = (np.dtype(np.float64), float32, float16, bfloat16)


def read_matrices(path: PathLike) -> Iterator[tuple[str, np.ndarray]]:
    """Every 2-D float tensor of a file, one at a time, as (name, NumPy array).

    path : .npy (the name is the file's), .npz (also one written by `save`: its plain arrays), or
        .safetensors, whose FP8 tensors with scales are given as the float32 values that they stand for. .npy
        and .safetensors are mapped, not read: no tensor is in memory before it is used.
    Yields bfloat16, float16 and float32 as they are and float64 rounded to float32; other dtypes and ranks
    are skipped. Mapped arrays are read-only. Raises, when called and not at the first item:
    FileNotFoundError, ValueError (suffix, damaged file).

    >>> import os, tempfile, numpy as np, cupy_fp8 as fp8
    >>> path = os.path.join(tempfile.mkdtemp(), "model.npz")
    >>> np.savez(path, weight=np.ones((2, 3)), bias=np.ones(3))
    >>> [(name, a.shape, a.dtype.name) for name, a in fp8.io.read_matrices(path)]
    [('weight', (2, 3), 'float32')]
    """
    path = Path(path)
    readers = {".npy": _npy_arrays, ".npz": _npz_arrays, ".safetensors": _safetensors_arrays}
    if path.suffix not in readers:
        raise ValueError(f"{path}: expected a file ending in {', '.join(readers)}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return _matrices(readers[path.suffix](path))


def _matrices(arrays: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, np.ndarray]]:
    for name, a in arrays:
        if isinstance(a, np.ndarray) and a.ndim == 2 and a.dtype in _DTYPES:
            with np.errstate(over="ignore"):
                yield name, a.astype(np.float32) if a.dtype == np.float64 else a


def _npy_arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    try:
        a = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not an .npy file ({error})") from None
    return iter([(path.stem, np.asarray(a))])


def _npz_arrays(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        try:
            members = open_members(file)
        except (ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path}: not an .npz file ({error})") from None
        saved_here = MANIFEST in members
    return iter(load(path).items()) if saved_here else _npz_members(path)


def _npz_members(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    with np.load(path, allow_pickle=False) as archive:
        for name in archive.files:
            yield name, archive[name]


def _safetensors_arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    checkpoint = Checkpoint(path)
    pairs = checkpoint.pairs()
    scales = {pair.scale for pair in pairs.values()}

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in checkpoint.tensors.items():
            if name in scales or len(tensor.shape) != 2:
                continue
            yield name, checkpoint.scaled(pairs[name]).dequantize() if name in pairs else checkpoint.read(
                name)

    return arrays()
