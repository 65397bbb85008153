"""Groups of rows that are separate tensors, one after the other in memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Generic, cast

import numpy as np

from . import backend
from .advice import shown
from .arrays import Array, Result, _as_shape, asnumpy
from .formats import FP8_DTYPES, flag, float32, names, plain_name
from .kernels import capturing
from .layouts import (
    SCALE_DTYPES,
    Block,
    ScaleLayout,
    as_block,
    block_text,
    cdiv,
    group_scales,
    group_unit,
    grouped_scale_shape,
    scale_shape,
)
from .methods import ops
from .results import Quantized, Scaled, facts_table
from .scaled_parts import check_offsets_of_sizes
from .typed_array import TypedArray

__all__ = ["Grouped"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Member = TypeVar("Member", default=Any)         # a Quantized, or an array of plain values
else:
    from typing import TypeVar

    Member = TypeVar("Member")

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


@dataclass(frozen=True, eq=False)
class Grouped(Result, Generic[Member]):
    """N consecutive matrices of K columns, with M rows together. Only the device may know their sizes.

    splits      int32 or int64 [N]: the rows of each group. `group_quantize` and `wrap` copy sizes and
                offsets, so that these keep matching the data
    offsets     int64 [N + 1]: where each group begins and the last one ends, in elements of the flat arrays:
                the sums of the sizes, times K. Others are refused, on the GPU by members and products
    shape       (M, K) of the flat arrays. Rows after the last group belong to none
    rowwise     flat [M * K] with each group's [m, K]; or None
    columnwise  flat [M * K] with each group's [K, m] if `transposed`, else [m, K]; or None
    scale_inv   per-tensor scaling: f32 [N], one scale for each group and both directions. Blocks: the scales
                that each group's own row-wise `Scaled` has, one group after the other, flat or [lines, scales
                of a line] if all lines are equally long. The array has room for groups of any sizes, and is 0
                after the last one. Whole columns: [N, K padded as the layout says], one line for each group;
                that of a group without rows is 0. None without row-wise data
    columnwise_scale_inv  the same for column-wise blocks, or None
    block       the row-wise block. The column-wise one is its transpose. None: one scale for each group
    scale_layout  how scales of blocks are stored (docs/layouts.md)
    transposed  whether column-wise data are stored transposed: all but MX are

    A Grouped without scales holds plain values, in `rowwise` alone: `wrap` makes one.

    ``grouped[i]`` is the i-th member, a Quantized, or an array [m, K] of plain values. Members are views.
    Indexing, iteration and `dequantize` wait for the device if offsets live there, and raise ValueError while
    a CUDA graph is captured.

    TypeError or ValueError says which fields do not fit together.
    """

    splits: TypedArray
    offsets: TypedArray
    shape: tuple[int, int]
    rowwise: TypedArray | None = None
    columnwise: TypedArray | None = None
    scale_inv: TypedArray | None = None
    columnwise_scale_inv: TypedArray | None = None
    block: tuple[int | None, int | None] | None = None
    scale_layout: ScaleLayout | None = None
    transposed: bool = True

    if TYPE_CHECKING:               # arrays of any class are accepted
        def __init__(self, splits: Array, offsets: Array, shape: tuple[int, int],
                     rowwise: Array | None = None, columnwise: Array | None = None,
                     scale_inv: Array | None = None, columnwise_scale_inv: Array | None = None,
                     block: tuple[int | None, int | None] | None = None,
                     scale_layout: ScaleLayout | None = None, transposed: bool = True) -> None: ...

    def __post_init__(self) -> None:
        if self.rowwise is None and (self.columnwise is None or self._plain):
            raise ValueError("Grouped: expected row-wise data, or quantised column-wise data, got neither")
        self.__dict__.update(shape=_as_shape(self.shape), block=as_block(self.block),
                             scale_layout=plain_name(self.scale_layout),
                             transposed=flag(self.transposed, "transposed"))
        check_fields(self)
        if self._plain and self.dtype in FP8_DTYPES:
            raise ValueError(f"scale_inv: expected one scale for each of {len(self)} groups, got None; "
                             "Grouped.wrap groups plain values")

    @classmethod
    def wrap(cls, data: Array, splits: Any, *, offsets: Array | None = None) -> Grouped[TypedArray]:
        """Group the rows of an array [M, K] of any dtype, without a copy of them.

        splits : rows of each group: an int32 or int64 array of data's kind, or a list. Rows after the last
            group belong to none
        offsets : int64 [N + 1], if known: the sums of the sizes, times K. None: one launch computes them
        The result has copies of given splits and offsets, which may change.
        Raises TypeError, ValueError before anything is launched. Sizes in NumPy arrays and lists are errors
        if data has fewer rows.

        >>> import numpy as np, cupy_fp8 as fp8
        >>> g = fp8.Grouped.wrap(np.arange(12).reshape(6, 2), [1, 0, 4])
        >>> g.offsets.tolist(), g[2].tolist()
        ([0, 2, 2, 10], [[2, 3], [4, 5], [6, 7], [8, 9]])
        """
        return cls._plain_values(*ops.wrap_groups(data, splits, offsets))

    @classmethod
    def _plain_values(cls, splits: Array, offsets: Array, shape: tuple[int, int], rowwise: Array
                      ) -> Grouped[TypedArray]:
        """Make a Grouped without scales from fields that the library made or has checked."""
        made: Any = cls._of_fields(
            splits=splits, offsets=offsets, shape=shape, rowwise=rowwise, columnwise=None, scale_inv=None,
            columnwise_scale_inv=None, block=None, scale_layout=None, transposed=True)
        return made

    @property
    def data(self) -> TypedArray:
        """The row-wise data, flat."""
        if self.rowwise is None:
            raise AttributeError("this Grouped has no row-wise data: use .columnwise")
        return self.rowwise

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the data, or of plain values."""
        return self._any.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales, counting an array that both directions share once."""
        arrays = {id(a): a
                  for a in (self.rowwise, self.columnwise, self.scale_inv, self.columnwise_scale_inv)
                  if a is not None}
        return sum(int(a.nbytes) for a in arrays.values())

    def __len__(self) -> int:
        return len(self.splits)

    def __getitem__(self, index: int) -> Member:
        try:
            at = operator.index(index)
        except TypeError:
            raise TypeError(f"Grouped: expected an integer index, got {shown(index)}") from None
        if not -len(self) <= at < len(self):
            raise IndexError(f"Grouped: index {shown(at)} is out of range for {len(self)} groups")
        return self._members(*self._sizes_and_offsets())(at % len(self))

    def __iter__(self) -> Iterator[Member]:
        return map(self._members(*self._sizes_and_offsets()), range(len(self)))

    def dequantize(self, dtype: Any = np.float32, *, out: Array | None = None) -> TypedArray:
        """Return the values [M, K], with 0 in rows of no group. Waits for offsets on the device, then takes
        one launch per group.

        out : array of this shape and dtype, written and returned.
        Raises TypeError, ValueError before anything is written to it."""
        return ops.dequantize_groups(self, dtype, out)

    @property
    def _plain(self) -> bool:
        return self.scale_inv is None and self.columnwise_scale_inv is None

    @property
    def _any(self) -> Array:
        return self.columnwise if self.rowwise is None else self.rowwise

    def _sizes_and_offsets(self) -> tuple[list[int], list[int]]:
        """Return (sizes, offsets) on the host."""
        given: Array = self.offsets
        if not isinstance(given, np.ndarray) and capturing(given.data.device_id):
            raise ValueError("Grouped: members are found by their offsets on the device, which cannot be "
                             "waited for while a CUDA graph is captured")
        rows, columns = self.shape
        for name, a, length in (("offsets", self.offsets, len(self.splits) + 1),
                                ("rowwise", self.rowwise, rows * columns),
                                ("columnwise", self.columnwise, rows * columns)):
            if a is not None and a.shape != (length,):
                raise ValueError(f"{name}: expected shape ({length},), got {a.shape}")
        sizes, offsets = asnumpy(self.splits).tolist(), asnumpy(self.offsets).tolist()
        for i, (size, offset) in enumerate(zip(sizes, offsets[:-1], strict=True)):
            if size < 0 or offset < 0 or offset + size * columns > rows * columns:
                raise ValueError(f"splits: group {i} of {size} rows at element {offset} is not within the "
                                 f"{rows} x {columns} elements there are")
        # these fields were exchanged or changed in place: data and scales would be those of other groups
        check_offsets_of_sizes(np.array(offsets), np.array(sizes, np.int64), columns)
        return sizes, offsets

    def _members(self, sizes: list[int], offsets: list[int]) -> Callable[[int], Any]:
        """Return a function that returns the i-th member."""
        columns = self.shape[1]

        def part(i: int, flat: Array | None, transposed: bool) -> Array | None:
            shape = (columns, sizes[i]) if transposed else (sizes[i], columns)
            return None if flat is None else flat[offsets[i] : offsets[i] + sizes[i] * columns].reshape(shape)

        if self._plain:
            return lambda i: part(i, self.rowwise, False)
        block, layout, transposed = self.block, self.scale_layout, self.transposed
        across, scales = block and (block[1], block[0]), self._scales(sizes)

        def member(i: int) -> Quantized:
            shape, row = (sizes[i], columns), part(i, self.rowwise, False)
            column = part(i, self.columnwise, transposed)
            return Quantized(
                None if row is None else Scaled._of(row, scales("rowwise", i), shape, False, block, layout),
                None if column is None
                else Scaled._of(column, scales("columnwise", i), shape, transposed, across, layout))

        return member

    def _scales(self, sizes: list[int]) -> Callable[[str, int], Array]:
        """Return a function that returns the scales of a direction of the i-th group."""
        if self.block is None:
            per_tensor = cast(Array, self.scale_inv)
            if per_tensor.shape != (len(sizes),):
                raise ValueError(f"scale_inv: expected shape ({len(sizes)},), one for each group, got "
                                 f"{per_tensor.shape}")
            return lambda name, i: per_tensor[i : i + 1]
        layout = cast(str, self.scale_layout)
        directions: dict[str, tuple[Array, Block, bool, list[int]]] = {}
        for name, scale_inv, block, transposed in (
                ("rowwise", self.scale_inv, self.block, False),
                ("columnwise", self.columnwise_scale_inv, (self.block[1], self.block[0]), self.transposed)):
            if scale_inv is not None:
                unit = group_unit(block, layout, transposed)
                each = group_scales(self.shape[1], block, layout, transposed)
                ends = list(accumulate((cdiv(size, unit) if unit else 1) * each for size in sizes))
                directions[name] = scale_inv.reshape(-1), block, transposed, [0, *ends]

        def scales(name: str, i: int) -> Array:
            flat, block, transposed, at = directions[name]
            shape = scale_shape((sizes[i], self.shape[1]), block, layout, transposed)
            end = at[i] + prod(shape)
            if flat.size < end:
                prefix = "columnwise_" if name == "columnwise" else ""
                raise ValueError(f"{prefix}scale_inv: group {i} has scales {at[i]} to {end}, got {flat.size}")
            return flat[at[i] : end].reshape(shape)     # empty for whole columns without rows

        return scales

    def _facts(self) -> dict[str, str]:
        """Return the facts that users see, as for a `Scaled`."""
        column = "columnwise (stored transposed)" if self.transposed else "columnwise"
        directions = [name for name, part in (("rowwise", self.rowwise), (column, self.columnwise))
                      if part is not None]
        blocks = self.block and f"{block_text(self.block)}, {self.scale_layout} scales"
        return {"dtype": self.dtype.name, "shape": f"{self.shape[0]}, {self.shape[1]}",
                "groups": str(len(self)),
                "scaling": "plain values" if self._plain else blocks or "a scale each",
                "directions": "" if self._plain else " + ".join(directions),
                "kind": backend.kind_of(self._any),
                "bytes": f"{self.nbytes:,}"}

    def __repr__(self) -> str:
        f = self._facts()
        parts = ", ".join(filter(None, (f["scaling"], f["directions"], f["kind"])))
        return f"Grouped({f['dtype']}[{f['shape']}] in {f['groups']} groups, {parts})"

    def _repr_html_(self) -> str:
        return facts_table(self._facts())


def check_fields(g: Grouped) -> None:
    """Raise TypeError or ValueError, which names the field, unless the fields of a Grouped are consistent."""
    if len(g.shape) != 2:
        raise ValueError(f"shape: expected (M, K), got {g.shape}")
    backend.module_of(g.splits, "splits")
    if g.splits.ndim != 1:
        raise ValueError(f"splits: expected one dimension, got shape {g.splits.shape}")
    number, size = len(g.splits), prod(g.shape)
    _check_field(g, "splits", (_INT32, _INT64), (number,))
    _check_field(g, "offsets", (_INT64,), (number + 1,))
    for name in ("rowwise", "columnwise"):
        if getattr(g, name) is not None:
            _check_field(g, name, () if g._plain and g.block is None else FP8_DTYPES, (size,))
    if g.block is None:
        _check_one_scale_each(g, number)
    else:
        _check_block_scales(g, g.block, number)
    if isinstance(g.splits, np.ndarray):
        check_offsets_of_sizes(g.offsets, g.splits, g.shape[1])


def _check_one_scale_each(g: Grouped, number: int) -> None:
    if g.scale_layout is not None:
        raise ValueError(f"scale_layout: expected None for one scale for each group, got {g.scale_layout!r}; "
                         "scales of blocks need block=")
    if g.columnwise_scale_inv is not None:
        raise ValueError("columnwise_scale_inv: expected None for one scale for each group, which both "
                         "directions share; scales of blocks need block=")
    if g.scale_inv is not None:
        _check_field(g, "scale_inv", (float32,), (number,))
    elif g.columnwise is not None:
        raise ValueError("columnwise: expected None for plain values, which have no scale_inv")


def _check_block_scales(g: Grouped, block: Block, number: int) -> None:
    layout = g.scale_layout
    if layout is None:
        raise ValueError(f"scale_layout: expected one of {tuple(SCALE_DTYPES)} for blocks {block}, got None")
    scale_shape(g.shape, block, layout)     # its error lists the blocks and layouts
    for data, scales, along, transposed in (
            ("rowwise", "scale_inv", block, False),
            ("columnwise", "columnwise_scale_inv", (block[1], block[0]), g.transposed)):
        has_data, has_scales = getattr(g, data) is not None, getattr(g, scales) is not None
        if has_data != has_scales:
            missing, given = (scales, data) if has_data else (data, scales)
            raise ValueError(f"{missing}: expected an array beside {given}, got None")
        if has_scales:
            _check_field(g, scales, SCALE_DTYPES[layout],
                         grouped_scale_shape(g.shape, number, along, layout, transposed))


def _check_field(g: Grouped, name: str, dtypes: tuple[np.dtype[Any], ...], shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless a field is an array of one of these dtypes (any, if none are
    given) and of this shape, of the kind and on the device of splits."""
    a, xp = getattr(g, name), backend.module_of(g.splits, "splits")
    backend.require_module(a, xp, name)
    if dtypes and a.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {names(dtypes)}, got {a.dtype}")
    if a.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {a.shape}")
    if xp is not np and a.data.device_id != g.splits.data.device_id:
        raise ValueError(f"{name}: on GPU {a.data.device_id}, splits is on GPU {g.splits.data.device_id}")
