"""The number formats, in one table that everything else reads.

Sources: OCP 8-bit Floating Point Specification (E4M3, E5M2), OCP Microscaling Formats v1.0 (E8M0), IEEE 754.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import ml_dtypes
import numpy as np

from .advice import SHORT_DTYPES, dtype_named, meant, shown

__all__ = ["BYTE_DTYPES", "FORMATS", "FP8_DTYPES", "INPUT_DTYPES", "Format", "as_dtype", "bfloat16",
           "finfo", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float16", "float32"]

_Name = TypeVar("_Name", bound=str)
#: what functions accept as a dtype, and as an FP8 dtype
DType: TypeAlias = (np.dtype[Any] | type[Any] | Literal[
    "float8_e4m3fn", "e4m3", "e4m3fn", "fp8_e4m3", "fp8_e4m3fn", "float8_e5m2", "e5m2", "fp8_e5m2",
    "float8_e8m0fnu", "e8m0", "e8m0fnu", "bfloat16", "bf16", "float16", "fp16", "float32", "fp32"])
FP8DType: TypeAlias = (np.dtype[Any] | type[Any] | Literal[
    "float8_e4m3fn", "e4m3", "e4m3fn", "fp8_e4m3", "fp8_e4m3fn", "float8_e5m2", "e5m2", "fp8_e5m2"])

float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
float8_e8m0fnu = np.dtype(ml_dtypes.float8_e8m0fnu)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float16 = np.dtype(np.float16)
float32 = np.dtype(np.float32)
#: dtype of packed scales (deepgemm_sm100); not a number format here
int32 = np.dtype(np.int32)


@dataclass(frozen=True)
class Format:
    """What a dtype can represent. `tag` is the type's name in the CUDA sources.

    `nan` and `inf` are the bit patterns that this library writes (None: the format has none); `max`,
    `smallest_normal` and `smallest_subnormal` are values (E8M0 has no subnormals and no sign).
    """

    dtype: np.dtype[Any]
    tag: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    nan: int
    inf: int | None
    signed: bool = True

    @property
    def storage(self) -> np.dtype[Any]:
        """The unsigned integer dtype of the same width."""
        return np.dtype(f"u{self.bits // 8}")


FORMATS: dict[np.dtype[Any], Format] = {
    f.dtype: f
    for f in (
        Format(float8_e4m3fn, "e4m3fn", 8, 4, 3, 7, 448.0, 2.0**-6, 2.0**-9, 0x7F, None),
        Format(float8_e5m2, "e5m2", 8, 5, 2, 15, 57344.0, 2.0**-14, 2.0**-16, 0x7F, 0x7C),
        Format(float8_e8m0fnu, "e8m0fnu", 8, 8, 0, 127, 2.0**127, 2.0**-127, 2.0**-127, 0xFF, None,
               signed=False),
        Format(bfloat16, "bf16", 16, 8, 7, 127, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133,
               0x7FC0, 0x7F80),
        Format(float16, "f16", 16, 5, 10, 15, 65504.0, 2.0**-14, 2.0**-24, 0x7E00, 0x7C00),
        Format(float32, "f32", 32, 8, 23, 127, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149,
               0x7FC00000, 0x7F800000),
    )
}

#: the formats that quantisers read, those that they write, and all one-byte formats
INPUT_DTYPES = (bfloat16, float16, float32)
FP8_DTYPES = (float8_e4m3fn, float8_e5m2)
BYTE_DTYPES = (*FP8_DTYPES, float8_e8m0fnu)
SIZE_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))



def finfo(dtype: DType) -> Format:
    """Return what `dtype` can represent: maximum, smallest normal and subnormal, bits, NaN and Inf bit
    patterns.

    Its fields are `dtype`, `bits`, `exponent_bits`, `mantissa_bits`, `bias`, `max`, `smallest_normal`,
    `smallest_subnormal`, `nan`, `inf` (None: the format has none), `signed` and `storage`, the unsigned
    integer dtype of the same width. Raises TypeError for a dtype outside {float8_e4m3fn, float8_e5m2,
    float8_e8m0fnu, bfloat16, float16, float32}.

    >>> import cupy_fp8 as fp8
    >>> fp8.finfo(fp8.float8_e4m3fn).max
    448.0
    """
    return lookup(dtype, tuple(FORMATS), "dtype")


def lookup(dtype: Any, allowed: tuple[np.dtype[Any], ...], what: str) -> Format:
    """Return the `Format` of `dtype` if it is one of `allowed`, else raise a TypeError that says what was
    expected."""
    if not isinstance(dtype, np.dtype):
        given, dtype = dtype, _dtype_of(dtype)
        if dtype is None:
            raise TypeError(f"{what}: expected one of {names(allowed)}, got {shown(given)}"
                            f"{dtype_named(given, [each.name for each in allowed])}")
    if dtype not in allowed:
        raise TypeError(f"{what}: expected one of {names(allowed)}, got {dtype}"
                        f"{dtype_named(dtype.name, [each.name for each in allowed])}")
    return FORMATS[dtype]


def as_dtype(dtype: Any, what: str = "dtype",
             expected: str = "a dtype, its type or its name") -> np.dtype[Any]:
    """Return a dtype given as NumPy takes it, or by a short name such as 'e4m3'. TypeError for anything
    else."""
    if (found := _dtype_of(dtype)) is not None:
        return found
    raise TypeError(f"{what}: expected {expected}, got {shown(dtype)}"
                    f"{dtype_named(dtype, [each.name for each in FORMATS])}")


def _dtype_of(dtype: Any) -> np.dtype[Any] | None:
    """Return NumPy's dtype, except for what NumPy also takes: None for float64, and objects with an attribute
    `dtype`, such as recipes."""
    if isinstance(dtype, str):
        dtype = SHORT_DTYPES.get(dtype.lower(), dtype)
    is_type = isinstance(dtype, type) and issubclass(dtype, (np.generic, bool, int, float, complex))
    if not is_type and not isinstance(dtype, (str, np.dtype)):
        return None
    try:
        return np.dtype(dtype)
    except (TypeError, ValueError):
        return None


def flag(value: Any, what: str) -> bool:
    """Return a bool, a NumPy bool, 0 or 1 as True or False. TypeError for anything else, whose truth would be
    a guess."""
    if value is True or value is False:
        return value
    is_number = isinstance(value, (int, np.bool_, np.integer)) and not isinstance(value, np.timedelta64)
    if not is_number or value not in (0, 1):
        raise TypeError(f"{what}: expected True or False, got {shown(value)}")
    return bool(value)


def flags(**given: Any) -> None:
    """Check each with `flag`, by its name."""
    for what, value in given.items():
        flag(value, what)


def integer(value: Any, what: str) -> int:
    """Return anything that Python takes as an index, except a truth value, as an int. TypeError for anything
    else."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{what}: expected an integer, got {shown(value)}")


def number(value: Any, what: str) -> float:
    """Return a number rounded to f32. TypeError or ValueError unless it is a number, and finite in f32."""
    if not isinstance(value, (int, float, np.floating, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{what}: expected a number, got {shown(value)}")
    try:
        with np.errstate(over="ignore", under="ignore"):
            rounded = float(np.float32(value))
    except OverflowError:
        raise ValueError(f"{what}: an integer of {int(value).bit_length()} bits, beyond every float"
                         ) from None
    if not math.isfinite(rounded):
        raise ValueError(f"{what}: expected a finite float32, got {shown(value)}")
    return rounded


def integers(values: Iterable[Any]) -> tuple[int, ...]:
    """Return values that Python takes as indices as ints. TypeError for anything else, and for truth
    values."""
    given = tuple(values)
    if bool in map(type, given):
        raise TypeError("a truth value is no integer")
    return tuple(map(operator.index, given))


def choice(value: Any, what: str, allowed: Iterable[_Name]) -> _Name:
    """Return a name that is one of those allowed. ValueError for anything else, with the name that may be
    meant."""
    known = tuple(allowed)
    if isinstance(value, str) and value in known:
        return known[known.index(value)]        # Python's own str in place of NumPy's
    advice = meant(value, known) if isinstance(value, str) else ""
    raise ValueError(f"{what}: expected one of {known}, got {shown(value)}{advice}")


def plain_name(name: Any) -> Any:
    """Return a NumPy str as Python's own, which JSON keeps. Anything else is returned unchanged, for checks
    to refuse."""
    return str(name) if isinstance(name, str) else name


def names(dtypes: tuple[np.dtype[Any], ...]) -> str:
    return ", ".join(d.name for d in dtypes)
