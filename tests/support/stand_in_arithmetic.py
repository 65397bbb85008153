"""NumPy's arithmetic for arrays of the CuPy stand-in, for code that computes with CuPy's functions. FP8 and
E8M0 arrays have none, as in CuPy, and copies to the host are counted."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stand_in
from stand_in import ndarray

from cupy_fp8.formats import FP8_DTYPES, float8_e8m0fnu

_UNKNOWN = (*FP8_DTYPES, float8_e8m0fnu)
_OPERATORS = [f"__{prefix}{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "rshift",
                                                 "floordiv", "lshift") for prefix in ("", "r", "i")]
_OPERATORS += ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__invert__"]
_METHODS = ("sum", "min", "max", "any", "all", "astype", "argmax")
_FUNCTIONS = ("where", "isfinite", "isnan", "abs", "square", "log2", "frexp", "ldexp", "maximum", "stack",
              "bincount", "sqrt", "signbit", "minimum", "cumsum", "concatenate")


def _on_host(a: Any) -> Any:
    if isinstance(a, ndarray):
        if a.dtype in _UNKNOWN:
            raise TypeError(f"CuPy has no arithmetic of {a.dtype}")
        return a.on_host
    if isinstance(a, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return [_on_host(b) for b in a] if isinstance(a, list) else a


def _wrapped(compute: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        found = compute(*map(_on_host, arguments), **options)
        if isinstance(found, tuple):
            return tuple(stand_in._placed(np.asarray(a)) for a in found)
        return found if found is NotImplemented else stand_in._placed(np.asarray(found))
    return call


def _getitem(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Indices may be arrays, whose elements are copied."""
    def getitem(self: ndarray, key: Any) -> Any:
        if isinstance(key, tuple) and any(isinstance(i, ndarray) for i in key):
            return stand_in._placed(_on_host(self)[tuple(_on_host(i) for i in key)])
        return plain(self, key)
    return getitem


def install(patch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """Return (the module used as CuPy while `patch` lasts, the bytes of every copy to the host)."""
    module, copied = stand_in.install(patch), []
    get = ndarray.get

    def counted(self: ndarray) -> np.ndarray:
        copied.append(self.nbytes)
        return get(self)

    patch.setattr(ndarray, "get", counted)
    patch.setattr(ndarray, "__hash__", object.__hash__)
    patch.setattr(ndarray, "__getitem__", _getitem(ndarray.__getitem__))
    for name in (*_OPERATORS, *_METHODS):
        patch.setattr(ndarray, name, _wrapped(getattr(np.ndarray, name)), raising=False)
    for name in _FUNCTIONS:
        setattr(module, name, _wrapped(getattr(np, name)))
    rng: Any = np.random.default_rng(0)          # for mypy: one of these without a shape is a number
    module.random = SimpleNamespace(
        standard_normal=lambda shape, dtype: stand_in._placed(rng.standard_normal(shape, dtype)),
        uniform=lambda low, high, shape: stand_in._placed(rng.uniform(low, high, shape)),
        randint=lambda low, high, size, dtype: stand_in._placed(rng.integers(low, high, size, dtype)))
    vars(module).update({name: getattr(np, name) for name in ("uint8", "int64", "float32")})
    module.zeros = lambda shape, dtype=float: stand_in.zeros(shape, dtype)
    module.ones = lambda shape, dtype=float: stand_in._placed(np.ones(shape, dtype))
    return module, copied
