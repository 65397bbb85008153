"""The tensors of a file of any kind, one at a time, as values that can be quantised, or with the reason why
they cannot."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..formats import FP8_DTYPES, bfloat16, float8_e8m0fnu, float16, float32
from ..grouped import Grouped
from ..layouts import block_text
from ..options import check_path
from ..results import Quantized, Scaled
from .archive import MANIFEST, load, open_members
from .checkpoint import Checkpoint
from .pairing import Pairing, scale_names
from .replace import PathLike
from .safetensors import DTYPES

__all__ = ["Found", "tensors"]

_FLOAT64 = np.dtype(np.float64)
_SCALES = ("_scale_inv", "_scale")
_MAGIC = b"\x93NUMPY"


class Found(NamedTuple):
    """A tensor of a file. values: bfloat16, float16 or float32 of two or three dimensions, or None. what: its
    dtype in the file, and what shares a scale; if values is None the reason."""

    name: str
    values: np.ndarray | None
    what: str


def tensors(path: PathLike) -> Iterator[Found]:
    """Yield everything in a .npy, .npz or .safetensors file or a folder of shards. FP8 data become the
    float32 values of data and scales. Raises, when called: OSError, ValueError (suffix, damaged file)."""
    check_path(path)
    path = Path(path)
    readers = {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors}
    if path.is_dir():
        return _safetensors(path)
    if path.suffix not in readers:
        raise ValueError(f"{path}: expected a file ending in {', '.join(readers)}, or a folder of "
                         ".safetensors files")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.stat().st_size:
        raise ValueError(f"{path}: not an {path.suffix} file (it is empty)")
    return readers[path.suffix](path)


def _npy(path: Path) -> Iterator[Found]:
    with path.open("rb") as file:
        start = file.read(len(_MAGIC))
    if start != _MAGIC:
        raise ValueError(f"{path}: not an .npy file (it begins with {start!r})")
    try:
        a = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: an .npy file that cannot be read ({error})") from None
    return _found(path.stem, np.asarray(a))


def _npz(path: Path) -> Iterator[Found]:
    with path.open("rb") as file:
        try:
            members = open_members(file)
        except (ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path}: not an .npz file ({error})") from None
        saved_here = MANIFEST in members
    values = iter(load(path).items()) if saved_here else _members(path)
    return (found for name, value in values for found in _found(name, value))


def _members(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    with np.load(path, allow_pickle=False) as archive:
        for name in archive.files:
            try:
                value = archive[name]
            except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                raise ValueError(f"{path}: entry {name!r} is damaged ({error})") from None
            yield name, value


def _safetensors(path: Path) -> Iterator[Found]:
    checkpoint = Checkpoint(path)
    pairing = checkpoint.pairing()
    scales = {*pairing.scales, *(scale for name in pairing.odd for scale in scale_names(name))}
    return (found for name in checkpoint.tensors if name not in scales
            for found in _of(checkpoint, pairing, name))


def _of(checkpoint: Checkpoint, pairing: Pairing, name: str) -> Iterator[Found]:
    """Yield a tensor with its scales; an unreadable one does not stop the others."""
    dtype = checkpoint.tensors[name].dtype
    if dtype not in DTYPES:
        yield Found(name, None, f"{dtype}, a type that NumPy does not have")
    elif name in pairing.packed:
        yield Found(name, None, f"{dtype}, packed data of a form that is not read")
    elif name in pairing.odd:
        yield Found(name, None, f"unreadable: {pairing.odd[name]}")
    else:
        pair = pairing.pairs.get(name)
        yield from _found(name, checkpoint.combined(pair) if pair else checkpoint.read(name))


def _found(name: str, value: Any) -> Iterator[Found]:
    """Yield a value of a file; containers are opened."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _found(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)) or (isinstance(value, Grouped) and len(value)):
        for i, inner in enumerate(value):
            yield from _found(f"{name}.{i}", inner)
    elif why := _why_not(name, value):
        yield Found(name, None, why)
    else:
        yield Found(name, *_values(value))


def _why_not(name: str, value: Any) -> str:
    """Return why a value is not quantised; '' if it can be."""
    if not isinstance(value, (np.ndarray, Scaled, Quantized)):
        return f"{type(value).__name__}, not an array"
    dtype, dimensions = value.dtype, len(value.shape)
    if dimensions < 2:
        return "vectors and numbers are not multiplied in FP8"
    if dtype == float8_e8m0fnu or name.endswith(_SCALES):
        return "scales without FP8 data in this file"
    if dtype.kind == "V" and dtype not in (*FP8_DTYPES, bfloat16):
        return ".npy and .npz forget the dtypes FP8 and bfloat16; cupy_fp8.save keeps them"
    if dtype not in (_FLOAT64, float32, float16, bfloat16, *FP8_DTYPES):
        return f"{dtype}, not a float type"
    if dimensions > 3:
        return f"{dimensions} dimensions; reshape it to the matrix that your product takes"
    return "" if 0 not in value.shape else "no elements"


def _values(value: Any) -> tuple[np.ndarray, str]:
    """Return (values, a text of what they were)."""
    if isinstance(value, Quantized):
        value = value._any
    if isinstance(value, Scaled):
        shared = "one scale" if value.block is None else block_text(value.block)
        return value.dequantize(), f"{value.dtype}, {shared}"
    if value.dtype in FP8_DTYPES:
        return value.astype(np.float32), f"{value.dtype} without scales"
    if value.dtype == _FLOAT64:
        with np.errstate(over="ignore"):
            return value.astype(np.float32), "float64, rounded to float32"
    return value, str(value.dtype)
