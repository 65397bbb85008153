"""Losses for training a gate, and their gradients. Kernels: kernels_cu/moe/gate_losses.cu."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from ... import reference
from ...arrays import Array, address
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, Pair, one_array
from ...formats import INPUT_DTYPES, float32, number
from ...gate import Gate
from ...kernels import Kernel, Launch, Variant, grid_size
from ...layouts import cdiv
from ...reference.moe.gate import balance_factor, z_factors
from ...typed_array import TypedArray
from .gate import RowShape, experts_of_lane, row_shape

_ITEMS = 256                            # items per thread block of load_balance_loss
_BALANCE = Kernel("moe/gate_losses", "load_balance_loss", block=_ITEMS)
_Z_LOSS = Kernel("moe/gate_losses", "z_loss")


def load_balance_loss(gate: Gate, coeff: float, *, out: tuple[Array, Array] | None = None
                      ) -> tuple[TypedArray, TypedArray]:
    """The auxiliary loss of a gate whose experts are to be loaded alike, and its gradient.

        loss = coeff * E / (k * S * L^2) * sum over i, e of counts[i, e] * score_sums[i, e]

    of S sequences of L tokens; with one sequence it is the Switch Transformer's for k experts of a token, and
    coeff where all experts are loaded alike. Counts are constants.

    Parameters
    ----------
    gate : of ``topk_gate(…, sequences=S)``
    coeff : a finite number
    out : an earlier result, written and returned; with it the call can be captured into a CUDA graph

    Returns
    -------
    (loss f32 [1], grad f32 [S, E]), the gradient of the gate's score_sums, which `topk_gate_backward` takes
    as score_grads. The sum follows the fixed tree, so the same arguments give the same bytes. Raises
    TypeError, ValueError, DeviceError, before anything is written.

    One launch. Source: arXiv 2101.03961, 2412.19437 (per sequence); docs/numerics.md section 14.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> gate = fp8.topk_gate(np.float32([[1, 0], [2, 0], [0, 0], [1, 0]]), 1, sequences=1)
    >>> loss, grad = fp8.load_balance_loss(gate, 0.01)
    >>> loss.astype(float).round(5).tolist(), gate.counts.tolist(), grad.tolist()
    ([0.01421], [[4, 0]], [[0.004999999888241291, 0.0]])
    """
    result: tuple[TypedArray, TypedArray] = run(_LOAD_BALANCE_LOSS, (gate, coeff), out)
    return result


def z_loss(logits: Array, coeff: float, *, out: tuple[Array, Array] | None = None
           ) -> tuple[TypedArray, TypedArray]:
    """The loss that keeps the logits of a gate small, and its gradient.

        loss = coeff / T * sum over tokens of log(sum over e of exp(logits[t, e]))^2

    Parameters
    ----------
    logits : bfloat16, float16 or float32 array [T, E], E from 1 to 1024. NaN is left out; a row without a
        number above -Inf, or with Inf, counts as 0
    coeff : a finite number
    out : an earlier result, written and returned; with it the call can be captured into a CUDA graph

    Returns
    -------
    (loss f32 [1], grad [T, E] of the logits' dtype), to be added to that of `topk_gate_backward`. The sum
    over tokens follows the fixed tree, so the same arguments give the same bytes. Raises TypeError,
    ValueError, DeviceError, before anything is written.

    One launch; bytes moved: the logits, and as many written. Source: arXiv 2202.08906; docs/numerics.md
    section 14.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> loss, grad = fp8.z_loss(np.float32([[0, 0], [0, 0]]), 1.0)
    >>> loss.astype(float).round(4).tolist(), grad.astype(float).round(4).tolist()
    ([0.4805], [[0.3466, 0.3466], [0.3466, 0.3466]])
    """
    result: tuple[TypedArray, TypedArray] = run(_ZLOSS, (logits, coeff), out)
    return result


class _BalanceInputs(NamedTuple):
    gate: Gate
    coeff: float


class _LoadBalanceLoss(Op[_BalanceInputs]):
    def arguments(self, call: Call, gate: Any, coeff: Any) -> _BalanceInputs:
        number(coeff, "coeff")
        gate = call.gate("gate", gate, "counts", "score_sums")
        if gate.score_sums is None:
            raise ValueError("gate: expected one that was made with sequences=, got one without")
        return _BalanceInputs(gate, float(coeff))

    def result(self, inputs: _BalanceInputs) -> Description:
        return Pair(one_array((1,), float32, "out[0]"),
                    one_array(inputs.gate.counts.shape, float32, "out[1]"))

    def reference(self, inputs: _BalanceInputs) -> Any:
        return reference.load_balance_loss(*inputs)

    def launches(self, call: Call, inputs: _BalanceInputs, *written: int) -> Iterator[Launch]:
        gate = inputs.gate
        sequences, experts = gate.counts.shape
        items = sequences * experts
        yield _BALANCE.variant().bind(
            gate.counts, grid_size(cdiv(items, _ITEMS), gate.counts.shape), counts=address(gate.counts),
            score_sums=address(gate.score_sums), loss=written[0], grad=written[1], items=items,
            factor=float(balance_factor(gate, inputs.coeff)), **_sums(call, cdiv(items, _ITEMS)))


class _ZInputs(NamedTuple):
    logits: Input
    rows: RowShape
    coeff: float


class _ZLoss(Op[_ZInputs]):
    def arguments(self, call: Call, logits: Any, coeff: Any) -> _ZInputs:
        number(coeff, "coeff")
        x = call.read("logits", logits, INPUT_DTYPES)
        return _ZInputs(x, row_shape(x.shape), float(coeff))

    def result(self, inputs: _ZInputs) -> Description:
        x = inputs.logits
        return Pair(one_array((1,), float32, "out[0]"), one_array(x.shape, x.dtype, "out[1]"))

    def reference(self, inputs: _ZInputs) -> Any:
        return reference.z_loss(inputs.logits.array, inputs.coeff)

    def launches(self, call: Call, inputs: _ZInputs, *written: int) -> Iterator[Launch]:
        x, rows = inputs.logits, inputs.rows
        blocks = max(1, cdiv(rows.tokens, rows.warps))
        mean, slope = z_factors(rows.tokens, inputs.coeff)
        yield rows.variant(_Z_LOSS, x.dtype, "softmax").bind(
            x.array, grid_size(blocks, x.shape), logits=x.at, loss=written[0], grad=written[1],
            tokens=rows.tokens, experts=rows.experts,
            vector=rows.is_vector(x.dtype.itemsize, x.at, written[1]), mean=float(mean), slope=float(slope),
            **_sums(call, blocks))


def _sums(call: Call, blocks: int) -> dict[str, int]:
    """Return memory for sums of thread blocks, which the last one adds up."""
    if blocks == 1:
        return {}
    return {"of_blocks": address(call.scratch("sums of blocks", blocks)),
            "done": call.workspace("blocks of a loss", 1)}


_LOAD_BALANCE_LOSS, _ZLOSS = _LoadBalanceLoss(), _ZLoss()


def balance_variants() -> Iterator[Variant]:
    """Yields the variant that load_balance_loss launches."""
    yield _BALANCE.variant()


def z_variants() -> Iterator[Variant]:
    """Yields every variant that z_loss may launch."""
    for dtype, of_lane in product(INPUT_DTYPES, experts_of_lane()):
        yield RowShape(0, 0, of_lane).variant(_Z_LOSS, dtype, "softmax")
