"""Launches of gated activations with quantisation. Kernels: kernels_cu/quantize/swiglu.cu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...calls import row_segments
from ...calls.call import Call, Input
from ...calls.group_sizes import Groups
from ...formats import bfloat16, float8_e4m3fn
from ...kernels import Launch, Variant
from ...layouts import cdiv
from ...reference.quantize.activations import GATED
from ...reference.quantize.swiglu import ALPHA
from . import fused
from .bias_gradient import ColumnSums, partial_sums
from .fused import ANY, EXPERTS, F32_BLOCKS, MX_BLOCKS, ONE_SCALE, OPTIONS, QUOTIENTS, ROWS, TILES, WIDE
from .quantized_result import QuantizedResult

#: flags of the struct SourceCall
_CLAMPED, _GPT_OSS, _INTERLEAVED = 1, 2, 4
#: For up to this many tiles, one per SM, the thread blocks that finish last add up the sums: at most
#: _MOST_SUMS per row (fused/tile_sums.cuh). A thread block then waits at its end until others see its sums;
#: with more tiles these consecutive waits take longer than another launch (docs/lab-notes). Thread blocks
#: have more than two tiles only if there are thousands.
_FEW_TILES, _MOST_SUMS = 128, 64


class Inputs(NamedTuple):
    """The validated arguments of a call.

    grad: the gradient of y; with it a call computes that of x. groups: the rows of experts that have their
    own biases. scale: (address, 0) or (0, value). limit: infinity without clamp. kind: one of GATED. options:
    those of the reference, by name."""

    x: Input
    grad: Input | None
    probs: Input | None
    bias: Input | None
    groups: Groups | None
    scale: tuple[int, float]
    amax_at: int
    limit: float
    kind: str
    gpt_oss: bool
    interleaved: bool
    output: fused.Output
    options: dict[str, Any]

    @property
    def half(self) -> int:
        return self.x.shape[1] // 2


def launches(call: Call, inputs: Inputs, result: QuantizedResult, written: Sequence[int],
             dprobs_at: int) -> Iterator[Launch]:
    """Yields the launches that write y or the gradient of x, and the gradient of probs if it has an address.
    result, written: the description of the quantised arrays and their addresses."""
    x, output, half, rows = inputs.x.array, inputs.output, inputs.half, len(inputs.x.array)
    destinations = output.destinations(result, written)
    members = _described(inputs, call.noop_at)
    if inputs.groups is not None and rows and len(inputs.groups.array):
        launch, members["experts"] = row_segments.find_groups_of_rows(call, inputs.groups, rows,
                                                                      fused.TILE.rows)
        yield launch
    sums = None
    if dprobs_at:
        # The partial sums of a tile of columns are a row: a sum down these rows is one over the columns of x.
        shape = (2 if inputs.interleaved else 1) * half, rows
        sums = ColumnSums(shape, dprobs_at, call.scratch("swiglu_dprobs", partial_sums(shape)))
        members["sums"] = sums.tiles_at(fused.TILE.columns)
        if _adds_up_sums(*shape):
            done = call.workspace("blocks of swiglu", cdiv(rows, fused.TILE.rows))
            members |= {"dprobs": dprobs_at, "done": done}
    if fused.is_wide(output, destinations, half, members["x"] | members["bias"] | members["grad"]):
        members["flags"] |= fused.WIDE_FLAG
    values = fused.Values(x, inputs.grad is not None, half, members, _paths(inputs, members), output,
                          inputs.amax_at, inputs.scale)
    yield from fused.launches(call, SOURCES[inputs.kind], values, destinations)
    if sums and "done" not in members:
        yield from sums.launches(x, fused.TILE.columns, call.noop_at)


def _adds_up_sums(columns: int, rows: int) -> bool:
    """Return whether the thread blocks that finish last add up the sums of tiles. columns: of all sums of a
    row."""
    across, down = cdiv(columns, fused.TILE.columns), cdiv(rows, fused.TILE.rows)
    return 1 < across <= _MOST_SUMS and across * down <= _FEW_TILES


def _described(inputs: Inputs, noop_at: int) -> fused.Members:
    """Return the struct SourceCall without the results of other launches and without the flag of wide
    accesses."""
    rows, columns = inputs.output.shape
    flags = _GPT_OSS * inputs.gpt_oss | _INTERLEAVED * inputs.interleaved
    flags |= _CLAMPED * bool(np.isfinite(inputs.limit))
    # an empty array may have any address
    bias_at = inputs.bias.at if inputs.bias and inputs.bias.array.size else 0
    return {"x": inputs.x.at, "grad": inputs.grad.at if inputs.grad else 0, "bias": bias_at,
            "probs": inputs.probs.at if inputs.probs else 0, "noop": noop_at, "rows": rows,
            "columns": columns, "limit": inputs.limit, "minus_limit": -inputs.limit,
            "alpha": float(ALPHA) if inputs.gpt_oss else 1.0, "flags": flags}


def _paths(inputs: Inputs, members: fused.Members) -> tuple[str, ...]:
    """Return the paths that serve a call, the fastest first."""
    output, half, backward = inputs.output, inputs.half, inputs.grad is not None
    straddled = backward and not inputs.interleaved and half % output.row_block != 0
    if not members["flags"] & fused.WIDE_FLAG or straddled:
        return (ANY,)
    if output.divides:
        return QUOTIENTS, ANY
    if members["flags"] == fused.WIDE_FLAG and inputs.bias is None and not (
            backward and half % fused.TILE.columns):
        both = output.columnwise or (output.scaling == ONE_SCALE and backward)
        return TILES if both else ROWS, WIDE, ANY
    return EXPERTS if members.get("experts") else OPTIONS, WIDE, ANY


def _has_path(program: fused.Program, source: np.dtype[Any], to: np.dtype[Any]) -> bool:
    """bf16 to e4m3 has all programs; other types use WIDE for those that they lack."""
    scaling, backward = program.scaling, program.backward
    to_e4m3 = to == float8_e4m3fn
    common, trained = source == bfloat16 and to_e4m3, source == bfloat16 and backward
    return bool({
        ANY: True,
        # with one scale, TILES computes rows of gradients too
        ROWS: not (scaling == ONE_SCALE and backward) and (
            common or trained or (to_e4m3 and not backward and scaling != MX_BLOCKS)),
        TILES: common or trained,
        OPTIONS: common,
        EXPERTS: common,
        WIDE: not common,
        QUOTIENTS: scaling == F32_BLOCKS and to_e4m3 and not backward}.get(program.path, False))


def _has_quick_path(program: fused.Program, source: np.dtype[Any], to: np.dtype[Any]) -> bool:
    """Kinds other than SwiGLU use path any for all but bf16 to e4m3 without options."""
    return program.path == ANY or (program.path in (ROWS, TILES) and to == float8_e4m3fn
                                   and _has_path(program, source, to) and source == bfloat16)


SOURCES = {kind: fused.Source("swiglu", 2, _has_path if kind == "swiglu" else _has_quick_path, activation)
           for kind, activation in GATED.items()}


def variants() -> Iterator[Variant]:
    """Yields every variant that SwiGLU may launch."""
    yield from row_segments.rows_variants()
    yield from SOURCES["swiglu"].variants()
