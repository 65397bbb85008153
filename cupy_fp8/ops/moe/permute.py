"""Tokens to their experts' rows and back, and the gradients of both. Kernels: kernels_cu/moe/permute.cu."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ... import backend, reference
from ...arrays import Array, bits, empty_beside
from ...calls import routing_launches, validate
from ...formats import BYTE_DTYPES, FORMATS, FP8_DTYPES, INPUT_DTYPES, float32
from ...kernels import Kernel, Variant, executor_of, grid_size
from ...layouts import cdiv, round_up
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

#: A run of memory: where, how long, what it is called.
_Memory = tuple[int, int, str]


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
    if isinstance(x, Quantized):
        if x.rowwise is None:
            raise ValueError("x: expected a row-wise part, whose scales move with their rows, got a Quantized without one")
        x = x.rowwise
    key = routing_launches.key(routing, out, permute, x, probs)
    if routing_launches.launch_again(routing, key):
        return out
    scaled = isinstance(x, Scaled)
    data, xp, at = _rows(x.data if isinstance(x, Scaled) else x, "x.data" if scaled else "x")
    given_scales = None
    if isinstance(x, Scaled):
        _check_moves(x, data, xp)
        if x.scale_layout != "compact":
            given_scales, key = x.scale_inv, None           # a later call finds the compact scales elsewhere
            x = with_compact_scales(x, "x")
    scale_inv, scales_at = _compact_scales(x, data, xp) if isinstance(x, Scaled) else (None, 0)
    _check_routing(routing, data, xp)
    _check_length(data, routing.tokens, "x", "tokens")
    read = [(at, data.nbytes, "x"), (scales_at, 0 if scale_inv is None else scale_inv.nbytes, "x.scale_inv"), *_read(routing)]
    if given_scales is not None:
        read.append((validate.address(given_scales), validate.extent(given_scales), "x.scale_inv"))
    columns, probs_at = 0, 0
    if probs is not None:
        probs, probs_at, columns = _probs(probs, routing, data, xp)
        read.append((probs_at, probs.nbytes, "probs"))
    rows = routing.rows
    shape = (rows, *data.shape[1:])
    if out is None:
        validate.may_allocate(data)
        result = empty_beside(data, shape, data.dtype)
        result_scales = None if scale_inv is None else empty_beside(data, (rows, scale_inv.shape[1]), scale_inv.dtype)
        rows_probs = None if probs is None else empty_beside(data, (rows,), float32)
        moved = Scaled._of(result, result_scales, shape, False, x.block, "compact") if isinstance(x, Scaled) else result
        out = moved if probs is None else (moved, rows_probs)
    else:
        moved, rows_probs = (out, None) if probs is None else _pair(out)
        result, result_scales = _parts_of(moved, x, shape) if isinstance(x, Scaled) else (moved, None)
        _check_written([
            ("out", result, shape, data.dtype),
            *([] if scale_inv is None else [("out.scale_inv", result_scales, (rows, scale_inv.shape[1]), scale_inv.dtype)]),
            *([] if probs is None else [("out[1]", rows_probs, (rows,), float32)])], data, xp, read)
    if executor_of(xp) == "reference":
        _store((result, result_scales, rows_probs), _flat(reference.permute(x, routing, probs=probs)))
        return out
    result_at = validate.address(result)
    moves = _move(at, result_at, prod(data.shape[1:]) * data.dtype.itemsize, routing.tokens)
    scales = _NOTHING
    if scale_inv is not None and scale_inv.shape[1]:
        scales = _move(scales_at, validate.address(result_scales), scale_inv.shape[1] * scale_inv.dtype.itemsize, routing.tokens)
    grid, clearing = _grid(routing, moves[-1] + scales[-1], data.shape)
    routing_launches.launch(routing, key, data, _permute_variant(), grid, (
        *moves, *scales, probs_at, 0 if rows_probs is None else validate.address(rows_probs), *_routes(routing, columns, clearing)))
    return out


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
    return _unpermute(y, "y", routing, probs, None, out)


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
    return _unpermute(grad, "grad", routing, None, probs_grad, out)


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
        pair = (None, None) if out is None else _pair(out)
        try:
            moved = permute(grad, routing, out=pair[0])
        except (TypeError, ValueError) as error:
            raise type(error)(re.sub(r"^x\b", "grad", str(error))) from None
        return (moved, None) if out is None else out
    key = routing_launches.key(routing, out, unpermute_backward, grad, y, probs)
    if routing_launches.launch_again(routing, key):
        return out
    if y is None:
        raise TypeError("y: needed for the gradient of probs, got None")
    g, xp, at = validate.source(grad, INPUT_DTYPES, "grad")
    _check_rows(g, "grad")
    _check_routing(routing, g, xp)
    _check_length(g, routing.tokens, "grad", "tokens")
    backend.require_module(y, xp, "y")
    y, _, y_at = validate.source(y, (g.dtype,), "y")
    shape = (routing.rows, *g.shape[1:])
    if y.shape != shape:
        raise ValueError(f"y: expected shape {shape} (the routing's rows, and the columns of grad), got {y.shape}")
    if xp is not np:
        validate.same_device(y, g, "y")
    probs, probs_at, columns = _probs(probs, routing, g, xp)
    if out is None:
        validate.may_allocate(g)
        out = empty_beside(g, shape, g.dtype), empty_beside(g, probs.shape, float32)
        grad_y, dprobs = out
    else:
        grad_y, dprobs = _pair(out)
        _check_written([("out[0]", grad_y, shape, g.dtype), ("out[1]", dprobs, probs.shape, float32)], g, xp, [
            (at, g.nbytes, "grad"), (y_at, y.nbytes, "y"), (probs_at, probs.nbytes, "probs"), *_read(routing)])
    if executor_of(xp) == "reference":
        _store((grad_y, dprobs), reference.unpermute_backward(g, y, routing, probs=probs))
        return out
    count, to = prod(g.shape[1:]), validate.address(grad_y)
    low_bits = at | y_at | to | count * g.dtype.itemsize
    grid, clearing = _grid(routing, routing.tokens, g.shape)
    routing_launches.launch(routing, key, g, _backward_variant(g.dtype), grid, (
        at, y_at, to, probs_at, validate.address(dprobs), *_routes(routing, columns, clearing), count, int(low_bits % 16 == 0),
        _step(to | count * g.dtype.itemsize)))
    return out


def _unpermute(y: Array, name: str, routing: Routing, probs: Array | None, probs_grad: Array | None, out: Any) -> Any:
    """unpermute; with probs_grad also its elements in the order of the slots."""
    key = routing_launches.key(routing, out, name, y, probs, probs_grad)
    if routing_launches.launch_again(routing, key):
        return out
    a, xp, at = validate.source(y, INPUT_DTYPES, name)
    _check_rows(a, name)
    _check_routing(routing, a, xp)
    _check_length(a, routing.rows, name, "rows")
    read = [(at, a.nbytes, name), *_read(routing)]
    columns, probs_at, gathered_at = 0, 0, 0
    if probs is not None:
        probs, probs_at, columns = _probs(probs, routing, a, xp)
        read.append((probs_at, probs.nbytes, "probs"))
    if probs_grad is not None:
        probs_grad, gathered_at = _f32(probs_grad, a, xp, "probs_grad")
        if probs_grad.shape != (routing.rows,):
            raise ValueError(f"probs_grad: expected shape ({routing.rows},), the routing's rows, got {probs_grad.shape}")
        read.append((gathered_at, probs_grad.nbytes, "probs_grad"))
    shape, slots_shape = (routing.tokens, *a.shape[1:]), (routing.tokens, routing.topk)
    if out is None:
        validate.may_allocate(a)
        result = out = empty_beside(a, shape, a.dtype)
        slots = None if probs_grad is None else empty_beside(a, slots_shape, float32)
        if probs_grad is not None:
            out = result, slots
    else:
        result, slots = (out, None) if probs_grad is None else _pair(out)
        _check_written([("out", result, shape, a.dtype), *([] if slots is None else [("out[1]", slots, slots_shape, float32)])],
                       a, xp, read)
    if executor_of(xp) == "reference":
        made = reference.unpermute(a, routing, probs=probs) if probs_grad is None else reference.permute_backward(
            a, routing, probs_grad=probs_grad)
        _store((result, slots), _flat(made))
        return out
    count, to = prod(a.shape[1:]), validate.address(result)
    vector = (at | to | count * a.dtype.itemsize) % 16 == 0
    plan = _unpermute_plan(routing.tokens, routing.topk, cdiv(count * a.dtype.itemsize, 16))
    topk = routing.topk if vector and routing.topk in _TOPKS else 0
    routing_launches.launch(routing, key, a, _unpermute_variant(a.dtype, topk), plan.grid, (
        at, to, probs_at, gathered_at, 0 if slots is None else validate.address(slots), *_routes(routing, columns), count,
        plan.tokens, plan.across, plan.segment, int(vector)))
    return out


# ---- validation ----
def _rows(x: Any, name: str) -> tuple[Array, Any, int]:
    """(x ready for a kernel, its module, its address)."""
    if not isinstance(x, np.ndarray):
        backend.module_of(x, name)
    if x.dtype.hasobject or x.dtype.itemsize not in (1, 2, 4, 8):
        raise TypeError(f"{name}: expected a dtype of 1, 2, 4 or 8 bytes, got {x.dtype}")
    _check_rows(x, name)
    return validate.source(x, (x.dtype,), name)


def _check_rows(x: Array, name: str) -> None:
    if x.ndim == 0:
        raise ValueError(f"{name}: expected rows, an array of one or more dimensions, got shape ()")


def _check_moves(x: Scaled, data: Array, xp: Any) -> None:
    """TypeError or ValueError unless x has scales that move with its rows."""
    if x.block is None:
        raise ValueError("x: per-tensor data has a single scale, which does not move; permute x.data")
    if x.block[0] != 1 or x.transposed or len(x.shape) != 2:
        raise ValueError(f"x: expected row-wise blocks (1, B) of a matrix, whose scales move with their rows, got {x!r}")
    if data.dtype not in FP8_DTYPES:
        raise TypeError(f"x.data: expected one of {', '.join(d.name for d in FP8_DTYPES)}, got {data.dtype}")
    if data.shape != x.shape:
        raise ValueError(f"x.data: expected the shape of x, {x.shape}, got {data.shape}")
    backend.require_module(x.scale_inv, xp, "x.scale_inv")
    check_block_scales(x, "x")


def _compact_scales(x: Scaled, data: Array, xp: Any) -> tuple[Array, int]:
    """(x's compact scales ready for a kernel, their address): a row of them for each row of data."""
    scale_inv, _, at = validate.source(x.scale_inv, (*BYTE_DTYPES[2:], float32), "x.scale_inv")
    if xp is not np:
        validate.same_device(scale_inv, data, "x.scale_inv")
    return scale_inv, at


def _check_routing(routing: Any, a: Array, xp: Any) -> None:
    if not isinstance(routing, Routing):
        raise TypeError(f"routing: expected a Routing (cupy_fp8.route makes one), got {type(routing).__name__}")
    backend.require_module(routing.row_map, xp, "routing")
    if xp is not np:
        validate.same_device(routing.row_map, a, "routing")


def _check_length(a: Array, length: int, name: str, of: str) -> None:
    if len(a) != length:
        raise ValueError(f"{name}: expected {length} rows, the {of} of the routing, got shape {a.shape}")


def _f32(a: Any, x: Array, xp: Any, name: str) -> tuple[Array, int]:
    """(a ready for a kernel, its address): an f32 array of x's kind and device."""
    if not isinstance(a, xp.ndarray):
        backend.require_module(a, xp, name)
    a, _, at = validate.source(a, (float32,), name)
    if xp is not np:
        validate.same_device(a, x, name)
    return a, at


def _probs(probs: Any, routing: Routing, x: Array, xp: Any) -> tuple[Array, int, int]:
    """(probs ready for a kernel, their address, the experts of a mask by which they are found; 0: by slot)."""
    probs, at = _f32(probs, x, xp, "probs")
    if probs.shape == (routing.tokens, routing.topk):
        return probs, at, 0
    by_expert = routing.tokens, routing.num_experts
    if routing.experts is None or probs.shape != by_expert:
        also = "" if routing.experts is None else f", or {by_expert}, one for each expert"
        raise ValueError(f"probs: expected shape {(routing.tokens, routing.topk)}, one for each slot{also}; got {probs.shape}")
    return probs, at, routing.num_experts


def _pair(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"out: expected a tuple of two (an earlier result), got {type(out).__name__}")
    return out


def _parts_of(out: Any, x: Scaled, shape: tuple[int, ...]) -> tuple[Array, Array]:
    if not isinstance(out, Scaled):
        raise TypeError(f"out: expected a Scaled (an earlier result), got {type(out).__name__}")
    if out.shape != shape or out.transposed or out.block != x.block or out.scale_layout != "compact":
        raise ValueError(f"out: expected shape {shape} in blocks {x.block} with compact scales, got {out!r}")
    return out.data, out.scale_inv


def _check_written(parts: Iterable[tuple[str, Any, tuple[int, ...], np.dtype[Any]]], x: Array, xp: Any, read: list[_Memory]) -> None:
    """(name, array, shape, dtype) of what will be written: arrays that fit, overlapping neither each other nor what is read."""
    taken = list(read)
    for name, a, shape, dtype in parts:
        at = validate.writable(a, shape, dtype, x, xp, name)
        for other_at, nbytes, other in taken:
            validate.separate(at, a.nbytes, other_at, nbytes, name, other)
        taken.append((at, a.nbytes, name))


def _read(routing: Routing) -> list[_Memory]:
    """What kernels read of a routing; kept with it."""
    found: list[_Memory] | None = routing.__dict__.get("_read")
    if found is None:
        parts = {"row_map": routing.row_map, "sources": routing.sources, "experts": routing.experts}
        found = [(validate.address(a), a.nbytes, f"routing.{name}") for name, a in parts.items() if a is not None]
        routing.__dict__["_read"] = found
    return found


def _flat(result: Any) -> tuple[Any, ...]:
    """Arrays, and None, in the order of `_store`: data, scales, probs."""
    moved, other = result if isinstance(result, tuple) else (result, None)
    return (*moved, other) if isinstance(moved, Scaled) else (moved, None, other)


def _store(targets: tuple[Any, ...], results: tuple[Any, ...]) -> None:
    for target, result in zip((a for a in targets if a is not None), (a for a in results if a is not None), strict=True):
        bits(target)[...] = bits(result)


# ---- launches ----
def _routes(routing: Routing, columns: int, clearing: int = 0) -> tuple[int, ...]:
    """The struct Routes. columns: of probs found by expert; clearing: the first of the blocks that clear rows, or 0."""
    row_map, sources, *experts = _read(routing)
    return (row_map[0], sources[0], experts[0][0] if experts else 0, routing.tokens, routing.rows, routing.topk, columns,
            clearing)


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


_NOTHING: tuple[int, ...] = (0, 0, 0, 1, 0, 1, 1, 0, 0)


def _move(at: int, to: int, row_bytes: int, tokens: int) -> tuple[int, ...]:
    """The struct Rows."""
    step = _step(at | to | row_bytes)
    return at, to, row_bytes, step, *_permute_plan(tokens, row_bytes, step)


@functools.lru_cache(maxsize=1024)
def _permute_plan(tokens: int, row_bytes: int, step: int) -> tuple[int, ...]:
    """(log2 of the threads that share a token, and the members of a _Plan)."""
    across = _across(tokens, row_bytes, _BYTES, 16 * _THREADS)
    segment = row_bytes if across == 1 else round_up(cdiv(row_bytes, across), 16)
    taken = max(1, min(_MOST_TOKENS, _BYTES // max(1, row_bytes), cdiv(tokens, _BLOCKS)))
    # Few pieces have a thread each, so that neighbouring threads store what is next to each other; no thread is without a token.
    pieces = segment // step
    lanes = min(_THREADS, max(pieces if pieces <= 64 else cdiv(pieces, _UNITS), cdiv(_THREADS, taken)))
    return (lanes - 1).bit_length(), *_Plan(taken, across, segment, cdiv(tokens, taken) * across)


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
