"""`save` and `load`: .npz archives that keep FP8 dtypes, results, states and recipes.

The archive is an ordinary .npz that `numpy.load` opens without pickle. Each array is one member; FP8, E8M0
and bfloat16 arrays are stored as unsigned integers of the same width, since NumPy's format does not keep
their dtype. The member `__cupy_fp8__` is a JSON string that describes the members::

    {"format": "cupy_fp8", "version": 1,
     "dtypes": {"<member>": "<dtype name>", …},             members stored as integers
     "values": {"<name>": <value>, …}}

    <value>:  null, true, 3, 0.5, "text"                     itself
              {"array": "<member>"}                          an array; values that name one member share it,
              as when saved {"tuple": […]}, {"list": […]}, {"dict": {…}}   containers of values
              {"dtype": "<dtype name>"}                      a dtype
              {"result": "<class>", "fields": {…}}           a result, recipe or state; absent fields take
              their default
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO, NoReturn

import numpy as np

from .. import backend
from ..advice import type_name, without_rest
from ..arrays import Array, asarray, asnumpy, bits, contiguous, is_array, is_contiguous
from ..formats import FORMATS, FP8_DTYPES
from ..gate import Gate
from ..grouped import Grouped
from ..options import check_path
from ..recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ..results import Quantized, Scaled
from ..routing import Routing
from ..scaled_parts import check_offsets_of_sizes
from ..state import DelayedScalingState
from .replace import PathLike, replacing

__all__ = ["MANIFEST", "VERSION", "EXTENSION_DTYPES", "load", "open_members", "save"]

VERSION = 1
MANIFEST = "__cupy_fp8__"
#: dtypes that NumPy's file format does not have
EXTENSION_DTYPES = {dtype.name: dtype for dtype in FORMATS if dtype.type.__module__ != "numpy"}

_FIELDS: dict[type, tuple[str, ...]] = {
    **{kind: tuple(f.name for f in dataclasses.fields(kind)) for kind in (
        Scaled, Quantized, Grouped, Routing, Gate, BlockScaling, CurrentScaling, DelayedScaling,
        MXScaling)},
    DelayedScalingState: ("recipe", "scale", "amax_history")}
_KINDS = {kind.__name__: kind for kind in _FIELDS}
_LONGEST_NAME = 65_535 - len(".npy")            # longest member name in bytes that a .zip can hold
_MOST_DEFLATED = 1032                           # most bytes that one deflated byte expands to
#: errors that NumPy, zipfile and json raise for damaged bytes
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, EOFError,
           RecursionError, OSError, RuntimeError, NotImplementedError, SyntaxError, tokenize.TokenError,
           struct.error, zlib.error,
           zipfile.BadZipFile)


@without_rest
def save(path: PathLike, *unnamed: NoReturn, **values: Any) -> None:
    """Write arrays, quantised results and training state to one .npz file, keeping dtypes, scales and
    metadata.

    path : where to write (exactly this name; an existing file is replaced only once the new one is complete
        and on disk).
    values : by name: NumPy or CuPy arrays of any dtype without Python objects; `Scaled`, `Quantized`,
        `Grouped`, `Routing`, `Gate`; `DelayedScalingState` and recipes; numbers, strings, None; lists, tuples
        and dicts (with strings as keys) of these. CuPy arrays are copied to the host one at a time. An array
        that occurs twice is stored once.
    Raises TypeError for anything else, ValueError for names that a file cannot hold or that collide, and both
    for results that `load` would refuse, such as those whose arrays were replaced; nothing is written then.
    OSError where the disk is full or the folder does not exist. Format: see `cupy_fp8.io.archive`.

    >>> import os, tempfile, numpy as np, cupy_fp8 as fp8
    >>> q = fp8.quantize_tensor(np.float32([[1.0, 2.5]]), 64.0)
    >>> path = os.path.join(tempfile.mkdtemp(), "weights.npz")
    >>> fp8.save(path, w=q, codes=q.data, step=7)
    >>> loaded = fp8.load(path)
    >>> loaded["w"].dequantize().tolist(), loaded["codes"].dtype.name, loaded["step"]
    ([[1.0, 2.5]], 'float8_e4m3fn', 7)
    """
    check_path(path, '; write save("w.npz", weights=q)')
    if unnamed:
        raise TypeError(f"save: expected arrays or results by name, as in save(path, weights=q); got "
                        f"{type_name(unnamed[0])} without a name")
    if not values:
        raise ValueError("save: expected arrays or results by name, as in save(path, weights=q); got none")
    writer = _Writer()
    try:
        described = {name: writer.encode(value, name) for name, value in values.items()}
    except RecursionError:
        raise ValueError("save: lists, tuples and dicts are nested too deeply, or hold themselves") from None
    dtypes = {member: a.dtype.name for member, a in writer.arrays.items() if a.dtype.name in EXTENSION_DTYPES}
    manifest = json.dumps({"format": "cupy_fp8", "version": VERSION, "dtypes": dtypes, "values": described})
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        _write_member(archive, MANIFEST, np.array(manifest))
        for member, a in writer.arrays.items():
            _write_member(archive, member, asnumpy(bits(a) if member in dtypes else a))


def load(path: PathLike, *, like: Any = None) -> dict[str, Any]:
    """Read a file that `save` wrote: a dict of the same names, arrays with their dtypes, results with their
    metadata.

    like : the kind of array wanted: an array, 'numpy' / 'cupy' or the module. Default NumPy, whatever kind
        was saved.
    Raises FileNotFoundError, ValueError for a file that is damaged, that `save` did not write, or that a
    later version wrote (results are checked like handmade ones); DeviceError for ``like='cupy'`` without a
    GPU. Nothing is unpickled.

    >>> import os, tempfile, numpy as np, cupy_fp8 as fp8
    >>> path = os.path.join(tempfile.mkdtemp(), "scales.npz")
    >>> fp8.save(path, s=np.array([127, 130], np.uint8).view(fp8.float8_e8m0fnu))
    >>> fp8.load(path)["s"].astype(np.float32).tolist()
    [1.0, 8.0]
    """
    check_path(path)
    like = np if like is None else like
    backend.like_module(like)
    with open(path, "rb") as file:
        try:
            members = open_members(file)
            if MANIFEST not in members:
                raise ValueError(f"not written by cupy_fp8.save (no {MANIFEST!r} entry); use numpy.load")
            return _read(members, like)
        except backend.DeviceError:
            raise
        except _DAMAGE as error:
            raise ValueError(f"{os.fspath(path)}: {_problem(error, file)}") from None


def _read(members: Members, like: Any) -> dict[str, Any]:
    manifest = json.loads(str(members.read(MANIFEST)))
    version = manifest["version"] if manifest["format"] == "cupy_fp8" else None
    if version != VERSION:
        raise ValueError(f"format version {version!r}; this version of cupy_fp8 reads version {VERSION}")
    reader = _Reader(members, manifest.get("dtypes", {}), like)
    return {name: reader.decode(value, name) for name, value in manifest["values"].items()}


def _problem(error: Exception, file: BinaryIO) -> str:
    """Return the message for a file that could not be read."""
    file.seek(0)
    if isinstance(error, zipfile.BadZipFile) and (hint := _other_kind(file.read(9))):
        return hint
    if isinstance(error, ValueError) and not isinstance(error, (UnicodeError, json.JSONDecodeError)):
        return str(error)
    return f"damaged file ({type(error).__name__}: {error})"


def _other_kind(start: bytes) -> str:
    """Return a hint, from a file's first bytes, to the function that reads it; '' for an archive."""
    if start[:4] == b"PK\3\4":
        return ""
    if start[8:9] == b"{":
        return "a .safetensors file; use cupy_fp8.io.load_safetensors"
    if start[:6] == b"\x93NUMPY":
        return "expected an .npz archive, got a single .npy array; use numpy.load"
    return "not an .npz file; cupy_fp8.load reads what cupy_fp8.save wrote"


class _Writer:
    """Turns values into nodes of the manifest and collects the arrays that they need, each once."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self._member_of: dict[int, str] = {}
        self._held: list[Any] = []              # keeps objects alive, so that no identity is reused

    def encode(self, value: Any, name: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return {type(value).__name__: [self.encode(item, f"{name}.{i}") for i, item in enumerate(value)]}
        if type(value) is dict:
            if wrong := [key for key in value if not isinstance(key, str)]:
                raise TypeError(f"{name}: expected strings as keys, got {wrong[0]!r}")
            return {"dict": {key: self.encode(item, f"{name}.{key}") for key, item in value.items()}}
        if isinstance(value, np.dtype):
            if _dtype_of(value.name) != value:
                raise TypeError(f"{name}: cannot store dtype {value}")
            return {"dtype": value.name}
        if type(value) in _FIELDS:
            return self._result(type(value), value, name)
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            value = np.asarray(value)
        return {"array": self._member(value, name)}

    def _result(self, kind: type, value: Any, name: str) -> Any:
        fields = {field: vars(value)[field] for field in _FIELDS[kind]}
        fields |= {field: contiguous(a) for field, a in fields.items() if _is_strided(kind, field, a)}
        try:
            fields = {field: vars(_build(kind, dict(fields)))[field] for field in fields}
        except (TypeError, ValueError) as error:
            raise type(error)(_in_result(name, kind, error)) from None
        # every version of the reader takes absent fields as None, also one that does not know the field
        absent = {field for field, a in fields.items() if a is None and getattr(kind, field, 0) is None}
        return {"result": kind.__name__, "fields": {
            field: self.encode(a, f"{name}.{field}") for field, a in fields.items() if field not in absent}}

    def _member(self, a: Array, name: str) -> str:
        backend.module_of(a, name)
        numpys = a.dtype.kind in "biufcSUmM" and a.dtype.type.__module__ == "numpy"
        if a.dtype.name not in EXTENSION_DTYPES and not numpys:
            raise TypeError(f"{name}: cannot store dtype {a.dtype}")
        member = self._member_of.setdefault(id(a), name)
        _check_name(member)
        if self.arrays.setdefault(member, a) is not a or member == MANIFEST:
            raise ValueError(f"{name}: this name is taken by another entry of the file; rename the array")
        self._held.append(a)
        return member


def _dtype_of(name: Any) -> np.dtype[Any] | None:
    """Return the dtype of this name, or None."""
    try:
        return EXTENSION_DTYPES.get(name) or np.dtype(name)
    except TypeError:
        return None


def _check_name(name: str) -> None:
    """Raise ValueError unless a .zip keeps this member name unchanged."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name!r}: a name that cannot be written as UTF-8") from None
    if "\0" in name or length > _LONGEST_NAME or zipfile.ZipInfo(f"{name}.npy").filename != f"{name}.npy":
        raise ValueError(f"{name[:80]!r}: a name that an .npz file cannot hold; rename the array")


def _write_member(archive: zipfile.ZipFile, member: str, a: np.ndarray) -> None:
    with archive.open(f"{member}.npy", "w", force_zip64=True) as file:
        write: Any = np.lib.format.write_array                      # typed in NumPy from 2.3 on
        write(file, a, allow_pickle=False)


class Members:
    """The arrays of an .npz by their exact names. (NumPy's own reader confuses names that end in '.npy' with
    others.)"""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive, names = archive, archive.namelist()
        if len(set(names)) != len(names):
            raise ValueError("damaged file (a name occurs twice)")
        self.names = [name.removesuffix(".npy") for name in names if name.endswith(".npy")]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def read(self, name: str) -> np.ndarray:
        """Read an array, after checking that its header describes exactly the bytes present."""
        info = self._archive.getinfo(f"{name}.npy")
        with self._archive.open(info) as file:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError(f"entry {name!r}: damaged file (a header that save does not write)")
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
            if dtype.hasobject:
                raise ValueError(f"entry {name!r}: holds Python objects, which are never unpickled")
            size = math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or size != info.file_size - file.tell():
                raise ValueError(
                    f"damaged file (entry {name!r}: shape {shape} of {dtype} does not fit its bytes)")
            a = np.empty(size, np.uint8)
            data: Any = file
            if data.readinto(a.data) != size or file.read(1):
                raise EOFError(f"entry {name!r} ends early")
        a = a.view(dtype) if size else np.empty(0, dtype)
        return a.reshape(shape[::-1]).transpose() if fortran_order else a.reshape(shape)


def open_members(file: BinaryIO) -> Members:
    """Return the arrays of an open .npz. Raises ValueError and zipfile.BadZipFile."""
    archive = zipfile.ZipFile(file)
    end = os.fstat(file.fileno()).st_size
    for info in archive.infolist():
        most = 1 if info.compress_type == zipfile.ZIP_STORED else _MOST_DEFLATED
        if info.file_size > most * end:
            raise ValueError(f"damaged file (entry {info.filename!r} claims {info.file_size} bytes)")
    return Members(archive)


class _Reader:
    """Turns nodes of the manifest into values."""

    def __init__(self, members: Members, dtypes: Mapping[str, str], like: Any) -> None:
        self._members, self._dtypes, self._like = members, dtypes, like
        self._arrays: dict[str, Array] = {}

    def decode(self, node: Any, name: str) -> Any:
        if not isinstance(node, dict):
            if isinstance(node, list):
                raise ValueError(f"{name}: damaged manifest")
            return node
        (kind, inner), *_ = node.items()
        if kind == "array":
            return self._array(inner, name)
        if kind in ("tuple", "list"):
            items = [self.decode(item, f"{name}.{i}") for i, item in enumerate(inner)]
            return tuple(items) if kind == "tuple" else items
        if kind == "dict":
            return {key: self.decode(item, f"{name}.{key}") for key, item in inner.items()}
        if kind == "dtype":
            if (dtype := _dtype_of(inner)) is None:
                raise ValueError(f"{name}: this version knows no dtype {inner!r}")
            return dtype
        if kind != "result" or inner not in _KINDS:
            raise ValueError(f"{name}: this version knows no value of kind {inner!r}")
        fields = {key: self.decode(value, f"{name}.{key}") for key, value in node["fields"].items()}
        try:
            return _build(_KINDS[inner], fields)
        except (TypeError, ValueError) as error:
            raise ValueError(_in_result(name, _KINDS[inner], error)) from None

    def _array(self, member: str, name: str) -> Array:
        if member not in self._arrays:
            if member not in self._members:
                raise ValueError(f"{name}: damaged file (no entry {member!r})")
            a = self._members.read(member)
            if member in self._dtypes:
                dtype = EXTENSION_DTYPES.get(self._dtypes[member])
                if dtype is None or a.dtype != np.dtype(f"u{dtype.itemsize}"):
                    raise ValueError(f"entry {member!r}: damaged file (expected the storage of "
                                     f"{self._dtypes[member]}, got {a.dtype})")
                a = a.view(dtype)
            self._arrays[member] = asarray(a, like=self._like)
        return self._arrays[member]


def _build(kind: type, fields: dict[str, Any]) -> Any:
    """Make a result, recipe or state from its fields, checked like a handmade one, since kernels trust
    results."""
    if unknown := fields.keys() - set(_FIELDS[kind]):
        raise ValueError(f"{kind.__name__} has no fields {sorted(unknown)}")
    for field, value in fields.items():
        if _is_strided(kind, field, value):
            raise ValueError(f"{field}: expected a C-contiguous array, got strides {value.strides}")
    if kind is DelayedScalingState:
        return _state(**fields)
    if kind is Grouped and fields.get("scale_inv") is None and fields.get("columnwise_scale_inv") is None:
        codes = fields.get("rowwise")
        if getattr(codes, "dtype", None) in FP8_DTYPES:     # codes of `Grouped.wrap`
            checked = Grouped(**{**fields, "rowwise": bits(codes)})
            _check_sizes(checked)
            return Grouped._plain_values(checked.splits, checked.offsets, checked.shape, codes)
    made = kind(**fields)
    _check_sizes(made)
    return made


def _check_sizes(made: Any) -> None:
    """Raise ValueError unless sizes are consistent, which results on a GPU do not check. (`save` waits for
    the GPU anyway.)"""
    if isinstance(made, Grouped):
        check_offsets_of_sizes(asnumpy(made.offsets), asnumpy(made.splits), made.shape[1])
    elif isinstance(made, Quantized):
        sizes = {id(part.splits): part.splits for part in made.parts.values() if part.splits is not None}
        if len({asnumpy(a).tobytes() for a in sizes.values()}) > 1:
            raise ValueError("columnwise.splits: expected the sizes of rowwise, got others")


def _is_strided(kind: type, field: str, value: Any) -> bool:
    """Whether a field holds an array that is not C-contiguous but must be. (Scales of .T are strided.)"""
    return is_array(value) and not (kind is Scaled and field == "scale_inv") and not is_contiguous(value)


def _in_result(name: str, kind: type, error: Exception) -> str:
    """Return the message of an error in a result of this name."""
    said = str(error)
    return f"{name}{': ' if said.startswith(kind.__name__) else '.'}{said}"


def _state(recipe: Any, scale: Any, amax_history: Any) -> DelayedScalingState:
    if not isinstance(recipe, DelayedScaling) or getattr(scale, "ndim", 0) != 1:
        raise ValueError("expected a DelayedScaling and scales [n]")
    state = DelayedScalingState(len(scale), recipe, like=scale)
    for name, mine, theirs in (("scale", state.scale, scale),
                               ("amax_history", state.amax_history, amax_history)):
        if (theirs.shape, theirs.dtype) != (mine.shape, mine.dtype):
            raise ValueError(f"{name}: expected {mine.dtype} {mine.shape}, got {theirs.dtype} {theirs.shape}")
    state.scale, state.amax_history = scale, amax_history
    return state
