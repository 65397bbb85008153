"""Files: .npz archives that keep FP8 dtypes and whole results, and reading matrices out of .npy, .npz and
    .safetensors.

The archive written by `save` (version 1) is an ordinary .npz that `numpy.load` opens without pickle. Each
array is one entry; FP8, E8M0 and bfloat16 arrays are stored as unsigned integers of the same width
(NumPy's own format forgets their dtype). The entry `__cupy_fp8__` is a JSON string that says what the
entries are::

    {"format": "cupy_fp8", "version": 1,
     "dtypes": {"<entry>": "<dtype name>", …},              entries stored as integers
     "values": {"<name>": <value>, …}}

    <value>:  null, true, 3, 0.5, "text"       itself
              {"array": "<entry>"} an array; two values that name one entry share the array, as they did
              when saved {"tuple": [<value>, …]} {"result": "Scaled" | "Quantized" | …, "fields":
              {"<field>": <value>, …}} absent fields take their default
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import backend
from .arrays import Array, asarray, asnumpy, bits
from .formats import FORMATS, float32
from .grouped import Grouped, check_arrays
from .results import Quantized, Scaled, check_block_scales, swap_last
from .routing import Routing

__all__ = ["load", "read_matrices", "save"]

VERSION = 1
MANIFEST = "__cupy_fp8__"
SAFETENSORS_HINT = ("reading .safetensors needs the safetensors package: pip install 'cupy_fp8[io]' "
                    "(or: pip install safetensors)")

_RESULTS: dict[str, Any] = {cls.__name__: cls for cls in (Scaled, Quantized, Grouped, Routing)}
#: Dtypes that NumPy's file format does not know, by name.
_EXTENSION_DTYPES = {dtype.name: dtype for dtype in FORMATS if dtype.type.__module__ != "numpy"}
_MATRIX_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": _EXTENSION_DTYPES["bfloat16"]}
_PathLike = str | os.PathLike[str]


def save(path: _PathLike, **arrays: Any) -> None:
    """Write arrays and quantised results to one .npz file, keeping dtypes, scales and metadata.

    path : where to write (exactly this name; an existing file is replaced only once the new one is complete).
    arrays : by name: NumPy or CuPy arrays of any dtype without Python objects, `Scaled`, `Quantized`,
        `Grouped` and `Routing`. CuPy arrays are copied to the host one at a time. An array that occurs twice
        (a scale_inv that both directions share) is stored once.
    Raises TypeError for anything else, ValueError for names that collide; nothing is written then. Format:
    see `cupy_fp8.io`.

    >>> import os, tempfile, numpy as np, cupy_fp8 as fp8
    >>> q = fp8.quantize_tensor(np.float32([[1.0, 2.5]]), 64.0)
    >>> path = os.path.join(tempfile.mkdtemp(), "weights.npz")
    >>> fp8.save(path, w=q, codes=q.data)
    >>> loaded = fp8.load(path)
    >>> loaded["w"].dequantize().tolist(), loaded["codes"].dtype.name
    ([[1.0, 2.5]], 'float8_e4m3fn')
    """
    writer = _Entries()
    for name, value in arrays.items():
        if type(value) not in _RESULTS.values():
            backend.module_of(value, name)
    values = {name: writer.encode(value, name) for name, value in arrays.items()}
    dtypes = {entry: a.dtype.name for entry, a in writer.arrays.items() if a.dtype.name in _EXTENSION_DTYPES}
    manifest = json.dumps({"format": "cupy_fp8", "version": VERSION, "dtypes": dtypes, "values": values})
    partial = Path(f"{os.fspath(path)}.partial")
    try:
        with zipfile.ZipFile(partial, "w") as archive:
            _write_entry(archive, MANIFEST, np.array(manifest))
            for entry, a in writer.arrays.items():
                _write_entry(archive, entry, asnumpy(bits(a) if entry in dtypes else a))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: _PathLike, *, like: Any = None) -> dict[str, Any]:
    """Read a file that `save` wrote: a dict of the same names, arrays with their dtypes, results with their
    metadata.

    like : the kind of array wanted: an array, 'numpy' / 'cupy' or the module. Default NumPy, whatever kind
    was saved. Raises FileNotFoundError, ValueError for a file that `save` did not write, that is damaged,
    or that a later version wrote; DeviceError for ``like='cupy'`` without a GPU. Never unpickles.

    >>> import os, tempfile, numpy as np, cupy_fp8 as fp8
    >>> path = os.path.join(tempfile.mkdtemp(), "scales.npz")
    >>> fp8.save(path, s=np.array([127, 130], np.uint8).view(fp8.float8_e8m0fnu))
    >>> fp8.load(path)["s"].astype(np.float32).tolist()
    [1.0, 8.0]
    """
    like = np if like is None else like
    backend.like_module(like)
    with _open_npz(path) as archive:
        if MANIFEST not in archive.files:
            raise ValueError(f"{os.fspath(path)}: not written by cupy_fp8.save (no {MANIFEST!r} entry); use "
                             f"numpy.load")
        try:
            manifest = json.loads(str(archive[MANIFEST]))
            version = manifest["version"] if manifest["format"] == "cupy_fp8" else None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)}: damaged manifest ({error})") from None
        if version != VERSION:
            raise ValueError(f"{os.fspath(path)}: format version {version!r}; this version of cupy_fp8 reads "
                             f"version {VERSION}")
        reader = _Reader(archive, manifest.get("dtypes", {}), like)
        try:
            return {name: reader.decode(value, name) for name, value in manifest["values"].items()}
        except (KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            raise ValueError(f"{os.fspath(path)}: damaged file ({type(error).__name__}: {error})") from None


class _Entries:
    """Turns values into manifest nodes and collects the arrays that they need, each once."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self._entry_of: dict[int, str] = {}

    def encode(self, value: Any, name: str) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, tuple):
            return {"tuple": [self.encode(item, f"{name}.{i}") for i, item in enumerate(value)]}
        if type(value) in _RESULTS.values():
            fields = {f.name: self.encode(getattr(value, f.name), f"{name}.{f.name}")
                      for f in dataclasses.fields(value)}
            return {"result": type(value).__name__, "fields": fields}
        return {"array": self._entry(value, name)}

    def _entry(self, a: Array, name: str) -> str:
        backend.module_of(a, name)
        if a.dtype.name not in _EXTENSION_DTYPES and (a.dtype.kind not in "biufcSUmM"
                                                      or a.dtype.type.__module__ != "numpy"):
            raise TypeError(f"{name}: cannot store dtype {a.dtype}")
        entry = self._entry_of.setdefault(id(a), name)
        if self.arrays.setdefault(entry, a) is not a or entry == MANIFEST:
            raise ValueError(f"{name}: this name is taken by another entry of the file; rename the array")
        return entry


class _Reader:
    def __init__(self, archive: Any, dtypes: Mapping[str, str], like: Any) -> None:
        self._archive, self._dtypes, self._like = archive, dtypes, like
        self._arrays: dict[str, Array] = {}

    def decode(self, node: Any, name: str) -> Any:
        if not isinstance(node, dict):
            return node
        if "array" in node:
            return self._array(node["array"])
        if "tuple" in node:
            return tuple(self.decode(item, name) for item in node["tuple"])
        if node.get("result") not in _RESULTS:
            raise ValueError(f"{name}: this version knows no value of kind {node.get('result')!r}")
        fields = {key: self.decode(value, f"{name}.{key}") for key, value in node["fields"].items()}
        if node["result"] == "Scaled":
            scaled = Scaled._of(**fields)
            _check_scaled(scaled, name)
            return scaled
        result = _RESULTS[node["result"]](**fields)
        if isinstance(result, Grouped):
            check_arrays(result, name)
        return result

    def _array(self, entry: str) -> Array:
        if entry not in self._arrays:
            a = self._archive[entry]
            if entry in self._dtypes:
                dtype = _EXTENSION_DTYPES[self._dtypes[entry]]
                if a.dtype != np.dtype(f"u{dtype.itemsize}"):
                    raise ValueError(f"entry {entry!r}: expected u{dtype.itemsize} storage of {dtype}, got "
                                     f"{a.dtype}")
                a = a.view(dtype)
            self._arrays[entry] = asarray(a, like=self._like)
        return self._arrays[entry]


def _check_scaled(s: Scaled, name: str) -> None:
    """Kernels trust a Scaled's shape, so a damaged file must not make one that disagrees with its data."""
    stored = swap_last(s.shape) if s.transposed else s.shape
    if s.data.shape != stored:
        raise ValueError(f"{name}: shape {s.shape} does not fit stored data of shape {s.data.shape}")
    if s.block is not None:
        check_block_scales(s, name)
    elif s.scale_inv.size != 1 or s.scale_inv.dtype != float32:
        raise ValueError(f"{name}: expected one f32 scale_inv, got {s.scale_inv.dtype} {s.scale_inv.shape}")


def _write_entry(archive: zipfile.ZipFile, entry: str, a: np.ndarray) -> None:
    with archive.open(f"{entry}.npy", "w", force_zip64=True) as file:
        write: Any = np.lib.format.write_array                      # NumPy gives it types from 2.3 on
        write(file, a, allow_pickle=False)


def _open_npz(path: _PathLike) -> Any:
    try:
        archive = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{os.fspath(path)}: not an .npz file ({error})") from None
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError(f"{os.fspath(path)}: expected an .npz archive, got a single .npy array")
    return archive


def read_matrices(path: _PathLike) -> Iterator[tuple[str, np.ndarray]]:
    """Every 2-D float tensor of a file, one at a time, as (name, NumPy array).

    path : .npy (the name is the file's), .npz (also one written by `save`: its plain arrays) or .safetensors
        (needs the safetensors package). .npy and .safetensors are mapped, not read: no tensor is in memory
        before it is used.
    Yields bfloat16, float16 and float32 as they are and float64 rounded to float32; other dtypes and ranks
    are skipped. Mapped arrays are read-only. Raises, when called and not at the first item:
    FileNotFoundError, ValueError (suffix, damaged file), ImportError.

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
        if isinstance(a, np.ndarray) and a.ndim == 2 and a.dtype in _MATRIX_DTYPES.values():
            with np.errstate(over="ignore"):
                yield name, a.astype(np.float32) if a.dtype == np.float64 else a


def _npy_arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    try:
        a = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not an .npy file ({error})") from None
    return iter([(path.stem, np.asarray(a))])


def _npz_arrays(path: Path) -> Iterator[tuple[str, Any]]:
    with _open_npz(path) as archive:
        saved_here = MANIFEST in archive.files
    return iter(load(path).items()) if saved_here else _npz_members(path)


def _npz_members(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    with _open_npz(path) as archive:
        for name in archive.files:
            yield name, archive[name]


def _safetensors_arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(SAFETENSORS_HINT) from None
    try:
        with safe_open(path, framework="numpy"):     # opening checks the header and every offset in it
            pass
    except SafetensorError as error:
        raise ValueError(f"{path}: not a .safetensors file ({error})") from None
    return _mapped_tensors(path)


def _mapped_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors mapped at the offsets of a header already checked: an 8-byte length, JSON, then the data.

    The package's own NumPy loader copies, and in older versions knows no bfloat16.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, about in header.items():
        dtype = _MATRIX_DTYPES.get(about["dtype"])
        if dtype is None or len(about["shape"]) != 2:
            continue
        shape = tuple(about["shape"])
        if 0 in shape:
            yield name, np.empty(shape, dtype)
            continue
        raw = np.memmap(path, np.uint8, "r", 8 + length + about["data_offsets"][0],
                        (shape[0] * shape[1] * dtype.itemsize,))
        yield name, np.asarray(raw).view(dtype).reshape(shape)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
