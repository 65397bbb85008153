"""Samples of the gate: tokens, which are independent of each other; and counts of what was chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ... import reference
from ...arrays import asnumpy
from ...gate import Gate
from ...testing import assert_bytes_equal
from ..data import part, sample

_ROWS = 16


def _compare(args: tuple[Any, ...], options: dict[str, Any], out: Gate) -> None:
    (logits, k), rows = args, sample(out.tokens, _ROWS)
    given = {name: option for name, option in options.items() if name != "sequences"}
    if "bias" in given:
        given["bias"] = asnumpy(given["bias"])
    want = reference.topk_gate(part(logits, rows), k, **given)
    for name in ("indices", "weights", "scores"):
        if (made := getattr(out, name)) is not None:
            assert_bytes_equal(part(made, rows), getattr(want, name))
    chosen = asnumpy(out.indices).reshape(-1)
    assert_bytes_equal(asnumpy(out.counts).reshape(-1),
                       np.bincount(chosen, minlength=out.num_experts).astype(np.int32))


def _compare_backward(args: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
    (grad, logits, gate), rows = args, sample(len(args[1]), _ROWS)
    few = replace(gate, indices=part(gate.indices, rows), weights=part(gate.weights, rows), scores=None,
                  counts=asnumpy(gate.counts),
                  score_sums=None if gate.score_sums is None else asnumpy(gate.score_sums))
    given = {name: asnumpy(option) for name, option in options.items()}
    assert_bytes_equal(part(out, rows),
                       reference.topk_gate_backward(part(grad, rows), part(logits, rows), few, **given))


def _compare_z_loss(args: tuple[Any, ...], options: dict[str, Any], out: tuple[Any, Any]) -> None:
    """Compare gradients; factors are exact, since numbers of rows and of tokens are powers of two."""
    (logits, coeff), rows = args, sample(len(args[0]), _ROWS)
    assert_bytes_equal(part(out[1], rows),
                       reference.z_loss(part(logits, rows), coeff * len(rows) / len(logits))[1])


COMPARE = {"topk_gate": _compare, "topk_gate_backward": _compare_backward, "z_loss": _compare_z_loss}
