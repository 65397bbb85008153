"""The matrices of a file of any kind, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .found import tensors
from .replace import PathLike

__all__ = ["read_matrices"]


def read_matrices(path: PathLike) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every 2-D float tensor of a file, one at a time, as (name, NumPy array).

    path : .npy (the name is the file's), .npz (also one written by `save`), .safetensors, or a folder of
        .safetensors files. .npy and .safetensors are memory-mapped: no tensor is in memory before it is used.
    Yields bfloat16, float16 and float32 as stored, float64 rounded to float32, and FP8 data as the float32
    values of data and scales; scales are not matrices of their own. Other dtypes and ranks are skipped.
    Mapped arrays are read-only. Raises, when called and not at the first item: FileNotFoundError, ValueError
    (suffix, damaged file).

    >>> import os, tempfile, numpy as np, cupy_fp8 as fp8
    >>> path = os.path.join(tempfile.mkdtemp(), "model.npz")
    >>> np.savez(path, weight=np.ones((2, 3)), bias=np.ones(3))
    >>> [(name, a.shape, a.dtype.name) for name, a in fp8.io.read_matrices(path)]
    [('weight', (2, 3), 'float32')]
    """
    return ((found.name, found.values) for found in tensors(path)
            if found.values is not None and found.values.ndim == 2)
