"""Ops that methods call. `Scaled.dequantize`, for example, is an op, and ops import Scaled; so the module
that defines the op registers its function here, and the method finds it here when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Ops:
    """The functions by name. `cupy_fp8` imports all ops, so that every name has its function."""

    astype: Callable[..., Any]
    convert_scales: Callable[..., Any]
    dequantize: Callable[..., Any]
    dequantize_groups: Callable[..., Any]
    quantize_block: Callable[..., Any]
    quantize_mx: Callable[..., Any]
    quantize_tensor: Callable[..., Any]
    rebase_scales: Callable[..., Any]
    wrap_groups: Callable[..., Any]


ops = _Ops()


def for_methods(function: _Function) -> _Function:
    """Register the function of an op for methods."""
    setattr(ops, function.__name__, function)
    return function
