"""Checks that the data and the scales of a result are consistent."""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

import numpy as np

from . import backend
from .advice import dtype_instead, shown
from .formats import FP8_DTYPES, SIZE_DTYPES, float32, names
from .layouts import SCALE_DTYPES, grouped_scale_shape, scale_shape, swap_last

__all__ = ["check_block_scales", "check_data_shape", "check_offsets_of_sizes", "check_one_piece",
           "check_parts", "may_be_equal"]


class Parts(Protocol):
    """The parts of a Scaled."""

    @property
    def data(self) -> Any: ...
    @property
    def scale_inv(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def transposed(self) -> bool: ...
    @property
    def block(self) -> tuple[int | None, int | None] | None: ...
    @property
    def scale_layout(self) -> str | None: ...
    @property
    def splits(self) -> Any: ...


def check_data_shape(s: Parts, name: str) -> None:
    """Raise ValueError unless the data of `s` have its shape as stored. name: of s in messages; '' if these
    begin with the part's name."""
    where = name and f"{name}."
    if s.splits is not None and len(s.shape) != 2:
        raise ValueError(f"{where}shape: expected (M, K) of groups of rows, got {s.shape}")
    if s.transposed and len(s.shape) < 2:
        raise ValueError(f"{where}transposed: needs two or more dimensions, got shape {s.shape}")
    stored, how = s.shape, ""
    if s.transposed:
        stored, how = swap_last(s.shape), " stored transposed"
        if s.splits is not None:
            stored, how = (prod(s.shape),), " of groups stored transposed"
    if s.data.shape != stored:
        raise ValueError(f"{where}data: expected shape {stored} for the logical shape {s.shape}{how}, got "
                         f"{s.data.shape}")


def check_block_scales(s: Parts, name: str) -> None:
    """Raise ValueError or TypeError unless the scale_inv of an `s` with blocks fits its shape, block and
    scale_layout. name: of s in messages; '' if these begin with the part's name."""
    _check_block_scales(s, s.scale_layout, name and f"{name}.")


def _check_block_scales(s: Parts, layout: str | None, where: str) -> None:
    try:
        shape = scale_shape(s.shape, s.block, layout, s.transposed)
        if s.splits is not None:
            (m, k), block = s.shape, s.block
            assert block is not None
            shape = grouped_scale_shape((m, k), len(s.splits), block, str(layout), s.transposed)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None
    dtypes = SCALE_DTYPES[str(layout)]
    if s.scale_inv.dtype not in dtypes:
        raise TypeError(f"{where}scale_inv: expected dtype {names(dtypes)} of {layout} scales, got "
                        f"{s.scale_inv.dtype}")
    if s.scale_inv.shape != shape:
        groups = "" if s.splits is None else f" in {len(s.splits)} groups"
        raise ValueError(f"{where}scale_inv: expected shape {shape}, {layout} scales of blocks {s.block} of "
                         f"shape {s.shape}{groups}, got {s.scale_inv.shape}")


def check_parts(s: Parts) -> None:
    """Raise TypeError or ValueError unless the parts of a Scaled are consistent."""
    data, scale_inv = s.data, s.scale_inv
    xp = backend.module_of(data, "data")
    backend.require_module(scale_inv, xp, "scale_inv")
    if data.dtype not in FP8_DTYPES:
        raise TypeError(f"data: expected dtype {names(FP8_DTYPES)}, got {data.dtype}"
                        f"{dtype_instead(data.dtype, FP8_DTYPES, 'data')}")
    if xp is not np:
        backend.same_device(scale_inv, data, "scale_inv", "data")
    if s.splits is not None:
        _check_splits(s, xp)
    check_data_shape(s, "")
    if s.block is not None:
        if s.scale_layout is None:
            raise ValueError(f"scale_layout: expected one of {tuple(SCALE_DTYPES)} for blocks {s.block}, got "
                             f"None{_fitting(s)}")
        check_block_scales(s, "")
        return
    if s.scale_layout is not None:
        raise ValueError(f"scale_layout: expected None for one scale, got {shown(s.scale_layout)}; scales of "
                         f"blocks need block=")
    if scale_inv.dtype != float32:
        raise TypeError(f"scale_inv: expected dtype float32 of one scale, got {scale_inv.dtype}; scales of "
                        f"blocks need block=")
    if scale_inv.size != 1:
        raise ValueError(f"scale_inv: expected one scale for the tensor, got shape {scale_inv.shape}; scales "
                         f"of blocks need block=")


def _check_splits(s: Parts, xp: Any) -> None:
    """Raise TypeError or ValueError unless the sizes of a Scaled can be those of groups of its rows."""
    splits = s.splits
    backend.require_module(splits, xp, "splits")
    if splits.dtype not in SIZE_DTYPES:
        raise TypeError(f"splits: expected dtype {names(SIZE_DTYPES)}, got {splits.dtype}")
    if splits.ndim != 1:
        raise ValueError(f"splits: expected one dimension, got shape {splits.shape}")
    if xp is not np:
        backend.same_device(splits, s.data, "splits", "data")
    if s.block is None:
        raise ValueError(f"splits: expected None for one scale, got {len(splits)} sizes; scales of blocks "
                         "need block=")


def check_one_piece(s: Parts, name: str = "q") -> None:
    """Raise ValueError if data and scales are laid out by sizes of groups. name: of s in messages."""
    if s.splits is not None:
        raise ValueError(f"{name}: expected data of one piece, got data of {len(s.splits)} groups, laid out "
                         "by their sizes (scaling_aware_transpose with splits) for products of groups; "
                         "without splits its result is of one piece")


def may_be_equal(sizes: Any, others: Any) -> bool:
    """Whether two arrays of sizes, or None, are equal as far as the host knows."""
    known = isinstance(sizes, np.ndarray) and isinstance(others, np.ndarray)
    return not known or np.array_equal(sizes, others)


def check_offsets_of_sizes(offsets: np.ndarray, sizes: np.ndarray, columns: int,
                           name: str = "offsets") -> None:
    """Raise ValueError unless offsets of groups are the sums of their sizes, times columns. name: of the
    offsets, in messages."""
    want = np.concatenate([[0], np.cumsum(sizes)]) * columns
    if not np.array_equal(offsets, want):
        wrong = int(np.argmax(offsets != want))
        raise ValueError(f"{name}: expected {want[wrong]} at {wrong} (rows before it, times {columns} "
                         f"columns), got {offsets[wrong]}")


def _fitting(s: Parts) -> str:
    """Return the end of a message that names the layouts that these scales fit."""
    found = []
    for layout in SCALE_DTYPES:
        try:
            _check_block_scales(s, layout, "")
        except (TypeError, ValueError):
            continue
        found.append(layout)
    return f"; these scales fit {' or '.join(found)}" if found else ""
