"""Typed arrays of both kinds: CuPy cannot allocate FP8 dtypes, but a byte buffer viewed as one is a full
ndarray.

This module launches no kernels of its own: `astype` and `transpose` are ops (cupy_fp8.ops.convert.astype).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, TypeVar, cast

import numpy as np

from . import backend
from .advice import array_instead, matrix_instead, shown
from .formats import FORMATS, as_dtype, integer, integers
from .methods import ops
from .typed_array import TypedArray

__all__ = ["Array", "Shape", "asarray", "asnumpy", "bytes_equal", "concatenate", "empty", "empty_like",
           "full", "zeros"]

Array = Any     # numpy.ndarray or cupy.ndarray
Shape = int | Sequence[int]
_Made = TypeVar("_Made", bound="Result")


def empty(shape: Shape, dtype: Any, *, like: Any = None) -> TypedArray:
    """Return a new C-contiguous array with arbitrary contents.

    like : an array (its kind and device), 'numpy' / 'cupy' or the module; default `cupy_fp8.xp`.
    """
    xp, dtype, shape = backend.like_module(like), as_dtype(dtype), _as_shape(shape)
    if prod(max(extent, 1) for extent in shape) * dtype.itemsize > _MOST:
        raise ValueError(f"shape: expected an array of at most 2**63 - 1 bytes, got {shape} of {dtype}")
    if isinstance(like, xp.ndarray):
        return empty_beside(like, shape, dtype)
    made: Array = np.empty(shape, dtype) if xp is np else _cupy_empty(xp, shape, dtype)
    return made


def empty_beside(a: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an `empty` array for results, of a's kind and on a's device. Validates nothing."""
    if isinstance(a, np.ndarray):
        return np.empty(shape, dtype)
    cp = backend.cupy()
    device = a.data.device_id
    if device != cp.cuda.runtime.getDevice():
        with cp.cuda.Device(device):
            return _cupy_empty(cp, shape, dtype)
    return _cupy_empty(cp, shape, dtype)


def _cupy_empty(cp: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array on the current device. CuPy cannot allocate FP8 dtypes, but can view memory as one."""
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    return array_at(cp)(shape, dtype, cp.cuda.alloc(count))


@functools.cache
def array_at(cp: Any) -> Callable[[tuple[int, ...], np.dtype[Any], Any], Array]:
    """Return a function that makes an array from its shape, its dtype and a pointer to its memory. CuPy's
    class passes these on to its private `_init`, which takes 60 % of the time if called directly."""
    ndarray: Any = cp.ndarray
    new: Any = ndarray.__base__.__new__
    if not hasattr(ndarray, "_init"):
        return ndarray

    def made(shape: tuple[int, ...], dtype: np.dtype[Any], memory: Any) -> Array:
        a = new(ndarray)
        a._init(shape, dtype, memory)
        return a

    return made


def zeros(shape: Shape, dtype: Any, *, like: Any = None) -> TypedArray:
    """Return a new array of zero bytes (for float8_e8m0fnu, which has no zero, the byte 0 means 2**-127)."""
    out = empty(shape, dtype, like=like)
    raw_bytes(out).fill(0)
    return out


def full(shape: Shape, fill_value: float, dtype: Any, *, like: Any = None) -> TypedArray:
    """Return a new array whose every element is `fill_value`, rounded like `astype` (saturating, NaN as
    0x7F)."""
    dtype, given = as_dtype(dtype), cast(Any, fill_value)
    if isinstance(given, np.ndarray) and not given.ndim:
        given = given[()]
    if (given is None or isinstance(given, (Result, str, bytes, list, tuple, dict, set))
            or np.ndim(given)):
        raise TypeError(f"fill_value: expected a number, got {shown(given)}")
    if np.iscomplexobj(given) and dtype.kind != "c":
        raise TypeError(f"fill_value: expected a real number, got {shown(given)}")
    try:
        with np.errstate(over="ignore"):
            value = np.asarray([given], np.float32 if dtype in FORMATS else dtype)
    except OverflowError:
        raise ValueError(f"fill_value: expected a number that {dtype} holds, got an integer of "
                         f"{int(given).bit_length()} bits") from None
    except (TypeError, ValueError):
        raise TypeError(f"fill_value: expected a number, got {shown(fill_value)}") from None
    out = empty(shape, dtype, like=like)
    if dtype in FORMATS:
        bits(out).fill(bits(ops.astype(value, dtype))[0])
    else:
        out.fill(fill_value)
    return out


def empty_like(a: Array, dtype: Any = None, *, shape: Shape | None = None) -> TypedArray:
    """Return a new C-contiguous array of the same kind and device. Shape and dtype are the same unless
    given."""
    backend.module_of(a, "a")
    return empty(a.shape if shape is None else shape, a.dtype if dtype is None else dtype, like=a)


def asarray(a: Any, dtype: Any = None, *, like: Any = None) -> TypedArray:
    """Return `a` as an array of the kind that `like` names, converted to `dtype`; `a` itself if nothing
    changes.

    Arrays keep their kind unless `like` says otherwise; lists and scalars become arrays of `like` (default
    `cupy_fp8.xp`). Conversions between the formats of this library follow `astype` (saturating).
    """
    dtype = None if dtype is None else as_dtype(dtype)
    if is_array(a):
        target = backend.module_of(a, "a") if like is None else backend.like_module(like)
    else:
        a, target = _from_values(a), backend.like_module(like)
    a = _move(a, target)
    # the conversion goes through f32, so that astype's rules hold
    if dtype in FORMATS and a.dtype not in FORMATS and a.dtype.kind in "fiub":
        with np.errstate(over="ignore"):
            a = a.astype(np.float32)
    if dtype is not None and dtype != a.dtype:
        if a.dtype in FORMATS and dtype in FORMATS:
            return ops.astype(a, dtype)
        return a.astype(dtype)
    return a


def _from_values(a: Any) -> np.ndarray:
    """Return numbers, lists of these, or another library's array in CPU memory as a NumPy array."""
    reason = ""
    if not isinstance(a, Result):
        try:
            made = np.asarray(a)
            if not made.dtype.hasobject:
                return made
        except (TypeError, ValueError, RuntimeError) as error:
            reason = f" ({error})"
    advice = "" if isinstance(a, (list, tuple)) else array_instead(a, "a")
    raise TypeError(f"a: expected an array, a number or a list of numbers, got {type(a).__name__}{reason}"
                    f"{advice}")


def asnumpy(a: Array) -> np.ndarray:
    """Return a NumPy array of the same bytes (the array itself if it is one)."""
    return cast(np.ndarray, _move(a, np))


def _move(a: Array, target: Any) -> Array:
    source = backend.module_of(a, "a")
    if source is target:
        return a
    if a.dtype not in FORMATS:
        return target.asarray(a) if source is np else a.get()
    raw = bits(contiguous(a))
    return (target.asarray(raw) if source is np else raw.get()).view(a.dtype)


def concatenate(arrays: Any, axis: int = 0) -> TypedArray:
    """Join arrays of one dtype and kind along `axis`."""
    if not is_sequence(arrays):
        raise TypeError(f"arrays: expected a list of arrays, got {type(arrays).__name__}")
    axis = integer(axis, "axis")
    if len(arrays) == 0:
        raise ValueError("arrays: expected at least one array, got none")
    xp, dtype, shape = backend.module_of(arrays[0], "arrays[0]"), arrays[0].dtype, arrays[0].shape
    if not -arrays[0].ndim <= axis < arrays[0].ndim:
        raise ValueError(f"axis: expected one of the {arrays[0].ndim} axes of arrays[0], got "
                         f"{axis if abs(axis) < 2**63 else 'a huge one'}")
    for i, a in enumerate(arrays):
        backend.require_module(a, xp, f"arrays[{i}]")
        if a.dtype != dtype:
            raise TypeError(f"arrays[{i}]: expected dtype {dtype}, as arrays[0] has, got {a.dtype}; convert "
                            f"with cupy_fp8.astype first")
        along = axis % len(shape)
        if a.ndim != len(shape) or any(a.shape[k] != shape[k] for k in range(len(shape)) if k != along):
            raise ValueError(f"arrays[{i}]: expected the shape of arrays[0], {shape}, but for axis {axis}, "
                             f"got {a.shape}")
    if dtype not in FORMATS:
        return xp.concatenate(list(arrays), axis=axis)
    return xp.concatenate([bits(a) for a in arrays], axis=axis).view(dtype)


def bytes_equal(a: Any, b: Any) -> bool:
    """Whether two arrays of one kind have the same dtype, shape and bytes (NaN equals NaN of the same bits,
    -0 is not 0).

    Results (`Scaled`, `Quantized`, `Grouped`, `Routing`, `Gate`) are equal if all their arrays and metadata
    are, lists and tuples of arrays and results if all members are. `testing.assert_bytes_equal` says what
    differs.
    Raises TypeError for anything else, and for NumPy arrays beside CuPy arrays.
    """
    check_comparable(a, "a")
    check_comparable(b, "b")
    for path, x, y in pairs(a, b):
        if is_array(x) and is_array(y):
            backend.require_module(y, backend.module_of(x), f"b{path}")
        if not _same(x, y):
            return False
    return True


class Result:
    """Base class of results: `==` compares bytes and metadata.

    They cannot be hashed, like arrays and lists: ops write to them, which changes what they equal. Use
    `id(q)`, or names, as keys of a dict of results.
    """

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(x, y) for _, x, y in pairs(self, other))

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def _of_fields(cls: type[_Made], **fields: Any) -> _Made:
        """Make a result from all its fields, which the library made or has checked. Constructors check them,
        which takes much of a whole call. (`Scaled._of` and `Quantized._of` do the same in less time.)"""
        made = object.__new__(cls)
        made.__dict__.update(fields)
        return made

    def __matmul__(self, other: object) -> Any:
        raise TypeError("@: results are multiplied by cupy_fp8.matmul_nt(a, b), of a [M, K] and b [N, K]")

    __rmatmul__ = __matmul__
    #: makes NumPy leave operators to this class, instead of making an array of it
    __array_ufunc__ = None

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"expected an array, got {type(self).__name__}{array_instead(self, 'q')}")

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, which copies and pickles contain, without what ops remember about this object's
        memory."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}


def check_comparable(a: Any, name: str) -> None:
    """Raise TypeError unless `a` is an array, a result, or a list or tuple of these (or None, as ops return
    it for an absent part)."""
    try:
        comparable = _is_comparable(a)
    except RecursionError:
        raise ValueError(f"{name}: lists are nested too deeply, or hold themselves") from None
    if not comparable:
        backend.module_of(a, name)


def _is_comparable(a: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return all(member is None or _is_comparable(member) for member in a)
    return isinstance(a, Result) or is_array(a)


def pairs(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, x, y) for everything that must be equal for a and b to be equal: arrays, metadata, or two
    objects of different types. Metadata come before arrays, since arrays differ whenever metadata do."""
    if isinstance(a, Result) and type(a) is type(b):
        fields, others = a.__getstate__(), b.__getstate__()
        for name in sorted(fields,
                           key=lambda name: isinstance(fields[name], Result) or is_array(fields[name])):
            x, y = fields[name], others[name]
            yield from pairs(x, y, f"{path}.{name}") if isinstance(x, Result) else [(f"{path}.{name}", x, y)]
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        yield f"{path}.length", len(a), len(b)
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from pairs(x, y, f"{path}[{i}]")
    else:
        yield path, a, b


def _same(x: Any, y: Any) -> bool:
    """Whether two arrays have the same kind, dtype, shape and bytes, or two pieces of metadata are equal."""
    if isinstance(x, Result) or isinstance(y, Result) or is_array(x) != is_array(y):
        return False
    if not is_array(x):
        return bool(x == y)
    alike = isinstance(y, backend.module_of(x).ndarray) and x.dtype == y.dtype and x.shape == y.shape
    return alike and bool((raw_bytes(x) == raw_bytes(y)).all())


def is_array(a: Any) -> bool:
    return isinstance(a, np.ndarray) or _is_cupy(a)


def bits(a: Array) -> Array:
    """Return a view of the elements as unsigned integers of the same width, for what CuPy cannot do with FP8
    dtypes."""
    return a.view(f"u{a.dtype.itemsize}")


def once(change: Callable[[Array], Array], done: dict[int, Any]) -> Callable[[Array], Array]:
    """Return `change`, applied to each array once. done: changed arrays, by the identity of the original."""
    def changed(a: Array) -> Array:
        if id(a) not in done:
            done[id(a)] = change(a)
        return done[id(a)]

    return changed


def raw_bytes(a: Array) -> Array:
    """Return `bits`, or for elements of other sizes their bytes, along a further axis."""
    return bits(a) if a.dtype.itemsize in (1, 2, 4, 8) else a[..., None].view(np.uint8)


def address(a: Array) -> int:
    """Return the address of the first element."""
    return a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr


def aligned_address(a: Array, name: str) -> int:
    """Return the address of the first element. ValueError if it is not a multiple of the element size."""
    at = address(a)
    if at % a.dtype.itemsize:
        raise ValueError(f"{name}: address {at:#x} is not a multiple of the element size {a.dtype.itemsize}")
    return at


def check_dimensions(shape: tuple[int, ...], name: str, least: int, most: int | None = None,
                     array: str = "") -> None:
    """Raise ValueError unless the number of dimensions is in this range; most None: no upper bound. name: of
    the argument that needs them; array: of the array, if that is another one."""
    if least <= len(shape) <= (len(shape) if most is None else most):
        return
    words = _NUMBERS[least]
    if most != least:
        words += " or more" if most is None else f" or {_NUMBERS[most]}"
    noun = "dimension" if words == "one" else "dimensions"
    advice = matrix_instead(shape, array or name, most != 2) if least == 2 else ""
    raise ValueError(f"{name}: expected an array of {words} {noun}, got shape {shape}{advice}")


def is_contiguous(a: Array) -> bool:
    """Whether `a` is C-contiguous. CuPy's `flags` builds an object each time (0.2 µs); its private attribute
    does not."""
    return bool(a.flags.c_contiguous if isinstance(a, np.ndarray) else a._c_contiguous)


def contiguous(a: Array) -> Array:
    """Return `a` itself if C-contiguous, else a C-contiguous copy."""
    if is_contiguous(a):
        return a
    return backend.module_of(a).ascontiguousarray(bits(a)).view(a.dtype)


def _is_cupy(a: Any) -> bool:
    return type(a).__module__.startswith("cupy") and hasattr(a, "__cuda_array_interface__")


def is_sequence(values: Any) -> bool:
    """Whether values are a list, a tuple, an array with axes or another sequence, except text and bytes."""
    if is_array(values):
        return bool(values.ndim)
    return isinstance(values, Sequence) and not isinstance(values, (str, bytes, bytearray, memoryview))


def _as_shape(shape: Shape) -> tuple[int, ...]:
    extents: Any = shape if is_sequence(shape) else (shape,)
    try:
        result = integers(extents)
    except TypeError:
        raise TypeError(f"shape: expected an integer or a sequence of integers, got {shown(shape)}") from None
    if any(extent < 0 for extent in result):
        raise ValueError(f"shape: expected extents of zero or more, got {shown(result)}")
    if any(extent > _MOST for extent in result):
        raise ValueError(f"shape: expected extents of at most 2**63 - 1, got one of "
                         f"{max(result).bit_length()} bits")
    return result


_MOST = 2**63 - 1
_NUMBERS = "no", "one", "two", "three"
