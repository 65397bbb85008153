"""Zero-copy exchange of FP8, E8M0 and bfloat16 arrays with other libraries through DLPack.

NumPy and CuPy cannot exchange these types themselves (CuPy labels float8_e5m2 a standard 'float' of 8 bits
and refuses the others), but they exchange unsigned integers. So arrays travel as integers of the same width,
and the type code inside the capsule is rewritten on the way: to the true type on export, to an unsigned
integer on import.

Type codes: DLPack 1.1 (kDLFloat8_e4m3fn = 10, kDLFloat8_e5m2 = 12, kDLFloat8_e8m0fnu = 14), kDLBfloat = 4;
struct layouts: dlpack.h. A capsule is named 'dltensor' (DLManagedTensor) or 'dltensor_versioned'
(DLManagedTensorVersioned).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from . import backend
from .advice import array_instead, dtype_instead, type_name
from .arrays import Array, bits
from .formats import as_dtype, bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float32
from .typed_array import TypedArray

__all__ = ["from_dlpack", "to_dlpack"]

_UINT, _FLOAT = 1, 2
_CUDA, _CUDA_MANAGED = 2, 13
_CODES = {float8_e4m3fn: 10, float8_e5m2: 12, float8_e8m0fnu: 14, bfloat16: 4}
_DTYPES = {(code, dtype.itemsize * 8): dtype for dtype, code in _CODES.items()}
_NATIVE_KINDS = {0: "i", _UINT: "u", _FLOAT: "f", 5: "c", 6: "b"}


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("dtype", _DataType), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64))


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager_ctx", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor))


# our own prototypes: attributes set on ctypes.pythonapi's functions would be shared with every other library
_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))


def _managed(capsule: Any) -> _Managed | _ManagedVersioned:
    """Return the structure inside a capsule that has not been consumed; valid as long as the capsule."""
    for name, struct in ((b"dltensor", _Managed), (b"dltensor_versioned", _ManagedVersioned)):
        if _capsule_is_valid(capsule, name):
            address = _capsule_pointer(capsule, name)
            assert address is not None      # guaranteed by IsValid
            return struct.from_address(address)
    raise TypeError(f"__dlpack__: expected an unused capsule 'dltensor' or 'dltensor_versioned', got "
                    f"{capsule!r}")


class Exporter:
    """An array as a DLPack producer: what `to_dlpack` returns. Holds the array; its capsules hold it too."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self._carrier = bits(array) if array.dtype in _CODES else array

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._carrier.__dlpack_device__()
        return device

    def __dlpack__(self, **options: Any) -> Any:
        """Return a capsule of the array. options (stream, max_version, dl_device, copy) go to NumPy's or
        CuPy's `__dlpack__`."""
        capsule = self._carrier.__dlpack__(**options)
        if self._array.dtype in _CODES:
            managed = _managed(capsule)
            managed.tensor.dtype.code = _CODES[self._array.dtype]
            if isinstance(managed,
                          _ManagedVersioned) and self._array.dtype.itemsize == 1 and managed.major == 1:
                managed.minor = max(managed.minor, 1)       # the FP8 codes came with 1.1
        return capsule

    def __repr__(self) -> str:
        return f"Exporter({self._array.dtype.name}{list(self._array.shape)}, {backend.kind_of(self._array)})"


def to_dlpack(a: Array) -> Exporter:
    """Return an object that other libraries import with their `from_dlpack`: the same memory, the true type.

    a : NumPy or CuPy array of any shape and strides; FP8, E8M0 and bfloat16 carry their DLPack codes, other
        numbers pass through.
    Returns an object with `__dlpack__` and `__dlpack_device__`; the memory lives as long as any importer
    needs it. Raises TypeError for anything but an array of numbers; when the capsule is made,
    BufferError for what NumPy or CuPy cannot export (a read-only array to a consumer of unversioned
    capsules). A library that knows no FP8 types says so in its own words: give it ``a.view(np.uint8)``.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> a = np.array([1, 2], fp8.float8_e5m2)
    >>> b = fp8.from_dlpack(fp8.to_dlpack(a))            # or jax.dlpack.from_dlpack(fp8.to_dlpack(a))
    >>> b.dtype.name, np.shares_memory(a.view(np.uint8), b.view(np.uint8))
    ('float8_e5m2', True)
    """
    _check_exchanged(a, "a")
    return Exporter(a)


def from_dlpack(x: Any, *, dtype: Any = None) -> TypedArray:
    """Return the array behind any DLPack producer, without a copy: a CuPy array if the memory is on a GPU,
    else a NumPy array.

    x : an object with `__dlpack__` and `__dlpack_device__` (a torch or JAX array, an `Exporter`), or a
        NumPy or CuPy array.
    dtype : the type of a producer that says only uint8 or uint16 (or opaque bits of that width); must agree
        with one that says more.
    Returns an array of the same shape and strides that keeps the producer's memory alive.
    Raises TypeError (no `__dlpack__`, a type this library does not know, a dtype that disagrees) or what
    NumPy or CuPy raise.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.from_dlpack(np.array([0x38, 0x7E], np.uint8), dtype=fp8.float8_e4m3fn).astype(np.float32).tolist()
    [1.0, 448.0]
    """
    wanted = None if dtype is None else as_dtype(dtype)
    if isinstance(x, np.ndarray) or type(x).__module__.partition(".")[0] == "cupy":
        _check_exchanged(x, "x")
        x = Exporter(x)
    if not (hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")):
        raise TypeError("x: expected an object with __dlpack__ and __dlpack_device__, "
                        f"got {type_name(x)}{array_instead(x, 'x')}")
    carrier = _Carrier(x, wanted)
    xp = backend.cupy() if carrier.__dlpack_device__()[0] in (_CUDA, _CUDA_MANAGED) else np
    a = xp.from_dlpack(carrier)
    return a if carrier.dtype is None else a.view(carrier.dtype)


def _check_exchanged(a: Any, name: str) -> None:
    """Raise TypeError for anything but an array of numbers that DLPack has: not for strings, objects, dates
    and records."""
    backend.module_of(a, name)
    if a.dtype in _CODES or (a.dtype.kind in "biufc" and a.dtype.isbuiltin == 1 and a.dtype.char not in "gG"):
        return
    raise TypeError(f"{name}: expected an array of numbers that DLPack has, got dtype {a.dtype}"
                    f"{dtype_instead(a.dtype, (float32,), name)}")


class _Carrier:
    """The producer x, presented as one of unsigned integers; `dtype` is then the type to view them as (None:
    unchanged)."""

    def __init__(self, x: Any, wanted: np.dtype[Any] | None) -> None:
        self._x, self._wanted = x, wanted
        self.dtype: np.dtype[Any] | None = None

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._x.__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._x.__dlpack__(**options)
        carried = _managed(capsule).tensor.dtype
        self.dtype = _view_dtype(carried, self._wanted)
        if self.dtype is not None:
            carried.code = _UINT
        return capsule


def _view_dtype(carried: _DataType, wanted: np.dtype[Any] | None) -> np.dtype[Any] | None:
    """Return the dtype to view the imported elements as; None if NumPy and CuPy import the wanted one
    themselves."""
    code, width = carried.code, carried.bits
    what = f"DLPack type (code {code}, {width} bits, {carried.lanes} lanes)"
    if carried.lanes != 1:
        raise TypeError(f"x: {what} is a vector type, which arrays do not have")
    said = _DTYPES.get((code, width)) or _native_dtype(code, width)
    if wanted is None or wanted == said:
        if said is None:
            raise TypeError(f"x: {what} is none that this library knows; pass dtype= if you know what the "
                            f"bytes are")
        return said if said in _CODES else None
    if wanted.itemsize * 8 != width:
        raise TypeError(f"dtype: {wanted} has {wanted.itemsize * 8} bits, the producer says {what}")
    if said is not None and said.kind != "u":
        raise TypeError(f"dtype: {wanted} was asked for, the producer says {said}")
    return wanted


def _native_dtype(code: int, width: int) -> np.dtype[Any] | None:
    # CuPy 14 mislabels float8_e5m2 as a 'float' of 8 bits, which is not a type
    if code not in _NATIVE_KINDS or width % 8 or (code, width) == (_FLOAT, 8):
        return None
    try:
        return np.dtype(f"{_NATIVE_KINDS[code]}{width // 8}")
    except TypeError:
        return None
