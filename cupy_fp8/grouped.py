"""Groups of rows that are tensors of their own, one after the other in memory."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import backend
from .arrays import Array, asnumpy, bits, is_contiguous, zeros
from .formats import INPUT_DTYPES, lookup
from .results import Quantized, Scaled


@dataclass(frozen=True, eq=False)
class Grouped:
    """N matrices of together M rows of K columns, one after the other; their sizes may be known to the device only.

    splits      rows of each, int32 or int64 [N]
    offsets     int64 [N + 1]: where each begins, and the last one ends, in elements of the flat arrays
    shape       (M, K) of the flat arrays. What follows the last group belongs to none
    rowwise     flat [M * K]: each group's [m, K]; or None
    columnwise  flat [M * K]: each group's [K, m] (stored transposed); or None
    scale_inv   f32 [N], one for each group of quantised data; None: plain values, which only `rowwise` holds

    ``grouped[i]`` is the i-th member: a Quantized, or of plain values an array [m, K]; views, nothing is copied. That, iteration and
    `dequantize` wait for the device where offsets live there (ValueError while a CUDA graph is captured).
    """

    splits: Array
    offsets: Array
    shape: tuple[int, int]
    rowwise: Array | None = None
    columnwise: Array | None = None
    scale_inv: Array | None = None

    def __post_init__(self) -> None:
        if self.rowwise is None and (self.columnwise is None or self.scale_inv is None):
            raise ValueError("Grouped: expected row-wise data, or quantised column-wise data, got neither")

    @classmethod
    def wrap(cls, data: Array, splits: Any, *, offsets: Array | None = None) -> Grouped:
        """Groups of the rows of an array [M, K] of any dtype, which is not copied.

        splits : rows of each group: an int32 or int64 array of data's kind, or a list. They may leave rows of data over
        offsets : int64 [N + 1] where they are known already; else one launch computes them. Not compared with splits
        Raises TypeError, ValueError before anything is launched; for NumPy arrays and lists also for sizes that data does not hold.

        >>> import numpy as np, cupy_fp8 as fp8
        >>> g = fp8.Grouped.wrap(np.arange(12).reshape(6, 2), [1, 0, 4])
        >>> g.offsets.tolist(), g[2].tolist()
        ([0, 2, 2, 10], [[2, 3], [4, 5], [6, 7], [8, 9]])
        """
        from .ops import splits as sizes
        from .ops.offsets import splits_to_offsets

        xp = backend.module_of(data, "data")
        if data.ndim != 2:
            raise ValueError(f"data: expected shape [M, K], got {data.shape}")
        if not is_contiguous(data):
            raise ValueError(f"data: expected a C-contiguous array, got strides {data.strides}; members are views of it")
        groups = sizes.read(splits, data, xp, False)
        rows, columns = data.shape
        if groups.host is not None:
            sizes.check_at_most(groups.host, rows)
        if offsets is None:
            offsets = splits_to_offsets(groups.array, strides=(columns,))[0]
        else:
            sizes.check_offsets(offsets, groups, data, xp)
        return cls(groups.array, offsets, (rows, columns), data.reshape(-1))

    @property
    def data(self) -> Array:
        """The row-wise data, flat."""
        if self.rowwise is None:
            raise AttributeError("this Grouped has no row-wise data: use .columnwise")
        return self.rowwise

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._any.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return sum(int(a.nbytes) for a in (self.rowwise, self.columnwise, self.scale_inv) if a is not None)

    def __len__(self) -> int:
        return len(self.splits)

    def __getitem__(self, index: int) -> Any:
        try:
            at = operator.index(index)
        except TypeError:
            raise TypeError(f"Grouped: expected an integer index, got {index!r}") from None
        if not -len(self) <= at < len(self):
            raise IndexError(f"Grouped: index {at} is out of range for {len(self)} groups")
        return self._member(at % len(self), *self._places())

    def __iter__(self) -> Iterator[Any]:
        places = self._places()
        return (self._member(i, *places) for i in range(len(self)))

    def dequantize(self, dtype: Any = np.float32, *, out: Array | None = None) -> Array:
        """The values [M, K]; rows that no group has are 0. Waits for the device where offsets live there, then one launch per group.
        out : array of this shape and dtype, written and returned."""
        if self.scale_inv is None:
            raise TypeError(f"dequantize: plain {self.dtype} values are not quantised; use astype on .data")
        from .ops import checks
        from .ops.dequantize import dequantize

        to, data = lookup(dtype, INPUT_DTYPES, "dtype").dtype, self._any
        sizes, offsets = self._places()
        if out is None:
            out = zeros(self.shape, to, like=data)
        else:
            checks.destination(out, self.shape, to, data, backend.module_of(data), checks.address(data))
            bits(out).fill(0)
        flat = out.reshape(-1)
        for i in range(len(self)):
            member = self._member(i, sizes, offsets)
            dequantize(member, dtype=dtype, out=flat[offsets[i] : offsets[i] + sizes[i] * self.shape[1]].reshape(member.shape))
        return out

    @property
    def _any(self) -> Array:
        return self.columnwise if self.rowwise is None else self.rowwise

    def _places(self) -> tuple[list[int], list[int]]:
        """(sizes, offsets) on the host."""
        if not isinstance(self.offsets, np.ndarray):
            from .runtime import capturing

            if capturing(self.offsets.data.device_id):
                raise ValueError("Grouped: members are found by their offsets on the device, which cannot be waited for while a CUDA graph "
                                 "is captured")
        sizes, offsets = asnumpy(self.splits).tolist(), asnumpy(self.offsets).tolist()
        rows, columns = self.shape
        for i, (size, offset) in enumerate(zip(sizes, offsets[:-1], strict=True)):
            if size < 0 or offset < 0 or offset + size * columns > rows * columns:
                raise ValueError(f"splits: group {i} of {size} rows at element {offset} is not within the {rows} x {columns} elements "
                                 "there are")
        return sizes, offsets

    def _member(self, i: int, sizes: list[int], offsets: list[int]) -> Any:
        shape = sizes[i], self.shape[1]
        here = slice(offsets[i], offsets[i] + shape[0] * shape[1])
        row = None if self.rowwise is None else self.rowwise[here].reshape(shape)
        if self.scale_inv is None:
            return row
        scale_inv = self.scale_inv[i : i + 1]
        column = None if self.columnwise is None else self.columnwise[here].reshape(shape[::-1])
        return Quantized(None if row is None else Scaled(row, scale_inv, shape),
                         None if column is None else Scaled(column, scale_inv, shape, True))

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: not what ops remember about this object's memory."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __repr__(self) -> str:
        parts = "plain values" if self.scale_inv is None else " + ".join(
            name for name, part in (("rowwise", self.rowwise), ("columnwise (stored transposed)", self.columnwise)) if part is not None)
        return (f"Grouped({self.dtype.name}[{self.shape[0]}, {self.shape[1]}] in {len(self)} groups, "
                f"{'' if self.scale_inv is None else 'a scale each, '}{parts}, {backend.kind_of(self._any)})")
