"""Moves tokens to their experts' rows and back, and computes the gradients of both. Kernels:
kernels_cu/moe/permute.cu, unpermute.cu and unpermute_backward.cu."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, overload

from ... import backend, reference
from ...advice import dtype_instead
from ...arrays import Array, check_dimensions
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, Pair, one_array, pair
from ...formats import INPUT_DTYPES, choice, float8_e8m0fnu, float32
from ...kernels import Launch
from ...layouts import cdiv
from ...results import Quantized, Scaled
from ...routing import Routing
from ...typed_array import TypedArray
from . import permute_launches as launching
from .permute_launches import Probs, TokenScales
from .permute_launches import variants as variants
from .rows import MovedRows, read_rows, rowwise

RowScaleLayout: TypeAlias = Literal["gemm_ready", "compact"]
_LAYOUTS: tuple[RowScaleLayout, ...] = get_args(RowScaleLayout)


@overload
def permute(x: Scaled | Quantized, routing: Routing, *, probs: None = None,
            scale_layout: RowScaleLayout | None = None, out: Scaled | None = None) -> Scaled: ...
@overload
def permute(x: Scaled | Quantized, routing: Routing, *, probs: Array,
            scale_layout: RowScaleLayout | None = None,
            out: tuple[Scaled, Array] | None = None) -> tuple[Scaled, TypedArray]: ...
@overload
def permute(x: Array, routing: Routing, *, probs: None = None, scale_layout: None = None,
            out: Array | None = None) -> TypedArray: ...
@overload
def permute(x: Array, routing: Routing, *, probs: Array, scale_layout: None = None,
            out: tuple[Array, Array] | None = None) -> tuple[TypedArray, TypedArray]: ...
def permute(x: Array | Scaled | Quantized, routing: Routing, *, probs: Array | None = None,
            scale_layout: RowScaleLayout | None = None, out: Any = None
            ) -> TypedArray | Scaled | tuple[TypedArray | Scaled, TypedArray]:
    """Copy each token to the rows that the routing gives it: data, scales and probs in one launch.

        result[routing.row_map[t, k]] = x[t]          rows that no token is in are zeros

    Parameters
    ----------
    x : array [T, …] of any dtype of 1, 2, 4 or 8 bytes, FP8 included; or a row-wise Scaled [T, K] (or the
        Quantized that has it): blocks of 1×128, 1×32 (MX), … A result with gemm_ready scales is made from
        compact, gemm_ready and deepgemm_sm90 ones. Other scales that are not compact are made so by a launch
        of `convert_scales` before, into new memory
    routing : of T tokens, as `route` gives it
    probs : f32 array [T, topk], one for each slot; of a mask also [T, E]
    scale_layout : of the result's scales. 'gemm_ready' (f32 alone, [blocks, rows rounded up to 4], padding 0)
        is what `grouped_matmul_nt` reads fastest and `scaling_aware_transpose` reads as it is; 'compact' has
        a row of scales for each row, as `pad_groups` and its relatives take them. None: 'gemm_ready' for f32
        scales, 'compact' for E8M0 ones
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured

    Returns
    -------
    Array [rows, …] of x's dtype, or a Scaled [rows, K] whose scales are x's, byte for byte, and 0 in rows
    that no token is in. With probs a tuple: that, and f32 [rows], the prob of each row.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. (`route` has noted what was wrong with an
    assignment on the device.)

    Source: TransformerEngine (moe_permute_and_pad_with_probs); docs/numerics.md section 8. Bytes moved: both.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> r = fp8.route(np.array([[1], [0], [1]]), num_experts=2, align=2)
    >>> fp8.permute(np.array([10, 20, 30]), r).tolist()
    [20, 0, 10, 30]
    >>> q = fp8.quantize_block(np.float32([[448], [896], [1792]]))
    >>> fp8.permute(q, r).scale_inv.tolist()
    [[2.0, 0.0, 1.0, 4.0]]
    """
    return run(_PERMUTE, (rowwise(x, "x"), routing, probs, scale_layout), out)


def unpermute(y: Array, routing: Routing, *, probs: Array | None = None,
              out: Array | None = None) -> TypedArray:
    """Sum each token's rows, weighted by probs: the inverse of `permute`, and the last step of an expert
    layer.

        result[t] = sum over k of y[routing.row_map[t, k]] * probs[t, k]

    in f32: each product is rounded and then added, from the last row to the first, and the sum is rounded
    once to y's dtype.

    Parameters
    ----------
    y : bfloat16, float16 or float32 array [rows, …]; rows that no token is in are not read
    routing : as `permute` had it
    probs : f32 array [T, topk], or of a mask [T, E]. None: the plain sum
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured

    Returns an array [T, …] of y's dtype; +0 for a token that is nowhere. Raises TypeError, ValueError,
    DeviceError, before anything is written.

    Source: TransformerEngine (moe_unpermute); docs/numerics.md section 8. One launch; bytes moved: a row for
    each route, and the result.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> r = fp8.route(np.array([[1, 0], [0, -1]]), num_experts=2)
    >>> y = fp8.permute(np.float32([[10], [20]]), r)
    >>> fp8.unpermute(y, r, probs=np.float32([[0.5, 0.25], [1, 1]])).tolist()
    [[7.5], [20.0]]
    """
    result: Array = run(_UNPERMUTE, (y, routing, probs, None), out)
    return result


@overload
def permute_backward(grad: Array, routing: Routing, *, probs_grad: None = None,
                     out: Array | None = None) -> TypedArray: ...
@overload
def permute_backward(grad: Array, routing: Routing, *, probs_grad: Array,
                     out: tuple[Array, Array] | None = None) -> tuple[TypedArray, TypedArray]: ...
def permute_backward(grad: Array, routing: Routing, *, probs_grad: Array | None = None,
                     out: Any = None) -> TypedArray | tuple[TypedArray, TypedArray]:
    """The gradients of `permute`'s x and probs, from those of the permuted rows and probs.

        x_grad[t] = sum over k of grad[routing.row_map[t, k]]       (as `unpermute` without probs)

    grad : bfloat16, float16 or float32 array [rows, …]
    probs_grad : f32 array [rows], the gradient of the permuted probs
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured
    Returns an array [T, …] of grad's dtype. With probs_grad a tuple: that, and f32 [T, topk], by slot, 0
    where a slot is nowhere (of a mask `routing.experts` tells which expert a slot is). Raises TypeError,
    ValueError, DeviceError, before anything is written. One launch. Source as for `unpermute`.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> r = fp8.route(np.array([[1, 0], [0, -1]]), num_experts=2, rows=3)
    >>> fp8.permute_backward(np.float32([[1], [2], [4]]), r, probs_grad=np.float32([3, 5, 7]))
    (array([[5.],
           [2.]], dtype=float32), array([[7., 3.],
           [5., 0.]], dtype=float32))
    """
    return run(_PERMUTE_BACKWARD, (grad, routing, None, probs_grad), out)


def unpermute_backward(grad: Array, y: Array | None, routing: Routing, *, probs: Array | None = None,
                       out: tuple[Array, Array | None] | None = None
                       ) -> tuple[TypedArray, TypedArray | None]:
    """The gradients of `unpermute`'s y and probs.

        grad_y[row_map[t, k]] = grad[t] * probs[t, k]
        dprobs[t, k] = sum over the columns of grad[t] * y[row_map[t, k]]

    The products are rounded once to y's dtype, and rows without a token are zeros. The sums are in f32, by
    the fixed tree (docs/numerics.md rule 11).

    Parameters
    ----------
    grad : array [T, …] of y's dtype
    y : bfloat16, float16 or float32 array [rows, …], as `unpermute` had it. Without probs it is not read
    routing, probs : as `unpermute` had them. Without probs grad_y is `permute` of grad, byte for byte
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured

    Returns (grad_y [rows, …], dprobs): f32 of probs's shape, 0 where a slot is nowhere; None without probs.
    Raises TypeError, ValueError, DeviceError, before anything is written.

    Source: TransformerEngine (moe_unpermute's backward). One launch; bytes moved: grad once, y and grad_y a
    row for each route.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> r = fp8.route(np.array([[1, 0]]), num_experts=2)
    >>> y = np.float32([[1, 1], [10, 1]])
    >>> fp8.unpermute_backward(np.float32([[2, 3]]), y, r, probs=np.float32([[0.5, 4]]))
    (array([[ 8. , 12. ],
           [ 1. ,  1.5]], dtype=float32), array([[23.,  5.]], dtype=float32))
    """
    if probs is None:
        first, second = (None, None) if out is None else pair(out)
        if out is not None and (first is None or second is not None):
            raise TypeError("out[0]: expected an array, got None" if first is None
                            else "out[1]: expected None, since no probs were given")
        moved = run(_MOVE_GRAD, (rowwise(grad, "grad"), routing, None, None), first)
        return (moved, None) if out is None else out
    result: tuple[Array, Array | None] = run(_UNPERMUTE_BACKWARD, (grad, y, routing, probs), out)
    return result


# ---- arguments ----
def _check_scales_move(x: Scaled, name: str) -> None:
    """Raise ValueError for one scale, and for rows that are matrices: `pad_groups` takes these too."""
    if x.block is None:
        raise ValueError(f"{name}: per-tensor data has a single scale, which does not move; permute "
                         f"{name}.data")
    if len(x.shape) != 2:
        raise ValueError(f"{name}: expected a matrix, whose scales move with its rows, got {x!r}")


def _result_layout(x: Any, name: str, scale_layout: Any) -> str:
    """Return the layout of permuted scales; 'compact' without scales."""
    if scale_layout is not None:
        choice(scale_layout, "scale_layout", _LAYOUTS)
        if not isinstance(x, Scaled):
            raise ValueError(f"scale_layout: expected None, since {name} is an array without scales; got "
                             f"{scale_layout!r}")
    if not isinstance(x, Scaled):
        return "compact"
    held = getattr(x.scale_inv, "dtype", None)
    if scale_layout == "gemm_ready" and (held == float8_e8m0fnu or x.scale_layout == "deepgemm_sm100"):
        raise ValueError(f"scale_layout: gemm_ready scales are float32, got {held} in {name}.scale_inv; take "
                         f"'compact', or {name}.to_layout('gemm_ready') first")
    return scale_layout or ("gemm_ready" if held == float32 else "compact")


def read_routing(call: Call, routing: Any) -> None:
    call.routing("routing", routing, "row_map", "sources", "experts")       # the arrays that kernels read


def check_length(a: Array, length: int, name: str, of: str) -> None:
    if len(a) != length:
        raise ValueError(f"{name}: expected {length} rows, the {of} of the routing, got shape {a.shape}")


def read_probs(call: Call, probs: Any, routing: Routing) -> Probs:
    if probs is None:
        return Probs()
    given = call.read("probs", probs, (float32,))
    by_slot, by_expert = (routing.tokens, routing.topk), (routing.tokens, routing.num_experts)
    if given.shape == by_slot:
        return Probs(given.array, given.at)
    if routing.experts is None or given.shape != by_expert:
        also = "" if routing.experts is None else f", or {by_expert}, one for each expert"
        raise ValueError(f"probs: expected shape {by_slot}, one for each slot{also}; got {given.shape}")
    return Probs(given.array, given.at, routing.num_experts)


# ---- permute ----
class _PermuteInputs(NamedTuple):
    rows: MovedRows
    routing: Routing
    probs: Probs


class _PermuteOp(Op[_PermuteInputs]):
    """Moves tokens to rows. name: of the tokens, in messages."""

    def __init__(self, name: str) -> None:
        self._name = name

    def arguments(self, call: Call, x: Any, routing: Any, probs: Any, scale_layout: Any) -> _PermuteInputs:
        name = self._name
        if isinstance(x, Scaled):
            _check_scales_move(x, name)
        rows = read_rows(call, name, x, _result_layout(x, name, scale_layout))
        read_routing(call, routing)
        check_length(rows.data.array, routing.tokens, name, "tokens")
        return _PermuteInputs(rows, routing, read_probs(call, probs, routing))

    def result(self, inputs: _PermuteInputs) -> Description:
        number = inputs.routing.rows
        moved = inputs.rows.moved(number)
        return moved if inputs.probs.array is None else Pair(moved, one_array((number,), float32, "out[1]"))

    def reference(self, inputs: _PermuteInputs) -> Any:
        return reference.permute(inputs.rows.given, inputs.routing, probs=inputs.probs.array,
                                 scale_layout=inputs.rows.layout if inputs.rows.scales else None)

    def launches(self, call: Call, inputs: _PermuteInputs, *written: int) -> Iterator[Launch]:
        (given, data, scales, _, layout), routing, probs = inputs
        data_at, *rest = written
        data_rows, scale_rows = launching.rows(data, data_at, routing.tokens), launching.NO_ROWS
        gemm_ready: dict[str, int] = {}
        scale_blocks = 0
        if scales is not None:
            scales_at, *rest = rest
            if layout == "gemm_ready":
                gemm_ready, scale_blocks = launching.gemm_ready(TokenScales.of(scales, given.scale_layout),
                                                                scales_at, routing.rows)
            elif scales.shape[1]:
                scale_rows = launching.rows(scales, scales_at, routing.tokens)
                scale_blocks = scale_rows["blocks"]
        data_blocks = data_rows["blocks"]
        grid, clearing = launching.grid(routing, data_blocks + scale_blocks, data.shape)
        yield launching.PERMUTE.variant().bind(
            data.array, grid, data=data_rows, scales=scale_rows, gemm_ready=gemm_ready,
            **launching.spread(data_blocks, scale_blocks), probs=probs.at,
            rows_probs=rest[0] if rest else 0, routes=launching.routes(routing, probs.columns, clearing))


# ---- unpermute, and the gradient of permute ----
class _UnpermuteInputs(NamedTuple):
    y: Input
    routing: Routing
    probs: Probs
    probs_grad: Input | None


class _UnpermuteOp(Op[_UnpermuteInputs]):
    """Sums the rows of each token, and gathers the elements of probs_grad by slot. name: of the rows, in
    messages."""

    def __init__(self, name: str) -> None:
        self._name = name

    def arguments(self, call: Call, y: Any, routing: Any, probs: Any, probs_grad: Any) -> _UnpermuteInputs:
        rows = call.read(self._name, y, INPUT_DTYPES)
        check_dimensions(rows.shape, self._name, 1)
        read_routing(call, routing)
        check_length(rows.array, routing.rows, self._name, "rows")
        weights = read_probs(call, probs, routing)
        gathered = None if probs_grad is None else call.read("probs_grad", probs_grad, (float32,),
                                                             (routing.rows,), "the routing's rows")
        return _UnpermuteInputs(rows, routing, weights, gathered)

    def result(self, inputs: _UnpermuteInputs) -> Description:
        routing = inputs.routing
        sums = one_array((routing.tokens, *inputs.y.shape[1:]), inputs.y.dtype)
        if inputs.probs_grad is None:
            return sums
        return Pair(sums, one_array((routing.tokens, routing.topk), float32, "out[1]"))

    def reference(self, inputs: _UnpermuteInputs) -> Any:
        y, routing, probs, probs_grad = inputs
        if probs_grad is None:
            return reference.unpermute(y.array, routing, probs=probs.array)
        return reference.permute_backward(y.array, routing, probs_grad=probs_grad.array)

    def launches(self, call: Call, inputs: _UnpermuteInputs, *written: int) -> Iterator[Launch]:
        y, routing, probs, probs_grad = inputs
        count, size, to = prod(y.shape[1:]), y.dtype.itemsize, written[0]
        vector = (y.at | to | count * size) % 16 == 0
        topk = routing.topk if vector and routing.topk in launching.TOPKS else 0
        split = launching.unpermute_split(routing.tokens, routing.topk, cdiv(count * size, 16), topk > 0)
        gathering = {} if probs_grad is None else {"from_rows": probs_grad.at, "to_slots": written[1]}
        yield launching.UNPERMUTE.variant(IN=y.dtype, TOPK=topk).bind(
            y.array, split.blocks, y=y.at, out=to, probs=probs.at,
            routes=launching.routes(routing, probs.columns), columns=count, **split.members(),
            vector=int(vector), **gathering)


# ---- the gradient of unpermute ----
class _UnpermuteBackwardInputs(NamedTuple):
    grad: Input
    y: Input
    routing: Routing
    probs: Probs


class _UnpermuteBackwardOp(Op[_UnpermuteBackwardInputs]):
    """Computes the gradients of the rows and of probs."""

    def arguments(self, call: Call, grad: Any, y: Any, routing: Any, probs: Any) -> _UnpermuteBackwardInputs:
        if y is None:
            raise TypeError("y: needed for the gradient of probs, got None")
        g = call.read("grad", grad, INPUT_DTYPES)
        check_dimensions(g.shape, "grad", 1)
        read_routing(call, routing)
        check_length(g.array, routing.tokens, "grad", "tokens")
        backend.require_module(y, call.xp, "y")
        rows = call.read("y", y, INPUT_DTYPES, (routing.rows, *g.shape[1:]),
                         "the routing's rows, and the columns of grad")
        if g.dtype != rows.dtype:               # y is that of the forward pass
            raise TypeError(f"grad: expected dtype {rows.dtype}, as y has, got {g.dtype}"
                            f"{dtype_instead(g.dtype, (rows.dtype,), 'grad')}")
        return _UnpermuteBackwardInputs(g, rows, routing, read_probs(call, probs, routing))

    def result(self, inputs: _UnpermuteBackwardInputs) -> Description:
        grad, y, _, probs = inputs
        assert probs.array is not None
        return Pair(one_array(y.shape, grad.dtype, "out[0]"), one_array(probs.array.shape, float32, "out[1]"))

    def reference(self, inputs: _UnpermuteBackwardInputs) -> Any:
        grad, y, routing, probs = inputs
        return reference.unpermute_backward(grad.array, y.array, routing, probs=probs.array)

    def launches(self, call: Call, inputs: _UnpermuteBackwardInputs, *written: int) -> Iterator[Launch]:
        grad, y, routing, probs = inputs
        grad_y, dprobs = written
        count = prod(grad.shape[1:])
        row_bytes = count * grad.dtype.itemsize
        grid, clearing = launching.grid(routing, routing.tokens, grad.shape)
        yield launching.BACKWARD.variant(IN=grad.dtype).bind(
            grad.array, grid, grad=grad.at, y=y.at, grad_y=grad_y, probs=probs.at, dprobs=dprobs,
            routes=launching.routes(routing, probs.columns, clearing), columns=count,
            vector=int((grad.at | y.at | grad_y | row_bytes) % 16 == 0),
            step=launching.widest_access(grad_y | row_bytes))


_PERMUTE, _MOVE_GRAD = _PermuteOp("x"), _PermuteOp("grad")
_UNPERMUTE, _PERMUTE_BACKWARD = _UnpermuteOp("y"), _UnpermuteOp("grad")
_UNPERMUTE_BACKWARD = _UnpermuteBackwardOp()
