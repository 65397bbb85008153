"""Column-wise FP8 from row-wise FP8, without dequantising. Kernel: kernels_cu/convert/scaling_aware.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ... import backend, kernels, reference
from ...arrays import Array, asnumpy, bits, empty_beside, is_contiguous
from ...calls import splits as sizes
from ...calls import validate
from ...calls.row_segments import GroupRuns
from ...calls.row_segments import variants as run_variants
from ...formats import FORMATS, FP8_DTYPES, flag, float8_e4m3fn, float8_e8m0fnu, float32
from ...kernels import Kernel, Variant, error_word, executor_of, grid_size
from ...layouts import cdiv, round_up, scale_shape
from ...reference.convert.scaling_aware import exponents, row_scale_rows, target_rows
from ...results import Quantized, Scaled, swap_last
from ..scales.convert import convert_scales, with_compact_scales
from .astype import transpose

_KERNEL = Kernel("convert/scaling_aware", "scaling_aware_transpose")
_ROWS = 128                                 # of a tile
_COLUMNS = 128                              # of a tile
_SMALL_EXPERT = 4 * _ROWS                   # rows, on average
_THREADS = 2 * _COLUMNS                     # of a block: a warp for every 16 columns
#: Bytes of a tile, of which a block that has more than one keeps two, one of them on its way; and of columns that are shifted to whole
#: sectors of memory, whose readers look up to a word beyond them; and the first sector of each, where it waits for the end of a run
#: (kWaits). Where no column is shifted, that much more is left to the L1.
_TILE, _SHIFTED, _FIRST_SECTORS = _ROWS * _COLUMNS + 16, (_ROWS + 32) * _COLUMNS + 16, 32 * _COLUMNS
_MOST_TILES, _MOST_OF_EXPERTS = 3, 4        # that a block works on, one after the other; of more than one expert
_BLOCKS_PER_MULTIPROCESSOR = 8              # at least, before a block gets more of them
_AHEAD = 2                                  # blocks for each multiprocessor: so much further on is the one whose bytes come to the L2 ahead
_UNITS = 5, 2                               # log2 of the rows of what is counted before an expert: of E8M0's blocks, and row scales
#: The blocks along rows that become blocks along columns, and the dtype of their scales.
_BLOCKS = {(1, 128): float32, (1, 32): float8_e8m0fnu}
_SQUARE = (128, 128)
TARGETS = ("column", "tile")
_LAYOUTS = ("gemm_ready", "compact")


def scaling_aware_transpose(q: Scaled | Quantized, *, splits: Any = None, target: str = "column", scale_layout: str = "gemm_ready",
                            out: Quantized | None = None, check: bool = False) -> Quantized:
    """Column-wise FP8 from row-wise FP8 with power-of-two scales: exponents move, nothing is dequantised or quantised twice.

        out = cast(data * s / t)        s: the power of two that an element has, t: the one that its new, column-wise block gets

    A single rounding, to nearest even, subnormals included; exact wherever an element fits under t. ±0 stays, NaN is 0x7F. docs/numerics.md
    section 4 says every byte.

    Parameters
    ----------
    q : row-wise Scaled (or the Quantized that has it) of shape (M, K), float8_e4m3fn or float8_e5m2: blocks of (1, 128) with float32
        scales, all powers of two (2**-149 to 2**127) or 0, as unused rows of `permute` have it, or of (1, 32) with float8_e8m0fnu scales
        (MX). Scales that are not compact are made so by a launch of `convert_scales` before, into new memory. Or blocks of (128, 128),
        compact or gemm_ready, any float32 scales, two or three dimensions: such data are transposed as they are, byte for byte, and so
        are their scales (no splits; the target does not matter; `rowwise` is q itself)
    splits : rows of each of E experts, which follow one another: an int32 or int64 array [E] of q's kind, or a list (for a CuPy q it
        is copied to the GPU). No block straddles two experts. Rows that they leave over (memory allocated for the worst case) are no
        expert's
    target : which t. 'column': for each block of B rows of a column the smallest power of two under which all its values fit. 'tile': for
        B x B elements the largest s of the rows that hold anything but zeros (as FP8-Flow-MoE; less accurate where rows differ)
    scale_layout : of f32 scales: 'gemm_ready' (rows of K rounded up to a multiple of 4, padding 0) or 'compact'; E8M0 ones are compact
    out : an earlier result for the same q.data; written in place and returned. With it, and compact scales, the call allocates nothing
        and can be captured into a CUDA graph, with splits once it has been used before
    check : wait for the device and raise ValueError if splits or scales there are wrong. (NumPy arrays and lists are always looked at)

    Returns
    -------
    Quantized. `columnwise`: block (B, 1), transposed. Without splits data [K, M] and scale_inv [ceil(M/B), K]. With splits data is flat,
    [M * K]: each expert's [K, m_e], one after the other; scale_inv has each expert's ceil(m_e/B) rows, one expert after the other, and
    (M + (B-1) * min(E, M)) // B rows in all, a bound that does not depend on the sizes; what is past the last expert is 0.
    `rowwise`: q's own data; f32 scales transposed to gemm_ready by the same launch, [ceil(K/128), M rounded up to 4], with splits flat:
    each expert's [ceil(K/128), m_e rounded up to 4], one after the other, (M + 3 * min(E, M)) // 4 * 4 * ceil(K/128) in all, the rest 0;
    of MX q itself.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. On the device wrong facts raise nothing (`device_errors` tells): a
    row-block whose f32 scale is neither a power of two nor 0 becomes 0x7F, and the scales of the blocks that it is a part of NaN; a
    negative size counts as 0, and an expert that goes past the last row ends there. Rows that no expert has are left out, 0 at the end
    of the data.

    Source: FP8-Flow-MoE (target 'tile'); docs/numerics.md. Bytes moved: data once in, once out, and the scales.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> data = fp8.asarray([[448, 2], [1, 0.5]], fp8.float8_e4m3fn, like=np)
    >>> q = fp8.Scaled(data, np.float32([[1], [4]]), (2, 2), block=(1, 128), scale_layout="compact")
    >>> c = fp8.scaling_aware_transpose(q).columnwise
    >>> c.data.astype(np.float32).tolist(), c.scale_inv.tolist()
    ([[448.0, 4.0], [256.0, 256.0]], [[1.0, 0.0078125, 0.0, 0.0]])
    """
    given = _rowwise(q)
    if not isinstance(target, str) or target not in TARGETS:
        raise ValueError(f"target: expected one of {TARGETS}, got {target!r}")
    if not isinstance(scale_layout, str) or scale_layout not in _LAYOUTS:
        raise ValueError(f"scale_layout: expected one of {_LAYOUTS}, got {scale_layout!r}"
                         f"{'; .to_layout converts' if isinstance(scale_layout, str) and scale_layout == 'swizzled' else ''}")
    if given.block == _SQUARE:
        return _transposed_squares(given, splits, scale_layout, out)
    source = _source(given)
    s, data, xp = source.s, source.data, source.xp
    by_reference = executor_of(xp) == "reference"
    groups = sizes.NO_GROUPS if splits is None else sizes.read(splits, data, xp, check)
    if groups.host is not None:
        sizes.check_at_most(groups.host, s.shape[0])
    if flag(check, "check") or xp is np:
        source.check_scales(None if groups.host is None else sum(groups.host.tolist()))
    if out is None:
        if by_reference:
            fresh = reference.scaling_aware_transpose(source.dense, splits=groups.host, target=target, scale_layout=scale_layout)
            return Quantized(source.rowwise(None), fresh.columnwise) if source.mx else fresh
        validate.may_allocate(data)
        out = source.empty(groups.number, scale_layout)
        plan = _Plan(out, source, groups.number, target, None)
    else:
        plan = _validated(out, source, groups, target, scale_layout)
    if by_reference:
        fresh = reference.scaling_aware_transpose(source.dense, splits=groups.host, target=target, scale_layout=scale_layout)
        _store(out, fresh, ("columnwise",) if source.mx else ("rowwise", "columnwise"))
    else:
        plan.launch(source, groups)
    return out


class _Source:
    """A row-wise Scaled, found valid: where its data and scales lie. Kept with a Scaled on a GPU whose arrays are read where they are.
    given: as it came; s: the same with compact scales."""

    def __init__(self, given: Scaled) -> None:
        s = given
        data, xp, at = validate.source(s.data, FP8_DTYPES, "q.data")
        if s.block not in _BLOCKS or s.transposed or len(s.shape) != 2:
            raise ValueError(f"q: expected row-wise data [M, K] in blocks of {' or '.join(map(str, _BLOCKS))}, not stored transposed; "
                             f"got {s!r}")
        if data.shape != s.shape:
            raise ValueError(f"q.data: expected shape {s.shape}, got {data.shape}")
        self.rows, self.columns = s.shape
        self.block = int(s.block[1])
        dtype, shape = _BLOCKS[s.block], (self.rows, cdiv(self.columns, self.block))
        if not isinstance(s.scale_inv, xp.ndarray):
            backend.require_module(s.scale_inv, xp, "q.scale_inv")
        s = with_compact_scales(s, "q", dtype)
        if s.scale_inv.dtype != dtype:
            raise TypeError(f"q.scale_inv: expected dtype {dtype} for blocks of {s.block}, got {s.scale_inv.dtype}")
        if s.scale_inv.shape != shape:
            raise ValueError(f"q.scale_inv: expected shape {shape}, got {s.scale_inv.shape}")
        scales, _, scales_at = validate.source(s.scale_inv, (dtype,), "q.scale_inv")
        if xp is not np:
            validate.same_device(scales, data, "q.scale_inv")
        self.given, self.s, self.data, self.scales, self.xp, self.at, self.scales_at = given, s, data, scales, xp, at, scales_at
        self.dense = s if data is s.data and scales is s.scale_inv else Scaled._of(data, scales, s.shape, False, s.block, "compact")
        self.mx = self.block == 32
        if xp is not np and self.dense is given:
            given.__dict__["_aware"] = self

    def layout(self, scale_layout: str) -> str:
        return "compact" if self.mx else scale_layout

    def target_shape(self, groups: int | None, scale_layout: str) -> tuple[int, int]:
        columns = round_up(self.columns, 4) if self.layout(scale_layout) == "gemm_ready" else self.columns
        return target_rows(self.rows, groups, self.block), columns

    def row_shape(self, groups: int | None) -> tuple[int, ...] | None:
        """Of the row-wise scales that are written; MX data keep theirs."""
        if self.mx:
            return None
        blocks, rows = self.scales.shape[1], row_scale_rows(self.rows, groups)
        return (blocks, rows) if groups is None else (blocks * rows,)

    def stored(self, groups: int | None) -> tuple[int, ...]:
        return swap_last(self.s.shape) if groups is None else (self.rows * self.columns,)

    def rowwise(self, scale_inv: Array | None) -> Scaled:
        if scale_inv is None:
            return self.given if self.dense is self.s else self.dense
        return Scaled._of(self.data, scale_inv, self.s.shape, False, self.s.block, "gemm_ready")

    def empty(self, groups: int | None, scale_layout: str) -> Quantized:
        """A result, uninitialised."""
        def new(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
            return empty_beside(self.data, shape, dtype)

        columnwise = Scaled._of(new(self.stored(groups), self.data.dtype), new(self.target_shape(groups, scale_layout), self.scales.dtype),
                                self.s.shape, True, (self.block, 1), self.layout(scale_layout))
        row_shape = self.row_shape(groups)
        return Quantized(self.rowwise(None if row_shape is None else new(row_shape, float32)), columnwise)

    def check_scales(self, rows: int | None) -> None:
        """ValueError unless f32 scales, of the first `rows` where experts have no more, are powers of two, as E8M0 ones are by their
        nature. Waits for the device."""
        if self.mx:
            return
        if self.xp is not np and kernels.capturing(self.data.data.device_id):
            raise ValueError("check: waits for the device, which cannot be done while a CUDA graph is captured; "
                             "check before the capture")
        scales = asnumpy(self.scales)[:rows]
        wrong = exponents(scales).wrong
        if wrong.any():
            first = tuple(map(int, np.unravel_index(int(wrong.argmax()), wrong.shape)))
            raise ValueError(f"q.scale_inv: expected powers of two, got {scales[first]} at {first}; quantise with pow2_scale=True, or "
                             "dequantise and quantise column-wise")


def _rowwise(q: Scaled | Quantized) -> Scaled:
    if isinstance(q, Quantized):
        if q.rowwise is None:
            raise ValueError("q: expected a row-wise part, got a Quantized without one")
        q = q.rowwise
    if not isinstance(q, Scaled):
        raise TypeError(f"q: expected a Scaled or Quantized, got {type(q).__name__}")
    return q


def _source(q: Scaled) -> _Source:
    kept: _Source | None = q.__dict__.get("_aware")
    return _Source(q) if kept is None else kept


def _transposed_squares(s: Scaled, splits: Any, scale_layout: str, out: Quantized | None) -> Quantized:
    """Of blocks that are the same in both directions: a transpose, and the scales'."""
    if splits is not None:
        raise ValueError(f"splits: blocks of {_SQUARE} may straddle two experts; transpose each by itself")
    if s.transposed or s.scale_layout not in _LAYOUTS:
        raise ValueError(f"q: expected data not stored transposed with scales in one of {_LAYOUTS}, got {s!r}")
    stored, blocks = swap_last(s.shape), scale_shape(s.shape, _SQUARE, "compact")
    if s.scale_inv.shape != scale_shape(s.shape, _SQUARE, s.scale_layout):
        raise ValueError(f"q.scale_inv: expected shape {scale_shape(s.shape, _SQUARE, s.scale_layout)}, got {s.scale_inv.shape}")
    column: Scaled | None = None
    if out is not None:
        if not isinstance(out, Quantized):
            raise TypeError(f"out: expected a Quantized (an earlier result), got {type(out).__name__}")
        row, column = out.rowwise, out.columnwise
        if row is None or not _is_same(row.data, s.data) or not _is_same(row.scale_inv, s.scale_inv):
            raise ValueError(f"out.rowwise: expected q itself, got {row!r}; a result belongs to the memory of the q that it was made for")
        if column is None or (column.shape, column.transposed, column.block, column.scale_layout) != (s.shape, True, _SQUARE, scale_layout):
            raise ValueError(f"out.columnwise: expected data of shape {s.shape} stored transposed, block {_SQUARE}, {scale_layout} scales; "
                             f"got {column!r}")
    # As lines of blocks of the stored matrix; a view, which is read as it is.
    scales = s.scale_inv[..., :blocks[-1]].swapaxes(-1, -2)
    scale_inv = convert_scales(scales if 0 not in scales.shape else scales.copy(), source="compact", target=scale_layout, shape=stored,
                               block=_SQUARE, out=None if column is None else column.scale_inv)
    data = transpose(s.data, out=None if column is None else column.data)
    if out is not None:
        return out
    return Quantized(s, Scaled._of(data, scale_inv, s.shape, True, _SQUARE, scale_layout))


class _Written(NamedTuple):
    name: str
    at: int
    nbytes: int


class _Plan:
    """A launch into a result, with splits another one before it: the kernel's variant, its grid, and the members of its struct. owner: the
    array that the workspace belongs to (see `workspace`)."""

    def __init__(self, out: Quantized, source: _Source, groups: int | None, target: str, owner: Array | None) -> None:
        column = out.columnwise
        assert column is not None
        rows, columns = source.rows, source.columns
        aligned = columns % 16 == 0 and source.at % 16 == 0
        # What no expert has takes tiles of its own, one at least.
        down = cdiv(rows, _ROWS) if groups is None else target_rows(rows, groups + 1, _ROWS) + 1
        strips = cdiv(columns, _COLUMNS)
        if groups is not None:
            strips = max(1, strips)                          # even an empty array's sizes are looked at
        shifts = bool(groups is not None or rows % 16 or validate.address(column.data) % 16)
        in_flight = _in_flight(source.data.dtype, source.block, aligned, shifts, rows, groups)
        self.variant = _variant(source.data.dtype, source.block, target, aligned, in_flight, shifts)
        alone = _is_alone(in_flight, shifts)
        run = 1 if alone else _run(source.data, down * strips, _MOST_OF_EXPERTS if groups is not None and groups > 1 else _MOST_TILES)
        self.grid = down * strips and grid_size(cdiv(down * strips, run), source.s.shape)
        self.shared = _shared(source.block, in_flight, shifts)
        row_at = 0 if source.row_shape(groups) is None or out.rowwise is None else validate.address(out.rowwise.scale_inv)
        lines, pitch = column.scale_inv.shape
        self.addresses = (source.at, source.scales_at, validate.address(column.data), validate.address(column.scale_inv), row_at)
        self.members = (rows, columns, source.scales.shape[1], pitch, lines, row_scale_rows(rows, groups), down, strips, run,
                        int(columns % 8 == 0 and source.at % 8 == 0), _ahead(source.data))
        self.down, self.owner = down, owner
        self.found: tuple[int, int, GroupRuns] | None = None # for which sizes
        self.written: list[_Written] = []                    # known for a result given as `out=`

    def launch(self, source: _Source, groups: sizes.Groups) -> None:
        if not self.grid:
            return
        x, number, runs_at = source.data, -1, 0
        if groups.number is not None:
            number, found = groups.number, self.found
            if found is None or found[:2] != (groups.at, groups.wide):
                self.found = found = groups.at, groups.wide, self._runs(source, groups)
            found[2].run(x)
            runs_at = found[2].at
        self.variant.launch(x, self.grid, *self.addresses, runs_at, groups.at, number, error_word(x), groups.wide, *self.members,
                            shared=self.shared)

    def _runs(self, source: _Source, groups: sizes.Groups) -> GroupRuns:
        """What finds whose rows every row of tiles has: rows of one element, as RowGroups of kernels_cu/include/groups/row_groups.cuh."""
        rows = source.rows
        row_groups = 0, 0, 0, groups.at, groups.number, error_word(source.data), groups.wide, rows, 1, rows, 1, 1
        return GroupRuns(source.data, self.owner, _ROWS, self.down, row_groups, _UNITS)


def _validated(out: Quantized, source: _Source, groups: sizes.Groups, target: str, scale_layout: str) -> _Plan:
    """The _Plan of a result given as `out=`, once it has been found to fit the call."""
    key = (id(out), source.at, source.scales_at, validate.address(source.given.scale_inv), source.s.shape, source.s.block,
           source.data.dtype, groups.number, target, scale_layout)
    kept = getattr(out, "_plan", None)
    if kept is not None and kept[0] == key:
        plan: _Plan = kept[1]
    else:
        plan = _plan(out, source, groups.number, target, scale_layout)
        if source.xp is not np:
            object.__setattr__(out, "_plan", (key, plan))
    for name, at, nbytes in plan.written:
        validate.separate(at, nbytes, groups.at, groups.nbytes, name, "splits")
    return plan


def _plan(out: Quantized, source: _Source, groups: int | None, target: str, scale_layout: str) -> _Plan:
    if not isinstance(out, Quantized):
        raise TypeError(f"out: expected a Quantized (an earlier result), got {type(out).__name__}")
    row, column = out.rowwise, out.columnwise
    if row is None or column is None:
        raise ValueError("out: expected a row-wise and a column-wise part, as an earlier result has them")
    layout = source.layout(scale_layout)
    row_shape = source.row_shape(groups)
    own = source.rowwise(None)
    row_layout = own.scale_layout if row_shape is None else "gemm_ready"
    if (row.shape, row.transposed, row.block, row.scale_layout) != (source.s.shape, False, source.s.block, row_layout) \
            or not _is_same(row.data, source.data) or (row_shape is None and not _is_same(row.scale_inv, own.scale_inv)):
        what = "q itself" if row_shape is None else "q's own data with gemm_ready scales"
        raise ValueError(f"out.rowwise: expected {what}, got {row!r}; a result belongs to the memory of the q that it was made for")
    if (column.shape, column.transposed, column.block, column.scale_layout) != (source.s.shape, True, (source.block, 1), layout):
        raise ValueError(f"out.columnwise: expected data of shape {source.s.shape} stored transposed, block {(source.block, 1)}, {layout} "
                         f"scales; got {column!r}, scales {column.scale_layout}")
    written: list[_Written] = []

    def write(name: str, a: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        at = validate.destination(a, shape, dtype, source.data, source.xp, source.at, name)
        validate.separate(at, a.nbytes, source.scales_at, source.scales.nbytes, name, "q.scale_inv")
        given = source.given.scale_inv
        validate.separate(at, a.nbytes, validate.address(given), validate.extent(given), name, "q.scale_inv")
        for other in written:
            validate.separate(at, a.nbytes, other.at, other.nbytes, name, other.name)
        written.append(_Written(name, at, a.nbytes))

    write("out.columnwise.data", column.data, source.stored(groups), source.data.dtype)
    write("out.columnwise.scale_inv", column.scale_inv, source.target_shape(groups, scale_layout), source.scales.dtype)
    if row_shape is not None:
        write("out.rowwise.scale_inv", row.scale_inv, row_shape, float32)
    plan = _Plan(out, source, groups, target, column.scale_inv)
    plan.written = written
    return plan


def _is_same(a: Array, b: Array) -> bool:
    """Whether two arrays are the same memory, seen in the same way."""
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and is_contiguous(a) and (
        a.size == 0 or validate.address(a) == validate.address(b))


def _are_small(rows: int, groups: int | None) -> bool:
    return groups is not None and rows < _SMALL_EXPERT * groups


def _run(x: Array, count: int, most: int) -> int:
    """Tiles for each block of threads: few, of which the last ones leave little of a GPU idle."""
    if isinstance(x, np.ndarray):
        return 3                            # the CPU executor: enough for every way in which one tile follows another
    blocks = _BLOCKS_PER_MULTIPROCESSOR * kernels.multiprocessors(x.data.device_id)
    return max(1, min(most, count // blocks))


def _ahead(x: Array) -> int:
    return 1 if isinstance(x, np.ndarray) else _AHEAD * kernels.multiprocessors(x.data.device_id)


def _in_flight(dtype: np.dtype[Any], block: int, aligned: bool, shifts: bool, rows: int, groups: int | None) -> int:
    """Blocks of threads on a multiprocessor: four, for which there are registers and shared memory in these programs only; but large
    experts are faster with three (docs/performance.md)."""
    fit = dtype == float8_e4m3fn and aligned and (block == 128 or not shifts)
    return 4 if fit and (groups is None or _are_small(rows, groups)) else 3


@functools.cache
def _variant(dtype: np.dtype[Any], block: int, target: str, aligned: bool, in_flight: int, shifts: bool) -> Variant:
    alone = _is_alone(in_flight, shifts)
    return _KERNEL.variant(block=_THREADS, shared=_shared(block, in_flight, not alone), IN=FORMATS[dtype].tag, BLOCK=block,
                           TARGET=TARGETS.index(target), TILE_COLUMNS=_COLUMNS, BLOCKS=in_flight, ALIGNED=int(aligned), RUNS=int(not alone))


def _shared(block: int, in_flight: int, shifts: bool) -> int:
    """Bytes of shared memory that a launch takes."""
    if _is_alone(in_flight, shifts):
        return _TILE
    waits = block == 128 and in_flight < 4
    return 2 * _TILE + (_SHIFTED + waits * _FIRST_SECTORS if shifts else 0)


def _is_alone(in_flight: int, shifts: bool) -> bool:
    """Whether a block has a single tile, whose columns begin at multiples of 16 bytes: only there does a program of its own pay."""
    return in_flight == 4 and not shifts


def _store(out: Quantized, result: Quantized, parts: tuple[str, ...]) -> None:
    for name in parts:
        mine, fresh = getattr(out, name), getattr(result, name)
        for a, b in zip(mine, fresh, strict=True):
            if a is not b:
                bits(a)[...] = bits(b)


def variants() -> Iterator[Variant]:
    """Every variant that this op may launch."""
    yield from run_variants(iter((_ROWS,)))
    for dtype, (_, block), target, aligned in product(FP8_DTYPES, _BLOCKS, TARGETS, (False, True)):
        ways = ((None, False), (None, True), (1, True))
        yield from dict.fromkeys(
            _variant(dtype, block, target, aligned, _in_flight(dtype, block, aligned, shifts, _SMALL_EXPERT, groups), shifts)
            for groups, shifts in ways)
