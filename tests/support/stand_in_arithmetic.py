"""Arithmetic for the stand-in of CuPy: what `diagnostics` computes with arrays of the device.

As with CuPy, a NumPy array among the operands is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import stand_in

_FUNCTIONS = ("abs", "isfinite", "isnan", "maximum", "log2", "square", "stack", "where")
_METHODS = ("astype", "max", "min", "sum", *(f"__{name}__" for name in (
    "add", "and", "eq", "ge", "gt", "invert", "le", "lt", "mul", "ne", "or", "rmul", "rsub", "sub",
    "truediv")))


def install(patch: pytest.MonkeyPatch, module: Any) -> None:
    """For the module that `stand_in.install` returned."""
    for name in _FUNCTIONS:
        patch.setattr(module, name, _on_device(getattr(np, name)), raising=False)
    for name in _METHODS:
        patch.setattr(stand_in.ndarray, name, _on_device(getattr(np.ndarray, name)), raising=False)


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    def computed(*args: Any, **options: Any) -> Any:
        return stand_in.asarray(function(*map(_on_host, args), **options))

    return computed


def _on_host(a: Any) -> Any:
    if isinstance(a, list):
        return [_on_host(item) for item in a]
    if isinstance(a, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return a.on_host if isinstance(a, stand_in.ndarray) else a
