"""Types of the arrays that functions return, for type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

__all__ = ["FP8DTypeField", "TypedArray"]

if TYPE_CHECKING:
    from .formats import FP8DType

    class TypedArray(np.ndarray[Any, np.dtype[Any]]):
        """A NumPy or CuPy array, with the attributes of NumPy's and those that CuPy's have in addition.
        Arithmetic and copies return such arrays too. (CuPy has no types, and arguments may be of any
        class.)"""

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

    # a field of a dataclass, whose constructor takes more than the attribute has
    class FP8DTypeField:
        def __get__(self, owner: object, kind: Any = None) -> np.dtype[Any]: ...
        def __set__(self, owner: object, value: FP8DType) -> None: ...
else:
    TypedArray = FP8DTypeField = Any
