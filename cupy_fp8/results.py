"""The results of quantisers. All frozen: no function changes an input's metadata, and scale_inv always
belongs to its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from . import backend
from .advice import Absent, member, shown, type_name
from .arrays import Array, Result, Shape, _as_shape, bits, once
from .formats import as_dtype, choice, flag, float32, plain_name
from .layouts import SCALE_DTYPES, ScaleLayout, as_block, block_text, is_of_integers, swap_last
from .methods import ops
from .scaled_parts import check_one_piece, check_parts, may_be_equal
from .typed_array import TypedArray

__all__ = ["Quantized", "Scaled"]


class _Values(Result):
    """Base class of results that stand for one tensor. Its errors say that they are not NumPy arrays or other
    libraries' tensors, and what to write instead."""

    scale, scales = Absent("scale_inv"), Absent("scale_inv")
    astype, to, float = (Absent("dequantize(dtype)") for _ in range(3))
    numpy, tolist = Absent("dequantize()"), Absent("dequantize().tolist()")
    ndim, size = Absent("len(q.shape)"), Absent("math.prod(q.shape)")

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in vars(_Values) or name[:2] == "__"]


@dataclass(frozen=True, eq=False)
class Scaled(_Values):
    """Quantised data in one direction: value = data * scale_inv.

    data         C-contiguous FP8 array of the logical shape […, M, K], or […, K, M] if `transposed`
    scale_inv    per-tensor scaling: f32 [1]; blocks: E8M0, f32, or int32 (words of four E8M0 scales), as
                 scale_layout says
    shape        the logical shape, which does not depend on the storage
    block        the shape of the block that shares a scale in the logical matrix, (1, 32) for row-wise and
                 (32, 1) for column-wise MX; None: one scale for the tensor
    scale_layout  how the scales of blocks are stored: 'compact' (a row of scales per row of blocks),
                  'swizzled', 'gemm_ready', 'deepgemm_sm90' or 'deepgemm_sm100' (docs/layouts.md); None for
                  one scale
    splits       int32 or int64 [N]: the rows of N groups by which scales, and data stored transposed (flat),
                 are laid out, as in a `Grouped`. Made by `scaling_aware_transpose`, and accepted only by
                 `grouped_matmul_nt`. None: a tensor of one piece

    TypeError or ValueError says which parts do not fit together. `==` compares bytes and metadata.
    """

    data: TypedArray
    scale_inv: TypedArray
    shape: tuple[int, ...]
    transposed: bool = False
    block: tuple[int | None, int | None] | None = None
    scale_layout: ScaleLayout | None = None
    splits: TypedArray | None = None

    def __init__(self, data: Array, scale_inv: Array, shape: Shape, transposed: bool = False,
                 block: Sequence[int | None] | None = None, scale_layout: ScaleLayout | None = None,
                 splits: Array | None = None) -> None:
        self.__dict__.update(data=data, scale_inv=scale_inv, shape=_as_shape(shape),
                             transposed=flag(transposed, "transposed"), block=as_block(block),
                             scale_layout=plain_name(scale_layout), splits=splits)
        check_parts(self)

    @classmethod
    def _of(cls, data: Array, scale_inv: Array, shape: tuple[int, ...], transposed: bool = False,
            block: tuple[int | None, int | None] | None = None, scale_layout: str | None = None,
            splits: Array | None = None) -> Scaled:
        """Make a Scaled from parts that the library made or has checked, like `_of_fields`, but stores one
        after the other, which takes two thirds of the time."""
        made = object.__new__(cls)
        fields = made.__dict__
        fields["data"], fields["scale_inv"], fields["shape"] = data, scale_inv, shape
        fields["transposed"], fields["block"], fields["scale_layout"] = transposed, block, scale_layout
        fields["splits"] = splits
        return made

    @property
    def dtype(self) -> np.dtype[Any]:
        """The FP8 type of the data."""
        return self.data.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return int(self.data.nbytes + self.scale_inv.nbytes)

    @property
    def T(self) -> Scaled:
        """The transposed matrix (last two axes), without moving a byte: the same data read the other way
        round. Compact scales follow the logical matrix, so they become a transposed view; those of other
        layouts follow the lines, and are unchanged. ValueError for data laid out by sizes of groups."""
        check_one_piece(self)
        if len(self.shape) < 2:
            return self
        block, scale_inv = self.block, self.scale_inv
        if block is not None and 1 in block and self.scale_layout == "compact":
            scale_inv = scale_inv.swapaxes(-1, -2)
        return Scaled._of(self.data, scale_inv, swap_last(self.shape), not self.transposed,
                          block and (block[1], block[0]), self.scale_layout)

    def dequantize(self, dtype: Any = np.float32) -> TypedArray:
        """Return the values, in the logical shape: see `cupy_fp8.dequantize`."""
        return ops.dequantize(self, dtype=dtype)

    def to_layout(self, name: ScaleLayout, *, dtype: Any = None) -> Scaled:
        """Return the same data with its scales stored in another layout: 'compact', 'swizzled' (E8M0),
        'gemm_ready' or 'deepgemm_sm90' (f32), or 'deepgemm_sm100' (words of E8M0 scales). Itself if they are
        already. `convert_scales` does the conversion.

        dtype : of compact scales, float32 or float8_e8m0fnu. None: unchanged; float8_e8m0fnu for words
        Raises ValueError for other names, for a per-tensor result, whose one scale has no layout, for data
        laid out by sizes of groups, where the layout does not fit the block, and (of NumPy arrays) for f32
        scales that E8M0 does not hold; TypeError for a dtype that the layout does not hold.
        """
        if self.block is None:
            raise ValueError(f"to_layout({shown(name)}): per-tensor data has a single scale, which has no "
                             "layout")
        choice(name, "to_layout", SCALE_DTYPES)
        dtype = None if dtype is None else as_dtype(dtype, "dtype", "one that scales have")
        check_one_piece(self)
        if name == self.scale_layout and (dtype is None or self.scale_inv.dtype == dtype):
            return self
        shape, block = self.shape, self.block
        if self.transposed and 1 not in block:              # scales in the order of the stored data
            shape, block = swap_last(shape), (block[1], block[0])
        scale_inv = ops.convert_scales(self.scale_inv, source=self.scale_layout, target=name, shape=shape,
                                       block=block, dtype=dtype)
        return Scaled._of(self.data, scale_inv, self.shape, self.transposed, self.block, name)

    def to_block(self, block: Sequence[int | None], *, scale_dtype: Any = None,
                 scale_layout: ScaleLayout = "compact", changed: Array | None = None) -> Scaled:
        """Return the same values in other blocks of power-of-two scales, such as MX data (1×32) in blocks of
        1×128 or 128×128. Itself if it has these blocks, this layout and this dtype of scales; if only the
        layout or the dtype differs, `to_layout` converts the scales alone. Otherwise `rebase_scales` moves
        exponents and rounds once; see there for the arguments and errors.

        >>> import numpy as np, cupy_fp8 as fp8
        >>> q = fp8.quantize_mx(np.float32([[448] * 32 + [1] * 32])).rowwise
        >>> q.to_block((1, 128), scale_layout="gemm_ready")
        Scaled(float8_e4m3fn[1, 64], block 1×128, gemm_ready scales, numpy)
        """
        block = as_block(block)
        if isinstance(block, tuple) and is_of_integers(block) and block == self.block:
            return self.to_layout(scale_layout, dtype=scale_dtype)
        result: Scaled = ops.rebase_scales(self, block=block, scale_dtype=scale_dtype,
                                           scale_layout=scale_layout, changed=changed)
        return result

    def __iter__(self) -> Iterator[Array]:
        return iter((self.data, self.scale_inv))

    def __deepcopy__(self, memo: dict[int, Any]) -> Scaled:
        """Copy the arrays' bytes, since CuPy cannot copy FP8 arrays."""
        return self._with_arrays(once(lambda a: bits(a).copy().view(a.dtype), memo))

    def _with_arrays(self, change: Callable[[Array], Array]) -> Scaled:
        """Return the same result with other arrays of the same contents."""
        return Scaled._of(change(self.data), change(self.scale_inv), self.shape, self.transposed, self.block,
                          self.scale_layout, None if self.splits is None else change(self.splits))

    def _groups(self) -> str:
        return "" if self.splits is None else f", in {len(self.splits)} groups"

    def _facts(self) -> dict[str, str]:
        granularity = "per tensor" if self.block is None else block_text(self.block)
        if self.scale_layout is not None:
            granularity += f", {self.scale_layout} scales"
        granularity += self._groups()
        return {"dtype": self.dtype.name, "shape": _dims(self.shape), "scaling": granularity,
                "stored": f"transposed {_dims(self.data.shape)}" if self.transposed else "as is",
                "kind": backend.kind_of(self.data), "bytes": f"{self.nbytes:,}"}

    def __repr__(self) -> str:
        f = self._facts()
        stored = ", stored transposed" if self.transposed else ""
        return f"Scaled({f['dtype']}[{f['shape']}], {f['scaling']}{stored}, {f['kind']})"

    def _repr_html_(self) -> str:
        return facts_table({"": "Scaled", **self._facts()})


class _Part:
    """A direction of a Quantized. A missing one raises AttributeError, which says how to get it; the library
    itself reads `_row` and `_column`, which are None then."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, other = name, {"rowwise": "columnwise", "columnwise": "rowwise"}[name]
        self._absent = (f"this Quantized has no {name.removesuffix('wise')}-wise part: quantise with "
                        f"{name}=True, or use .{other}")

    def __get__(self, q: Quantized | None, owner: type | None = None) -> Scaled:
        part: Scaled | None = None if q is None else q.__dict__[self._name]
        if part is None and q is not None:
            raise AttributeError(self._absent)
        return part         # type: ignore[return-value]    # the class gives None, the default of the field

    def __set__(self, q: Quantized, value: Any) -> None:
        raise AttributeError(f"cannot assign to field {self._name!r}")


@dataclass(frozen=True, eq=False)
class Quantized(_Values):
    """A quantised tensor: the row-wise direction, the column-wise direction, or both, of the same values.

    rowwise, columnwise  a `Scaled` each. A missing one raises AttributeError (see `parts`)
    dbias                the bias gradient, or None

    ``Quantized(**q.parts, dbias=b)`` is q with another bias gradient. `==` compares bytes and metadata.
    """

    rowwise: _Part = _Part()
    columnwise: _Part = _Part()
    dbias: TypedArray | None = None

    def __init__(self, rowwise: Scaled | None = None, columnwise: Scaled | None = None,
                 dbias: Array | None = None) -> None:
        if rowwise is None and columnwise is None:
            raise ValueError("Quantized: expected a row-wise or a column-wise part, got neither")
        self.__dict__.update(rowwise=rowwise, columnwise=columnwise, dbias=dbias)
        _check_directions(self)

    @classmethod
    def _of(cls, rowwise: Scaled | None, columnwise: Scaled | None, dbias: Array | None = None) -> Quantized:
        """Make a Quantized from parts that the library made or has checked, like `Scaled._of`."""
        made = object.__new__(cls)
        fields = made.__dict__
        fields["rowwise"], fields["columnwise"], fields["dbias"] = rowwise, columnwise, dbias
        return made

    @property
    def parts(self) -> dict[str, Scaled]:
        """The existing directions, by name. `parts.get("columnwise")` is None if there is none."""
        return {name: part for name, part in (("rowwise", self._row), ("columnwise", self._column))
                if part is not None}

    @property
    def _row(self) -> Scaled | None:
        part: Scaled | None = self.__dict__["rowwise"]
        return part

    @property
    def _column(self) -> Scaled | None:
        part: Scaled | None = self.__dict__["columnwise"]
        return part

    @property
    def data(self) -> TypedArray:
        """The row-wise data."""
        return self._rowwise("data").data

    @property
    def scale_inv(self) -> TypedArray:
        """The row-wise scale_inv."""
        return self._rowwise("scale_inv").scale_inv

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self._any.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The FP8 type of the data."""
        return self._any.dtype

    @property
    def nbytes(self) -> int:
        """Bytes held, counting an array that both directions share once."""
        arrays = [*(a for part in self.parts.values() for a in part),
                  *(() if self.dbias is None else (self.dbias,))]
        return sum(int(a.nbytes) for a in {id(a): a for a in arrays}.values())

    def dequantize(self, dtype: Any = np.float32) -> TypedArray:
        """Return the values in the logical shape, from the row-wise part if there is one."""
        return self._any.dequantize(dtype)

    @property
    def T(self) -> Quantized:
        """The transposed tensor (last two axes), without moving a byte: the parts change places, and each
        becomes its `Scaled.T`. The bias gradient is left out, since it sums this tensor's columns."""
        if len(self.shape) < 2:
            return self
        if "_turned" not in self.__dict__:                  # weights are turned in each step of a layer
            row = self._row and self._row.T
            column = row if self._column is self._row else self._column and self._column.T
            self.__dict__["_turned"] = Quantized(column, row)
        return self.__dict__["_turned"]

    def to_layout(self, name: ScaleLayout, *, dtype: Any = None) -> Quantized:
        """Return the same data with the scales of both directions in another layout; see `Scaled.to_layout`,
        also for errors. Itself if they are already."""
        row = self._row and self._row.to_layout(name, dtype=dtype)
        column = row
        if self._column is not self._row:
            column = self._column and self._column.to_layout(name, dtype=dtype)
        return (self if row is self._row and column is self._column
                else Quantized(row, column, self.dbias))

    def to_block(self, block: Sequence[int | None], *, scale_dtype: Any = None,
                 scale_layout: ScaleLayout = "compact", changed: Array | None = None) -> Quantized:
        """Return the same values with each direction in other blocks; see `Scaled.to_block`, also for errors.
        `block` is that of rows, (1, 128) or (128, 128); columns get its transpose, which needs data stored
        transposed. Itself if they are already."""
        options: dict[str, Any] = {"scale_dtype": scale_dtype, "scale_layout": scale_layout,
                                   "changed": changed}
        row = self._row and self._row.to_block(block, **options)
        column = row
        if self._column is not self._row:
            block = as_block(block)
            swapped: Any = tuple(reversed(block)) if isinstance(block, tuple) else block
            column = self._column and self._column.to_block(swapped, **options)
        return (self if row is self._row and column is self._column
                else Quantized(row, column, self.dbias))

    @property
    def _any(self) -> Scaled:
        part = self._row or self._column
        assert part is not None     # checked by __init__
        return part

    def _rowwise(self, name: str) -> Scaled:
        if self._row is None:
            raise AttributeError(f"this Quantized has no row-wise part: use .columnwise.{name}")
        return self._row

    def __repr__(self) -> str:
        f = self._any._facts()
        # row-wise MX data are not laid out by sizes when their columns are
        more = self._column._groups() if self._column and not self._any._groups() else ""
        parts = " + ".join(name + (f" (stored transposed{more})" if part.transposed else "")
                           for name, part in self.parts.items())
        return f"Quantized({f['dtype']}[{f['shape']}], {f['scaling']}, {parts}, {f['kind']})"

    def _repr_html_(self) -> str:
        return facts_table(*({"": name, **part._facts()} for name, part in self.parts.items()))


def _check_directions(q: Quantized) -> None:
    """Raise TypeError or ValueError unless the parts of a Quantized are consistent."""
    for name, part in (("rowwise", q._row), ("columnwise", q._column)):
        if part is not None and not isinstance(part, Scaled):
            raise TypeError(f"Quantized: expected a Scaled as {name}, got {type_name(part)}; "
                            "quantize_tensor, quantize_block and quantize_mx make results")
    first, column = q._any, q._column
    if q._row and column and (column.shape, column.dtype) != (first.shape, first.dtype):
        raise ValueError(f"columnwise: expected {first.dtype} of shape {first.shape}, as rowwise, got "
                         f"{column.dtype} {column.shape}")
    if q._row and column and not may_be_equal(q._row.splits, column.splits):
        raise ValueError("columnwise.splits: expected the sizes of rowwise, got others")
    if q.dbias is not None:
        backend.require_module(q.dbias, backend.module_of(first.data, "data"), "dbias")
        wanted = (*first.shape[:-2], first.shape[-1]) if first.shape else ()
        if q.dbias.dtype != float32 or q.dbias.shape != wanted:
            raise ValueError(f"dbias: expected float32 {wanted}, got {q.dbias.dtype} {q.dbias.shape}")


def _dims(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def html_table(head: Iterable[str], rows: Iterable[Iterable[str]], first: str = "td") -> str:
    """Return an HTML table. first: 'th' if the first cell of a row names it."""
    lines = ["".join(f"<th>{escape(title)}</th>" for title in head)]
    for begin, *others in rows:
        lines.append(f"<{first}>{escape(begin)}</{first}>"
                     + "".join(f"<td>{escape(cell)}</td>" for cell in others))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def facts_table(*rows: dict[str, str]) -> str:
    """Return an HTML table with a column for each fact."""
    return html_table(rows[0], [row.values() for row in rows])


def row_wise(q: Any, name: str = "q", advice: str = "") -> Scaled:
    """Return a Scaled, or the row-wise part of a Quantized. TypeError, ValueError (with this advice)."""
    if isinstance(q, Quantized):
        if q._row is None:
            if q._column:
                check_one_piece(q._column, name)
            raise ValueError(f"{name}: expected a row-wise part, got a Quantized without one{advice}")
        return q._row
    return as_scaled(q, name)


def as_scaled(q: Any, name: str = "q") -> Scaled:
    """Return a Scaled, or for a Quantized its row-wise part if it has one. TypeError for anything else."""
    if not isinstance(q, (Scaled, Quantized)):
        raise TypeError(f"{name}: expected a Scaled or Quantized, got {type_name(q)}{member(q, name)}")
    return q if isinstance(q, Scaled) else q._any
