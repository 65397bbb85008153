"""What type checkers know of the arrays that functions return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

__all__ = ["TypedArray"]

if TYPE_CHECKING:
    class TypedArray(np.ndarray[Any, np.dtype[Any]]):
        """A NumPy or CuPy array: what NumPy's arrays have, and what CuPy's have beside. Arithmetic and copies
        are such arrays too. (CuPy has no types, and arrays that are given may be of any class.)"""

        data: Any
        device: Any

        def get(self, stream: Any = None, order: str = "C", out: Any = None,
                blocking: bool = True) -> np.ndarray: ...
        def set(self, arr: Any, stream: Any = None) -> None: ...
        @property
        def T(self) -> TypedArray: ...
        def _again(self, *_: Any, **__: Any) -> TypedArray: ...

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _again  # type: ignore[assignment]
        __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _again  # type: ignore[assignment]
        __matmul__ = __rmatmul__ = __neg__ = __abs__ = _again
        astype = reshape = view = copy = transpose = ravel = swapaxes = _again  # type: ignore[assignment]
else:
    TypedArray = Any
