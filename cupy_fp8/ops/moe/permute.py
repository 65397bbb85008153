"""Tokens to their experts' rows and back, and the gradients of both. Kernels: kernels_cu/moe/permute.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ... import backend, reference
from ...arrays import Array, address
from ...calls.call import Call, Input, Op, run
from ...calls.results import Description, Pair, Written, one_array, pair
from ...formats import BYTE_DTYPES, FORMATS, FP8_DTYPES, INPUT_DTYPES, float32, names
from ...kernels import Kernel, Launch, Variant, grid_size
from ...layouts import cdiv, round_up
from ...recipes import Form
from ...results import Quantized, Scaled, check_block_scales
from ...routing import Routing
from ..scales.convert import with_compact_scales

_PERMUTE = Kernel("moe/permute", "permute")
_UNPERMUTE = Kernel("moe/permute", "unpermute")
_BACKWARD = Kernel("moe/permute", "unpermute_backward")
_THREADS = 256
_BYTES = 8 << 10            # of tokens that a block of threads of permute takes, at most
_UNITS = 4                  # of a token that one of its threads has in flight
_CHUNKS = 2048              # of results that a block of unpermute takes, at most
_TOPKS = (1, 2, 4, 6, 8)    # routes of a token for which it has programs of their own
_MOST_ROUTES = 1024         # that it sorts
_MOST_TOKENS = 256
_BLOCKS = 528               # that few tokens are divided among: four for each of an H200's multiprocessors
_LANES = 32                 # rows that a block looks at for some to clear, at most
_FEW_UNUSED = 4             # that part of the rows used; more take blocks of their own


def permute(x: Array | Scaled | Quantized, routing: Routing, *, probs: Array | None = None, out: Any = None) -> Any:
    """Each token copied to the rows that the routing gives it; data, scales and probs in one launch.

        result[routing.row_map[t, k]] = x[t]          rows that no token is in are zeros

    Parameters
    ----------
    x : array [T, …] of any dtype of 1, 2, 4 or 8 bytes, FP8 included; or a row-wise Scaled [T, K] (or the Quantized that has it): blocks
        of 1×128, 1×32 (MX), … Scales that are not compact are made so by a launch of `convert_scales` before, into new memory
    routing : of T tokens, as `route` gives it
    probs : f32 array [T, topk], one for each slot; of a mask also [T, E]
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured

    Returns
    -------
    Array [rows, …] of x's dtype, or a Scaled [rows, K] with compact scales. With probs a tuple: that, and f32 [rows], the prob of each row.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. (What the device found wrong with the assignment, `route` has noted.)

    Source: TransformerEngine (moe_permute, moe_permute_and_pad_with_probs); docs/numerics.md section 8. Bytes moved: x and the result once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> r = fp8.route(np.array([[1], [0], [1]]), num_experts=2, align=2)
    >>> fp8.permute(np.array([10, 20, 30]), r).tolist()
    [20, 0, 10, 30, 0]
    """
    return run(_PERMUTE_OP, (_rowwise(x, "x"), routing, probs), out)


def unpermute(y: Array, routing: Routing, *, probs: Array | None = None, out: Array | None = None) -> Array:
    """The sum of each token's rows, weighted by probs: the inverse of `permute`, and with it an expert layer's last step.

        result[t] = sum over k of y[routing.row_map[t, k]] * probs[t, k]

    in f32, a product rounded and then added, in the order of the rows, the last one first; rounded once to y's dtype.

    Parameters
    ----------
    y : bfloat16, float16 or float32 array [rows, …]; rows that no token is in are not read
    routing : as `permute` had it
    probs : f32 array [T, topk], or of a mask [T, E]. None: the plain sum
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured

    Returns an array [T, …] of y's dtype; +0 for a token that is nowhere. Raises TypeError, ValueError, DeviceError, before anything is
    written.

    Source: TransformerEngine (moe_unpermute); docs/numerics.md section 8. One launch; bytes moved: a row for each route, and the result.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> r = fp8.route(np.array([[1, 0], [0, -1]]), num_experts=2)
    >>> y = fp8.permute(np.float32([[10], [20]]), r)
    >>> fp8.unpermute(y, r, probs=np.float32([[0.5, 0.25], [1, 1]])).tolist()
    [[7.5], [20.0]]
    """
    result: Array = run(_UNPERMUTE_OP, (y, routing, probs, None), out)
    return result


def permute_backward(grad: Array, routing: Routing, *, probs_grad: Array | None = None, out: Any = None) -> Any:
    """The gradient of `permute`: that of x, from the gradient of the permuted rows; and that of probs.

        x_grad[t] = sum over k of grad[routing.row_map[t, k]]       (as `unpermute` without probs)

    grad : bfloat16, float16 or float32 array [rows, …]
    probs_grad : f32 array [rows], the gradient of the permuted probs
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured
    Returns an array [T, …] of grad's dtype. With probs_grad a tuple: that, and f32 [T, topk], by slot, 0 where a slot is nowhere (of a
    mask `routing.experts` tells which expert a slot is).
    Raises TypeError, ValueError, DeviceError, before anything is written. One launch. Source as for `unpermute`.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> r = fp8.route(np.array([[1, 0], [0, -1]]), num_experts=2, rows=3)
    >>> fp8.permute_backward(np.float32([[1], [2], [4]]), r, probs_grad=np.float32([3, 5, 7]))
    (array([[5.],
           [2.]], dtype=float32), array([[7., 3.],
           [5., 0.]], dtype=float32))
    """
    return run(_PERMUTE_BACKWARD_OP, (grad, routing, None, probs_grad), out)


def unpermute_backward(grad: Array, y: Array | None, routing: Routing, *, probs: Array | None = None,
                       out: Any = None) -> tuple[Array, Array | None]:
    """The gradient of `unpermute`: that of y, and that of probs.

        grad_y[row_map[t, k]] = grad[t] * probs[t, k]      dprobs[t, k] = sum over the columns of grad[t] * y[row_map[t, k]]

    the products rounded once to y's dtype, rows that no token is in zeros; the sums in f32 by the fixed tree (docs/numerics.md rule 11).

    Parameters
    ----------
    grad : bfloat16, float16 or float32 array [T, …]
    y : array [rows, …] of grad's dtype, as `unpermute` had it. Without probs it is not looked at
    routing, probs : as `unpermute` had them. Without probs grad_y is `permute` of grad, byte for byte
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured

    Returns (grad_y [rows, …], dprobs): f32 of probs's shape, 0 where a slot is nowhere; None without probs.
    Raises TypeError, ValueError, DeviceError, before anything is written.

    Source: TransformerEngine (moe_unpermute's backward). One launch; bytes moved: grad once, y and grad_y a row for each route.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> r = fp8.route(np.array([[1, 0]]), num_experts=2)
    >>> fp8.unpermute_backward(np.float32([[2, 3]]), np.float32([[1, 1], [10, 1]]), r, probs=np.float32([[0.5, 4]]))
    (array([[ 8. , 12. ],
           [ 1. ,  1.5]], dtype=float32), array([[23.,  5.]], dtype=float32))
    """
    if probs is None:
        first, second = (None, None) if out is None else pair(out)
        if out is not None and (first is None or second is not None):
            wrong = "[0]: expected an array, got None" if first is None else "[1]: expected None, since no probs were given"
            raise TypeError(f"out{wrong}")
        moved = run(_MOVE_GRAD_OP, (_rowwise(grad, "grad"), routing, None), first)
        return (moved, None) if out is None else out
    result: tuple[Array, Array | None] = run(_UNPERMUTE_BACKWARD_OP, (grad, y, routing, probs), out)
    return result


# ---- arguments ----
#: What kernels read of a routing.
_ROUTING_PARTS = "row_map", "sources", "experts"


def _rowwise(x: Any, name: str) -> Any:
    """The part of a Quantized whose scales move with the rows; anything else as it is."""
    if isinstance(x, Quantized):
        if x.rowwise is None:
            raise ValueError(f"{name}: expected a row-wise part, whose scales move with their rows, "
                             "got a Quantized without one")
        return x.rowwise
    return x


def _check_rows(x: Array, name: str) -> None:
    if x.ndim == 0:
        raise ValueError(f"{name}: expected rows, an array of one or more dimensions, got shape ()")


def _check_length(a: Array, length: int, name: str, of: str) -> None:
    if len(a) != length:
        raise ValueError(f"{name}: expected {length} rows, the {of} of the routing, got shape {a.shape}")


def _check_moves(x: Scaled, data: Input, xp: Any, name: str) -> None:
    """TypeError or ValueError unless x has scales that move with its rows."""
    if x.block is None:
        raise ValueError(f"{name}: per-tensor data has a single scale, which does not move; "
                         f"permute {name}.data")
    if x.block[0] != 1 or x.transposed or len(x.shape) != 2:
        raise ValueError(f"{name}: expected row-wise blocks (1, B) of a matrix, whose scales move with their "
                         f"rows, got {x!r}")
    if data.dtype not in FP8_DTYPES:
        raise TypeError(f"{name}.data: expected one of {names(FP8_DTYPES)}, got {data.dtype}")
    if data.shape != x.shape:
        raise ValueError(f"{name}.data: expected the shape of {name}, {x.shape}, got {data.shape}")
    backend.require_module(x.scale_inv, xp, f"{name}.scale_inv")
    check_block_scales(x, name)


class _Probs(NamedTuple):
    """Probs of a call. columns: the experts of a mask by which they are found; 0: they are found by slot."""

    array: np.ndarray | None = None
    at: int = 0
    columns: int = 0


def _probs(call: Call, probs: Any, routing: Routing) -> _Probs:
    if probs is None:
        return _Probs()
    found = call.read("probs", probs, (float32,))
    by_slot, by_expert = (routing.tokens, routing.topk), (routing.tokens, routing.num_experts)
    if found.shape == by_slot:
        return _Probs(found.array, found.at)
    if routing.experts is None or found.shape != by_expert:
        also = "" if routing.experts is None else f", or {by_expert}, one for each expert"
        raise ValueError(f"probs: expected shape {by_slot}, one for each slot{also}; got {found.shape}")
    return _Probs(found.array, found.at, routing.num_experts)


# ---- permute ----
class _Moved(NamedTuple):
    x: Any                              # the array, or the Scaled with compact scales
    data: Input
    scales: Input | None
    routing: Routing
    probs: _Probs


class _ScaledRows(Description):
    """A row-wise Scaled with compact scales."""

    def __init__(self, form: Form) -> None:
        super().__init__(Written("out", form.stored, form.dtype),
                         Written("out.scale_inv", form.scale_shape, form.scale_dtype))
        self._form = form

    def build(self, arrays: Sequence[Array]) -> Scaled:
        return self._form.of(*arrays)

    def arrays_of(self, out: Any) -> Sequence[Array]:
        shape, block = self._form.shape, self._form.block
        if not isinstance(out, Scaled):
            raise TypeError(f"out: expected a Scaled (an earlier result), got {type(out).__name__}")
        if out.shape != shape or out.transposed or out.block != block or out.scale_layout != "compact":
            raise ValueError(f"out: expected shape {shape} in blocks {block} with compact scales, "
                             f"got {out!r}")
        return out.data, out.scale_inv


class _Permute(Op[_Moved]):
    """Moves tokens to rows. name: of the tokens, in messages."""

    def __init__(self, name: str) -> None:
        self._name = name

    def arguments(self, call: Call, x: Any, routing: Any, probs: Any) -> _Moved:
        name = self._name
        if isinstance(x, Scaled):
            data = _any_rows(call, f"{name}.data", x.data)
            _check_moves(x, data, call.xp, name)
            if x.scale_layout != "compact":
                call.read_strided(f"{name}.scale_inv", x.scale_inv)
                x = with_compact_scales(x, name)
                call.repeatable = False                 # a later call finds these scales elsewhere
            scales = call.read(f"{name}.scale_inv", x.scale_inv, (*BYTE_DTYPES[2:], float32))
            x = Scaled._of(data.array, scales.array, x.shape, False, x.block, "compact")
        else:
            data, scales = _any_rows(call, name, x), None
            x = data.array
        call.routing("routing", routing, *_ROUTING_PARTS)
        _check_length(data.array, routing.tokens, name, "tokens")
        return _Moved(x, data, scales, routing, _probs(call, probs, routing))

    def result(self, inputs: _Moved) -> Description:
        x, rows = inputs.x, inputs.routing.rows
        shape = rows, *inputs.data.shape[1:]
        if inputs.scales is None:
            moved = one_array(shape, inputs.data.dtype)
        else:
            moved = _ScaledRows(Form(inputs.data.dtype, shape, False, x.block, "compact", inputs.scales.dtype,
                                     (rows, inputs.scales.shape[1])))
        return moved if inputs.probs.array is None else Pair(moved, one_array((rows,), float32, "out[1]"))

    def reference(self, inputs: _Moved) -> Any:
        return reference.permute(inputs.x, inputs.routing, probs=inputs.probs.array)

    def launches(self, call: Call, inputs: _Moved, *written: int) -> Iterator[Launch]:
        _, data, scales, routing, probs = inputs
        data_at, *rest = written
        data_rows, scale_rows = _move(data, data_at, routing.tokens), _NOTHING
        if scales is not None:
            scales_at, *rest = rest
            if scales.shape[1]:
                scale_rows = _move(scales, scales_at, routing.tokens)
        grid, clearing = _grid(routing, data_rows["blocks"] + scale_rows["blocks"], data.shape)
        yield _permute_variant().bind(data.array, grid, data=data_rows, scales=scale_rows, probs=probs.at,
                                      rows_probs=rest[0] if rest else 0,
                                      routes=_routes(routing, probs.columns, clearing))


def _any_rows(call: Call, name: str, x: Any) -> Input:
    """Rows of any dtype that permute can copy."""
    if not isinstance(x, np.ndarray):
        backend.module_of(x, name)
    if x.dtype.hasobject or x.dtype.itemsize not in (1, 2, 4, 8):
        raise TypeError(f"{name}: expected a dtype of 1, 2, 4 or 8 bytes, got {x.dtype}")
    _check_rows(x, name)
    return call.read(name, x, (x.dtype,))


# ---- unpermute, and the gradient of permute ----
class _Summed(NamedTuple):
    y: Input
    routing: Routing
    probs: _Probs
    probs_grad: Input | None


class _Unpermute(Op[_Summed]):
    """Sums the rows of each token. With probs_grad its elements come too, in the order of the slots.
    name: of the rows, in messages."""

    def __init__(self, name: str) -> None:
        self._name = name

    def arguments(self, call: Call, y: Any, routing: Any, probs: Any, probs_grad: Any) -> _Summed:
        found = call.read(self._name, y, INPUT_DTYPES)
        _check_rows(found.array, self._name)
        call.routing("routing", routing, *_ROUTING_PARTS)
        _check_length(found.array, routing.rows, self._name, "rows")
        weights = _probs(call, probs, routing)
        gathered = None if probs_grad is None else call.read("probs_grad", probs_grad, (float32,))
        if gathered and gathered.shape != (routing.rows,):
            raise ValueError(f"probs_grad: expected shape ({routing.rows},), the routing's rows, "
                             f"got {gathered.shape}")
        return _Summed(found, routing, weights, gathered)

    def result(self, inputs: _Summed) -> Description:
        routing = inputs.routing
        sums = one_array((routing.tokens, *inputs.y.shape[1:]), inputs.y.dtype)
        if inputs.probs_grad is None:
            return sums
        return Pair(sums, one_array((routing.tokens, routing.topk), float32, "out[1]"))

    def reference(self, inputs: _Summed) -> Any:
        y, routing, probs, probs_grad = inputs
        if probs_grad is None:
            return reference.unpermute(y.array, routing, probs=probs.array)
        return reference.permute_backward(y.array, routing, probs_grad=probs_grad.array)

    def launches(self, call: Call, inputs: _Summed, *written: int) -> Iterator[Launch]:
        y, routing, probs, probs_grad = inputs
        count, size, to = prod(y.shape[1:]), y.dtype.itemsize, written[0]
        vector = (y.at | to | count * size) % 16 == 0
        plan = _unpermute_plan(routing.tokens, routing.topk, cdiv(count * size, 16))
        topk = routing.topk if vector and routing.topk in _TOPKS else 0
        gathering = {} if probs_grad is None else {"from_rows": probs_grad.at, "to_slots": written[1]}
        yield _unpermute_variant(y.dtype, topk).bind(
            y.array, plan.grid, y=y.at, out=to, probs=probs.at, routes=_routes(routing, probs.columns),
            columns=count, tokens_per_block=plan.tokens, across=plan.across, segment=plan.segment,
            vector=int(vector), **gathering)


# ---- the gradient of unpermute ----
class _Weighted(NamedTuple):
    grad: Input
    y: Input
    routing: Routing
    probs: _Probs


class _UnpermuteBackward(Op[_Weighted]):
    def arguments(self, call: Call, grad: Any, y: Any, routing: Any, probs: Any) -> _Weighted:
        if y is None:
            raise TypeError("y: needed for the gradient of probs, got None")
        g = call.read("grad", grad, INPUT_DTYPES)
        _check_rows(g.array, "grad")
        call.routing("routing", routing, *_ROUTING_PARTS)
        _check_length(g.array, routing.tokens, "grad", "tokens")
        backend.require_module(y, call.xp, "y")
        rows, shape = call.read("y", y, (g.dtype,)), (routing.rows, *g.shape[1:])
        if rows.shape != shape:
            raise ValueError(f"y: expected shape {shape} (the routing's rows, and the columns of grad), "
                             f"got {rows.shape}")
        return _Weighted(g, rows, routing, _probs(call, probs, routing))

    def result(self, inputs: _Weighted) -> Description:
        grad, y, _, probs = inputs
        assert probs.array is not None
        return Pair(one_array(y.shape, grad.dtype, "out[0]"), one_array(probs.array.shape, float32, "out[1]"))

    def reference(self, inputs: _Weighted) -> Any:
        grad, y, routing, probs = inputs
        return reference.unpermute_backward(grad.array, y.array, routing, probs=probs.array)

    def launches(self, call: Call, inputs: _Weighted, *written: int) -> Iterator[Launch]:
        grad, y, routing, probs = inputs
        grad_y, dprobs = written
        count, row_bytes = prod(grad.shape[1:]), prod(grad.shape[1:]) * grad.dtype.itemsize
        grid, clearing = _grid(routing, routing.tokens, grad.shape)
        yield _backward_variant(grad.dtype).bind(
            grad.array, grid, grad=grad.at, y=y.at, grad_y=grad_y, probs=probs.at, dprobs=dprobs,
            routes=_routes(routing, probs.columns, clearing), columns=count,
            vector=int((grad.at | y.at | grad_y | row_bytes) % 16 == 0), step=_step(grad_y | row_bytes))


_PERMUTE_OP, _MOVE_GRAD_OP = _Permute("x"), _Permute("grad")
_UNPERMUTE_OP, _PERMUTE_BACKWARD_OP = _Unpermute("y"), _Unpermute("grad")
_UNPERMUTE_BACKWARD_OP = _UnpermuteBackward()


# ---- launches ----
def _routes(routing: Routing, columns: int, clearing: int = 0) -> dict[str, int]:
    """The struct Routes. columns: of probs found by expert; clearing: the first of the blocks that clear rows, or 0."""
    experts = 0 if routing.experts is None else address(routing.experts)
    return {"row_map": address(routing.row_map), "sources": address(routing.sources), "experts": experts,
            "tokens": routing.tokens, "rows": routing.rows, "topk": routing.topk, "columns": columns,
            "clearing": clearing}


def _step(low_bits: int) -> int:
    """The largest power of two up to 16 bytes, but for 8, of which addresses and lengths are multiples."""
    return 16 if low_bits % 16 == 0 else 4 if low_bits % 4 == 0 else 2 if low_bits % 2 == 0 else 1


class _Plan(NamedTuple):
    """What follows from the shapes: members of the struct Rows or UnpermuteParams, and the number of blocks."""

    tokens: int
    across: int
    segment: int
    grid: int


def _across(tokens: int, length: int, most: int, least: int) -> int:
    """Blocks that share a row: none takes more than `most` of its length; where tokens are few about `least`, so that blocks are many."""
    return max(1, cdiv(length, most), min(cdiv(length, least), _BLOCKS // max(1, tokens)))


def _grid(routing: Routing, blocks: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """(blocks, the first of those that clear rows) of a launch in which `blocks` move tokens; 0: all clear some."""
    used = routing.tokens * routing.topk
    if routing.rows - used > used // _FEW_UNUSED:
        return grid_size(blocks + cdiv(routing.rows, _LANES), shape), blocks
    return grid_size(max(blocks, cdiv(routing.rows, _LANES)), shape), 0


#: The struct Rows where there are no scales.
_NOTHING = {"step": 1, "tokens_per_block": 1, "across": 1, "blocks": 0}


def _move(rows: Input, to: int, tokens: int) -> dict[str, int]:
    """The struct Rows."""
    row_bytes = prod(rows.shape[1:]) * rows.dtype.itemsize
    step = _step(rows.at | to | row_bytes)
    lanes_log2, plan = _permute_plan(tokens, row_bytes, step)
    return {"from": rows.at, "to": to, "row_bytes": row_bytes, "step": step, "lanes_log2": lanes_log2,
            "tokens_per_block": plan.tokens, "across": plan.across, "segment": plan.segment,
            "blocks": plan.grid}


@functools.lru_cache(maxsize=1024)
def _permute_plan(tokens: int, row_bytes: int, step: int) -> tuple[int, _Plan]:
    """(log2 of the threads that share a token, the plan)."""
    across = _across(tokens, row_bytes, _BYTES, 16 * _THREADS)
    segment = row_bytes if across == 1 else round_up(cdiv(row_bytes, across), 16)
    taken = max(1, min(_MOST_TOKENS, _BYTES // max(1, row_bytes), cdiv(tokens, _BLOCKS)))
    # Few pieces have a thread each, so that neighbouring threads store what is next to each other; no thread is without a token.
    pieces = segment // step
    lanes = min(_THREADS, max(pieces if pieces <= 64 else cdiv(pieces, _UNITS), cdiv(_THREADS, taken)))
    return (lanes - 1).bit_length(), _Plan(taken, across, segment, cdiv(tokens, taken) * across)


@functools.lru_cache(maxsize=1024)
def _unpermute_plan(tokens: int, topk: int, chunks: int) -> _Plan:
    """chunks: of 16 bytes, of a row."""
    across = _across(tokens, chunks, _CHUNKS, _THREADS)
    segment = cdiv(chunks, across)
    taken = max(1, min(_MOST_TOKENS, _CHUNKS // max(1, chunks), _MOST_ROUTES // max(1, topk), cdiv(tokens, _BLOCKS)))
    return _Plan(taken, across, segment, grid_size(cdiv(tokens, taken) * across, (tokens, chunks)))


@functools.cache
def _permute_variant() -> Variant:
    return _PERMUTE.variant(block=_THREADS)


@functools.cache
def _unpermute_variant(dtype: np.dtype[Any], topk: int) -> Variant:
    """topk: routes of a token, one of _TOPKS; 0: any number."""
    return _UNPERMUTE.variant(block=_THREADS, IN=FORMATS[dtype].tag, TOPK=topk)


@functools.cache
def _backward_variant(dtype: np.dtype[Any]) -> Variant:
    return _BACKWARD.variant(block=_THREADS, IN=FORMATS[dtype].tag)


def variants() -> Iterator[Variant]:
    """Every variant that these ops may launch."""
    yield _permute_variant()
    for dtype in INPUT_DTYPES:
        for topk in (0, *_TOPKS):
            yield _unpermute_variant(dtype, topk)
        yield _backward_variant(dtype)
