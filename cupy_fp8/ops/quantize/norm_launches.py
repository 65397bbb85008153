"""Launches of norms with quantisation. Kernels: kernels_cu/quantize/norm.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ...arrays import address
from ...calls.call import Call, Input
from ...formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e4m3fn, float16, float32
from ...kernels import Kernel, Launch, Variant, grid_size, multiprocessors, shared_memory_per_block
from ...layouts import cdiv
from ...recipes import CurrentScaling
from ..scales.scale import TensorScaleRule
from . import bias_gradient, fused
from .bias_gradient import ColumnSums, partial_sums
from .fused import ANY, F32_BLOCKS, MX_BLOCKS, ONE_SCALE, PLAIN, ROWS, TILE, Members

#: The define SCALING of gradients that are not quantised.
ARRAY = "none"
#: The struct SourceCall has these flags.
LAYER, _WEIGHT_F32, _WIDE = 1, 2, fused.WIDE_FLAG
ROUND_THROUGH = {None: 0, bfloat16: 4, float16: 16}
_ENTRIES = {ONE_SCALE: "norm_cast", F32_BLOCKS: "norm_block", MX_BLOCKS: "norm_mx", ARRAY: "norm_array"}
_KERNELS = {scaling: Kernel("quantize/norm", entry) for scaling, entry in _ENTRIES.items()}
#: Those of path plain.
_TILE_KERNELS = {scaling: Kernel("quantize/norm", entry, waits=True) for scaling, entry in _ENTRIES.items()}
_STATISTICS = Kernel("quantize/norm", "norm_statistics", block=256)
_COLUMN_SUMS = Kernel("quantize/norm", "norm_column_sums", block=256)
#: The define NORMS says which calls a program serves.
RMS, RESIDUAL, _LAYER_ALONE, EVERY = "rms", "residual", "layer", "every"
#: Of norm/rows.cuh: threads of a block, and, forward and backward, a thread's chunks of a row and rows.
#: LayerNorm alone has fewer threads.
_ROW_THREADS, _LAYER_THREADS, _ROW_CHUNKS, _ROWS_AT_ONCE = 512, 256, (4, 2), (1, 2)
#: Threads that registers of a multiprocessor allow on path rows of y (norm/drivers.cuh: kNormBlocks).
_THREADS_AT_ONCE = {RMS: 1024, RESIDUAL: 1024, _LAYER_ALONE: 768, EVERY: 512}
#: Rows of y of a block on path rows: of long rows, and of those with fewer columns.
_ROWS_OF_Y, _LONG = (8, 4), 6144
_CHUNK, _WARP = 8, 32
#: Rows of gradients of a block on path rows, at most, and blocks that should remain.
_MOST_ROWS, _ENOUGH_BLOCKS = 64, 128
#: Path plain takes rows up to that many columns, and looks that often for statistics before it finds them.
_MOST_COLUMNS, _PATIENCE = 1 << 15, 1 << 16
#: Tiles that statistics are found ahead, for each multiprocessor, which one or two blocks share.
_LEAD = {1: 1.5, 2: 2.25}
_TILE_THREADS, _TILE_BYTES = 512, TILE.rows * TILE.columns * 2
#: Bytes of shared memory that kernels have beside what a launch asks for, at most.
_STATIC_SHARED = {ROWS: 2 << 10, PLAIN: 20 << 10}
_LEAST_SHARED = 1024
#: Path rows numbers rows by int.
_MANY_ROWS = 1 << 30
_SUMMED_ROWS = 128
_WORKSPACE_WORDS, _SCALE_OFFSET = 4, 8


class Values(NamedTuple):
    """What a call computes. grad: a call with it computes gradients. flags, eps, offset: of the norm.
    outputs: the addresses of x + residual, of the normed values and of 1 / sigma, or 0. sums: where the
    gradients of weight and bias go, or 0. output: how the result is stored; or None: as `dtype`."""

    x: Input
    grad: Input | None
    residual: Input | None
    weight: Input
    bias: Input | None
    rstd: Input | None
    flags: int
    eps: float
    offset: float
    outputs: dict[str, int]
    sums: tuple[int, int]
    output: fused.Output | None
    dtype: np.dtype[Any]
    scale: tuple[int, float]
    amax_at: int

    @property
    def backward(self) -> bool:
        return self.grad is not None

    @property
    def scaling(self) -> str:
        return ARRAY if self.output is None else self.output.scaling


# ---- programs ----
def _has_program(scaling: str, dtype: np.dtype[Any], to: np.dtype[Any], backward: bool, path: str,
                 norms: str) -> bool:
    """Path any has all programs for every norm; rows those from bfloat16, and to e4m3 (not
    the gradients of float32); plain those from bfloat16 to what is usual. What is usual has programs for one
    norm too."""
    usual = dtype == bfloat16 and (to == float8_e4m3fn or backward)
    if scaling == ARRAY:
        usual = to == dtype == bfloat16 and norms in (RMS, RESIDUAL)
        of_rows = path == ROWS and dtype != float32 and (norms == EVERY or usual)
        return of_rows or (path == ANY and norms == EVERY)
    if norms == EVERY:
        to_e4m3 = to == float8_e4m3fn and not (backward and dtype == float32)
        return path == ANY or usual or (path == ROWS and (dtype == bfloat16 or to_e4m3))
    return path != ANY and usual and (norms != _LAYER_ALONE or (path == ROWS and not backward))


@functools.cache
def _variant(scaling: str, dtype: np.dtype[Any], to: np.dtype[Any], backward: bool, path: str, norms: str,
             shared: int) -> Variant:
    """shared: the most bytes that a launch has. to: of arrays that are not quantised their dtype."""
    of_rows = _LAYER_THREADS if norms == _LAYER_ALONE else _ROW_THREADS
    block = {ANY: TILE.block, ROWS: of_rows, PLAIN: _TILE_THREADS}[path]
    types = {"OUT": float8_e4m3fn, "DX": to} if scaling == ARRAY else {"OUT": to}
    kernels = _TILE_KERNELS if path == PLAIN else _KERNELS
    return kernels[scaling].variant(block=block, shared=shared, IN=dtype, **types, SCALING=scaling,
                                    BACKWARD=backward, PATH=path, NORMS=norms)


def _helper(kernel: Kernel, dtype: np.dtype[Any], backward: bool) -> Variant:
    return kernel.variant(IN=dtype, SCALING=ARRAY, BACKWARD=backward, PATH=ANY, NORMS=EVERY)


def variants() -> Iterator[Variant]:
    """Yields every variant that norms may launch."""
    for dtype, backward in product(INPUT_DTYPES, (False, True)):
        yield _helper(_STATISTICS, dtype, backward)
    for dtype in INPUT_DTYPES:
        yield _helper(_COLUMN_SUMS, dtype, True)
    programs = [*product((ONE_SCALE, F32_BLOCKS, MX_BLOCKS), INPUT_DTYPES, FP8_DTYPES, (False, True)),
                *((ARRAY, dtype, to, True) for dtype in INPUT_DTYPES
                  for to in dict.fromkeys((dtype, float32)))]
    for (scaling, dtype, to, backward), path, norms in product(
            programs, (ANY, ROWS, PLAIN), (RMS, RESIDUAL, _LAYER_ALONE, EVERY)):
        if _has_program(scaling, dtype, to, backward, path, norms):
            yield _variant(scaling, dtype, to, backward, path, norms, _LEAST_SHARED)
    yield from bias_gradient.variants()


class _Gpu(NamedTuple):
    """What launches depend on."""

    multiprocessors: int
    shared: int                  # bytes of a block
    most_tiles: int = 1 << 31    # of path plain
    most_blocks: int = 32        # of a multiprocessor
    enough_blocks: int = _ENOUGH_BLOCKS
    statistics_blocks: int = 1 << 16

    @staticmethod
    @functools.cache
    def of(device_id: int | None) -> _Gpu:
        if device_id is None:
            # Blocks have several rows, and parts ahead, of arrays that are small.
            return _Gpu(1, 200 << 10, 31, 2, 2, 4)
        return _Gpu(multiprocessors(device_id), shared_memory_per_block(device_id))


# ---- launches ----
class _Launches:
    """The launches of a call. destinations: members with the addresses of the result."""

    def __init__(self, call: Call, values: Values, destinations: Members) -> None:
        self.call, self.values, self.destinations = call, values, destinations
        x = values.x.array
        self.x, (self.rows, self.columns) = x, x.shape
        self.gpu = _Gpu.of(None if isinstance(x, np.ndarray) else x.data.device_id)
        self.wide = self._is_wide()
        self.source = self._source()

    def _is_wide(self) -> bool:
        v, output = self.values, self.values.output
        read = functools.reduce(int.__or__, (a.at for a in (v.x, v.grad, v.residual, v.weight, v.bias) if a))
        read |= v.outputs.get("summed", 0) | v.outputs.get("normed", 0)
        if output is None:
            return self.columns % _CHUNK == 0 and (read | self.destinations["dx"]) % 16 == 0
        return fused.is_wide(output, self.destinations, self.columns, read)

    def _source(self) -> Members:
        """Members of the struct SourceCall that all launches have."""
        v = self.values
        flags = v.flags | _WIDE * self.wide | _WEIGHT_F32 * (v.weight.dtype == float32)
        inverse = np.float32(1) / np.float32(self.columns or 1)
        return {"x": v.x.at, "grad": v.grad.at if v.grad else 0,
                "residual": v.residual.at if v.residual else 0,
                "weight": v.weight.at, "bias": v.bias.at if v.bias else 0, "rstd": v.rstd.at if v.rstd else 0,
                "noop": self.call.noop_at, "rows": self.rows, "columns": self.columns, "all_rows": self.rows,
                "columns_f32": self.columns, "columns_inverse": inverse, "eps": v.eps,
                "weight_offset": v.offset if v.offset else -0.0, "flags": flags}

    def all(self) -> Iterator[Launch]:
        output = self.values.output
        if output is None:
            if self.x.size:
                yield from self._values(self.destinations)
        elif output.scaling == ONE_SCALE:
            yield from self._cast(output)
        elif self.x.size:
            yield from self._values(self.destinations)
        elif self.rows and self.values.outputs.get("rstd_out"):
            yield self._statistics(self._statistics_at(), self.values.outputs["rstd_out"])
        if self.values.sums[0] and not self.x.size:
            yield from self._sums(_SUMMED_ROWS, False)[1]

    def _cast(self, output: fused.Output) -> Iterator[Launch]:
        """Current scaling's first launches find the scale, and write nothing else."""
        (scale_at, scale_value), amax_at = self.values.scale, self.values.amax_at
        if isinstance(output.recipe, CurrentScaling):
            recipe = output.recipe
            words_at = self.call.workspace("fused", _WORKSPACE_WORDS)
            scale_at = words_at + _SCALE_OFFSET
            rule = TensorScaleRule.of(recipe.dtype, recipe.eps, recipe.pow2_scale)
            yield from self._values({"amax": amax_at, "workspace": words_at, "found_scale": scale_at,
                                     "scale_value": 1.0, "rule": rule._asdict()}, only_amax=True)
            amax_at = 0
        yield from self._values({**self.destinations, "scale": scale_at, "scale_value": scale_value,
                                 "amax": amax_at})

    def _values(self, members: Members, only_amax: bool = False) -> Iterator[Launch]:
        """The launches that compute the values and store them as `members` say."""
        for path in (ROWS, PLAIN, ANY):
            if (launches := self._on_path(path, members, only_amax)) is not None:
                yield from launches
                return

    def _on_path(self, path: str, members: Members, only_amax: bool) -> list[Launch] | None:
        v, output = self.values, self.values.output
        columnwise = output is not None and output.columnwise and not only_amax
        if path != ANY and (not self.x.size or not self.wide or (output is not None and output.divides)
                            or (path == ROWS and columnwise)):
            return None
        written: Members = {} if only_amax else dict(v.outputs)
        program = v.scaling, v.x.dtype, v.dtype if output is None else output.recipe.dtype, v.backward, path
        norms = next((n for n in (self._norm(written), EVERY) if _has_program(*program, n) and not (
            n == _LAYER_ALONE and self._row_threads() > _LAYER_THREADS)), None)
        if norms is None:
            return None
        make = {ROWS: self._by_rows, PLAIN: self._by_tiles, ANY: self._by_patches}[path]
        return make((*program, norms), members, written, only_amax)

    def _norm(self, written: Members) -> str:
        """The call's norm if it has no more options, or EVERY."""
        v, layer = self.values, self.values.flags & LAYER
        if v.flags & ~LAYER or written.keys() - {"rstd_out", "summed"} or (layer and v.residual):
            return EVERY
        return _LAYER_ALONE if layer else RESIDUAL if v.residual else RMS

    def _by_rows(self, program: Any, members: Members, written: Members,
                 only_amax: bool) -> list[Launch] | None:
        v, backward, threads = self.values, self.values.backward, self._row_threads()
        all_rows = self._all_rows(members)
        if threads > _ROW_THREADS or all_rows >= _MANY_ROWS:
            return None
        arrays, layer = 1 + backward + (v.residual is not None), v.flags & LAYER
        of_thread = _ROW_CHUNKS[backward] * _ROWS_AT_ONCE[backward] * arrays * _CHUNK * v.x.dtype.itemsize
        floats = 4 * _CHUNK * _ROW_CHUNKS[backward]
        of_thread += floats * (1 + bool(layer and not backward))
        counters = 0 if only_amax else floats * sum(map(bool, v.sums))
        # Of gradients as many blocks share a multiprocessor as registers allow.
        most_shared = self.gpu.shared // (max(1, _ROW_THREADS // threads) if backward else 1)
        most_shared -= _STATIC_SHARED[ROWS]
        summed = self._rows_of_gradients((most_shared // threads - of_thread) // (counters or 1))
        shared = threads * (of_thread + counters * _levels(summed))
        if shared > most_shared:
            return None
        sums, after = self._sums(summed, only_amax)
        if backward:
            blocks, rows, step = cdiv(self.rows, summed), summed, 0
        else:
            at_once = min(_THREADS_AT_ONCE[program[-1]] // threads,
                          self.gpu.shared // (shared + _STATIC_SHARED[ROWS]), self.gpu.most_blocks)
            blocks, rows, step = self._deal(self.gpu.multiprocessors * max(1, at_once))
        written |= {"all_rows": all_rows, "rows_per_block": rows, "row_step": step}
        launch = _variant(*program, self.gpu.shared - _STATIC_SHARED[ROWS]).bind(
            self.x, grid_size(blocks, self.x.shape), shared=shared, block=threads,
            call={**self.source, **written, **sums}, **members)
        return [launch, *after]

    def _rows_of_gradients(self, most_levels: int) -> int:
        """Rows of gradients of a block. most_levels: of sums of columns that shared memory takes."""
        rows = _MOST_ROWS
        while rows > _ROWS_AT_ONCE[True] and (cdiv(self.rows, rows) < self.gpu.enough_blocks
                                              or _levels(rows) > most_levels):
            rows //= 2
        return rows

    def _deal(self, running: int) -> tuple[int, int, int]:
        """How rows of y are dealt: blocks, rows of a block, and how many blocks have these; the others have
        one, so that multiprocessors end together. running: blocks that run at a time."""
        if self.values.flags & LAYER:
            # A block loads weights and biases: as few blocks as run at a time.
            blocks = min(self.rows, running)
            return blocks, cdiv(self.rows, blocks), blocks
        rows = _ROWS_OF_Y[self.columns < _LONG]
        step = max(self.rows - cdiv(rows, 4) * running, 0) // rows
        return self.rows - step * (rows - 1), rows, step

    def _row_threads(self) -> int:
        """Threads of a block on path rows."""
        chunks = cdiv(self.columns // _CHUNK, _ROW_CHUNKS[self.values.backward])
        return cdiv(chunks, _WARP) * _WARP

    def _all_rows(self, members: Members) -> int:
        """Rows of x, and those whose scales are padding."""
        if "row_scales" not in members or not members["data"]:
            return self.rows
        scales = members["row_scales"]
        if self.values.scaling == F32_BLOCKS:
            return int(scales["rows"])
        return cdiv(self.rows, 128) * 128 if scales["line"] == 0 else self.rows

    def _by_tiles(self, program: Any, members: Members, written: Members,
                  only_amax: bool) -> list[Launch] | None:
        v = self.values
        staged = 2 if v.backward or v.residual else 1
        behind = {ONE_SCALE: TILE.shared, F32_BLOCKS: TILE.shared + fused.COLUMN_AMAXES,
                  MX_BLOCKS: fused.COLUMN_AMAXES}[v.scaling]
        if v.backward and v.residual:
            behind = max(behind, _TILE_BYTES)       # The output's memory has that of gradients before.
        shared = staged * _TILE_BYTES + behind
        blocks = TILE.grid(self.x.shape)
        most_shared = self.gpu.shared - _STATIC_SHARED[PLAIN]
        if (shared > most_shared or self.columns > _MOST_COLUMNS or blocks > self.gpu.most_tiles
                or only_amax):
            return None
        progress = self.call.workspace("norm", 2 + 2 * 4 * self.rows)
        parts, segments = cdiv(self.columns, TILE.columns), cdiv(self.columns, _CHUNK * _WARP)
        # As norm/ahead.cuh has it for sm_90 (kTwoTiles).
        two = program[-1] == RMS or (program[-1] == RESIDUAL and (v.backward or v.scaling == ONE_SCALE))
        lead = cdiv(int(_LEAD[1 + two] * self.gpu.multiprocessors), parts)
        written |= {"progress": progress, "lead": lead, "patience": _PATIENCE,
                    "parts": parts, "parts_inverse": (1 << 24) // parts + 1,
                    "segments": segments, "segments_inverse": (1 << 16) // segments + 1}
        sums, after = self._sums(TILE.rows, only_amax)
        assert v.output is not None
        launch = _variant(*program, most_shared).bind(
            self.x, blocks, shared=shared, tiles=1, call={**self.source, **written, **sums},
            **self._vector(members), **members)
        return [launch, *after]

    def _vector(self, members: Members) -> Members:
        """Whether every row of transposed data allows 16-byte stores."""
        output = self.values.output
        if output is None or not output.transposed:
            return {}
        return {"vector": int(self.rows % 16 == 0 and members.get("data_t", 0) % 16 == 0)}

    def _by_patches(self, program: Any, members: Members, written: Members, only_amax: bool) -> list[Launch]:
        output, statistics = self.values.output, self._statistics_at()
        rstd = written.pop("rstd_out", 0)
        written["statistics"] = statistics
        launches = [self._statistics(statistics, rstd)] if self.rows else []
        columnwise = members.get("data_t", 0) or members.get("column_data", 0)
        shared = TILE.shared if columnwise and output and output.transposed else fused.LEAST_SHARED
        grid = TILE.grid(self.x.shape)
        more = {"tiles": 1, **self._vector(members)} if output else {}
        launches.append(_variant(*program, TILE.shared).bind(self.x, grid, shared=shared, **more, **members,
                                                  call={**self.source, **written}))
        if self.values.sums[0] and not only_amax and self.x.size:
            sums, after = self._sums(_SUMMED_ROWS, only_amax)
            grid = grid_size(cdiv(self.rows, _SUMMED_ROWS) * cdiv(self.columns, 32), self.x.shape)
            launches.append(_helper(_COLUMN_SUMS, self.values.x.dtype, True).bind(
                self.x, grid, call={**self.source, "statistics": statistics, **sums}))
            launches += after
        return launches

    def _statistics_at(self) -> int:
        words = self.call.scratch("norm_statistics", 4 * self.rows)
        return address(words)

    def _statistics(self, at: int, rstd: int = 0) -> Launch:
        grid = min(self.rows, self.gpu.statistics_blocks)
        members = {**self.source, "statistics": at, "rstd_out": rstd}
        variant = _helper(_STATISTICS, self.values.x.dtype, self.values.backward)
        return variant.bind(self.x, grid, call=members)

    def _sums(self, rows: int, only_amax: bool) -> tuple[Members, list[Launch]]:
        """Members for the sums of grad * n and of grad over `rows` rows at a time, and the launches that add
        these up."""
        if only_amax or not self.values.sums[0]:
            return {}, []
        members: Members = {}
        after: list[Launch] = []
        for name, at in zip(("weight_sums", "bias_sums"), self.values.sums, strict=True):
            if at:
                shape = self.rows, self.columns
                sums = ColumnSums(shape, at, self.call.scratch(f"norm_{name}", partial_sums(shape, rows)))
                members[name] = sums.tiles_at(rows)
                after += sums.launches(self.x, rows, self.call.noop_at)
        return members, after


def launches(call: Call, values: Values, destinations: Members) -> Iterator[Launch]:
    """Yields the launches of a call. destinations: those of the output, or "dx"."""
    return _Launches(call, values, destinations).all()


def _levels(rows: int) -> int:
    """Levels that the sums of columns of a block of rows take (struct ColumnCounter)."""
    return max(0, (rows // 2).bit_length() - 1)
