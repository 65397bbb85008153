"""The far calls of gates and their losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from far_arrays import END, FAR, Far

import cupy_fp8 as fp8
from cupy_fp8 import reference
from cupy_fp8.arrays import address
from cupy_fp8.formats import bfloat16
from cupy_fp8.kernels import grid_size
from cupy_fp8.layouts import cdiv
from cupy_fp8.ops.moe import gate, gate_losses
from cupy_fp8.reference.moe.gate import z_factors

_TALL = (FAR, 128)


def calls() -> Iterator[tuple[str, Far]]:
    """Yield the calls. Losses launch their kernels directly: a coefficient depends on the number of all
    tokens."""
    yield "topk_gate", Far(_gated, np.dtype(bfloat16), _TALL)
    yield "topk_gate_backward", Far(_gated_back, np.dtype(bfloat16), _TALL)
    yield "z_loss", Far(_squared_logits, np.dtype(bfloat16), _TALL)
    yield "load_balance_loss", Far(_loads, np.dtype(np.float32), _TALL, end=128)


def _gated(m: Any, x: Any) -> Any:
    """A block takes a sequence, so that no block waits for those that the CPU leaves out."""
    made = m.topk_gate(x, 2, return_scores=True, sequences=len(x) // 8)
    return made.indices, made.weights, made.counts, made.scores, made.score_sums


def _gated_back(m: Any, x: Any) -> Any:
    made = m.topk_gate(x, 2, sequences=len(x) // 8)
    return m.topk_gate_backward(made.weights, x, made, score_grads=made.score_sums)


def _squared_logits(m: Any, x: Any) -> Any:
    if m is reference:
        return m.z_loss(x, 1.0)[1]
    rows, grad = gate.row_shape(x.shape), fp8.empty(x.shape, x.dtype, like=x)
    blocks, (mean, slope) = cdiv(rows.tokens, rows.warps), z_factors(END, 1.0)
    words = fp8.zeros(2 + blocks, np.float32, like=x)
    rows.variant(gate_losses._Z_LOSS, x.dtype, "softmax").bind(
        x, grid_size(blocks, x.shape), logits=address(x), grad=address(grad), tokens=rows.tokens,
        experts=rows.experts, vector=1, mean=float(mean), slope=float(slope), **_of_sums(words)).run()
    return grad


def _loads(m: Any, sums: Any) -> Any:
    """The bits of the sums serve as counts, also negative ones; the factor is 1."""
    if m is reference:
        rows, experts = sums.shape
        one = np.zeros((rows, 1), np.int32)
        made = fp8.Gate(one, one.view(np.float32), sums.view(np.int32), None, sums)
        return m.load_balance_loss(made, rows / experts)[1]
    grad, blocks = fp8.empty(sums.shape, np.float32, like=sums), cdiv(sums.size, gate_losses._ITEMS)
    words = fp8.zeros(2 + blocks, np.float32, like=sums)
    gate_losses._BALANCE.variant().bind(
        sums, grid_size(blocks, sums.shape), counts=address(sums), score_sums=address(sums),
        grad=address(grad), items=sums.size, factor=1.0, **_of_sums(words)).run()
    return grad


def _of_sums(words: Any) -> dict[str, int]:
    """Return the addresses of a loss, a count of blocks, and their sums."""
    return {name: address(words) + 4 * i for i, name in enumerate(("loss", "done", "of_blocks"))}
