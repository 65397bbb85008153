"""Quantises tokens and moves them to their experts' rows in one launch. Kernel:
kernels_cu/moe/quantize_permute.cu."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple, overload

import numpy as np

from ... import reference
from ...arrays import Array, address
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, Pair, one_array
from ...formats import FP8_DTYPES, INPUT_DTYPES, float32
from ...kernels import Kernel, Launch, Variant
from ...layouts import PADDED_TO, cdiv, round_up
from ...recipes import BlockScaling
from ...results import Scaled
from ...routing import Routing
from ...typed_array import TypedArray
from ..quantize.blocks import BlockOptions, BlockQuantization
from . import permute_launches as launching
from .permute import check_length, read_probs, read_routing
from .permute_launches import Probs, TokenScales
from .rows import described_rows

_BLOCK = (1, 128)
_WARPS = 8                          # warps per thread block
#: From 4 slots per token and 2^20 scales of rows on, scattered stores of scales cost more than a second
#: launch.
_MANY_SLOTS, _MANY_SCALES = 4, 1 << 20
_KERNEL = Kernel("moe/quantize_permute", "quantize_permute", block=32 * _WARPS)


@overload
def quantize_permute(x: Array, routing: Routing, recipe: BlockScaling | None = None, *, probs: None = None,
                     out: Scaled | None = None) -> Scaled: ...
@overload
def quantize_permute(x: Array, routing: Routing, recipe: BlockScaling | None = None, *, probs: Array,
                     out: tuple[Scaled, Array] | None = None) -> tuple[Scaled, TypedArray]: ...
def quantize_permute(x: Array, routing: Routing, recipe: BlockScaling | None = None, *,
                     probs: Array | None = None, out: Any = None
                     ) -> Scaled | tuple[Scaled, TypedArray]:
    """Quantise each token once, and write it to the rows that the routing gives it: what an expert layer
    begins with where no dispatch to other GPUs lies between.

        permute(quantize(x, recipe).rowwise, routing, probs=probs)

    byte for byte, from one read of x. One launch; where 2^20 scales or more go to rows, and each to four or
    more, a second small one moves these.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array [T, K]
    routing : of T tokens, as `route` gives it
    recipe : BlockScaling with blocks of (1, 128); its scale_layout does not matter. None: BlockScaling()
    probs : f32 array [T, topk], one for each slot; of a mask also [T, E]
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured, and used
        before

    Returns
    -------
    Scaled [rows, K] with gemm_ready scales, both 0 in rows that no token is in. With probs a tuple: that, and
    f32 [rows], the prob of each row.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. (`route` has noted what was wrong with an
    assignment on the device.)

    Source: docs/numerics.md sections 3 and 8. Bytes moved: x, the rows and their scales.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> r = fp8.route(np.array([[1], [0], [1]]), num_experts=2)
    >>> rows = fp8.quantize_permute(np.float32([[448, 2], [896, 4], [3, 1]]), r)
    >>> rows.data.astype(np.float32).tolist(), rows.scale_inv.tolist()
    ([[448.0, 2.0], [448.0, 2.0], [384.0, 128.0]], [[2.0, 1.0, 0.0078125, 0.0]])
    """
    return run(_QUANTIZE_PERMUTE, (x, routing, BlockScaling() if recipe is None else recipe, probs), out)


class _Inputs(NamedTuple):
    x: Input
    routing: Routing
    recipe: BlockScaling
    probs: Probs


class _QuantizePermute(Op[_Inputs]):
    def arguments(self, call: Call, x: Any, routing: Any, recipe: Any, probs: Any) -> _Inputs:
        if not isinstance(recipe, BlockScaling):
            raise TypeError(f"recipe: expected a BlockScaling, got {type(recipe).__name__}")
        if recipe.block != _BLOCK:
            raise ValueError(f"recipe: expected blocks of {_BLOCK}, got {recipe!r}")
        given = call.read("x", x, INPUT_DTYPES)
        if len(given.shape) != 2:
            raise ValueError(f"x: expected shape [T, K], got {given.shape}")
        read_routing(call, routing)
        check_length(given.array, routing.tokens, "x", "tokens")
        return _Inputs(given, routing, recipe, read_probs(call, probs, routing))

    def result(self, inputs: _Inputs) -> Description:
        number = inputs.routing.rows
        rows = described_rows((number, inputs.x.shape[1]), inputs.recipe.dtype, float32, _BLOCK, "gemm_ready")
        return rows if inputs.probs.array is None else Pair(rows, one_array((number,), float32, "out[1]"))

    def reference(self, inputs: _Inputs) -> Any:
        return reference.quantize_permute(inputs.x.array, inputs.routing, inputs.recipe,
                                          probs=inputs.probs.array)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        x, routing, recipe, probs = inputs
        to, scales_to, *rest = written
        tokens, columns = x.shape
        blocks, probs_to = cdiv(columns, _BLOCK[1]), rest[0] if rest else 0
        apart = _moves_scales_apart(x.array, routing, blocks)
        quantization = BlockQuantization(x.shape, x.dtype, False, BlockOptions.of(recipe, True, False))
        token_scales = address(call.scratch("scales of tokens", tokens * blocks)) if apart else 0
        of_a_warp = 32 * _KERNEL.constant("kLaneElements") * _KERNEL.constant("kUnits")
        pairs = max(1, cdiv(columns, of_a_warp))
        warps = tokens * pairs if routing.topk else 0
        grid, clearing = launching.grid(routing, cdiv(warps, _WARPS), x.shape)
        yield _variant(x.dtype, recipe.dtype, quantization.divide).bind(
            x.array, grid, x=x.at, to=to, scales=scales_to, token_scales=token_scales, columns=columns,
            pitch=round_up(routing.rows, PADDED_TO), pairs=pairs, warps=warps,
            vector=int(columns % 16 == 0 and (x.at | to) % 16 == 0), probs=probs.at,
            rows_probs=0 if apart else probs_to, rule=quantization.rule,
            routes=launching.routes(routing, probs.columns, clearing))
        if apart:
            given = TokenScales(token_scales, blocks, blocks, 1)
            yield launching.without_data(x.array, given, routing, probs, scales_to, probs_to)


def _moves_scales_apart(x: Array, routing: Routing, blocks: int) -> bool:
    # small cases on the CPU take both paths
    many = _MANY_SCALES >> 16 if isinstance(x, np.ndarray) else _MANY_SCALES
    return routing.topk >= _MANY_SLOTS and routing.tokens * routing.topk * blocks >= many


def _variant(source: np.dtype[Any], to: Any, divides: bool) -> Variant:
    return _KERNEL.variant(IN=source, OUT=to, DIVIDE=divides)


def variants() -> Iterator[Variant]:
    """Yields every variant that this op may launch."""
    yield launching.PERMUTE.variant()
    for source, to, divides in product(INPUT_DTYPES, FP8_DTYPES, (False, True)):
        yield _variant(source, to, divides)


_QUANTIZE_PERMUTE = _QuantizePermute()
