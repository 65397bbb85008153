"""Samples of sums over, or copies to, the rows of some tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import reference
from ...arrays import asnumpy, bits
from ...routing import Routing
from ...testing import assert_bytes_equal
from ..data import part, sample


def _sampled(routing: Routing) -> tuple[list[int], list[int], Routing]:
    """Return (tokens, their rows, a routing of these tokens to these rows alone in the same order). Every
    slot has a row."""
    tokens = sample(routing.tokens)
    rows = asnumpy(routing.row_map)[tokens]
    made = reference.route(np.zeros(rows.shape, np.int32), num_experts=1)
    made.row_map[...] = np.argsort(np.argsort(rows.reshape(-1))).reshape(rows.shape)
    return tokens, sorted(rows.reshape(-1).tolist()), made


def _compare_unpermute(args: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
    y, routing = args
    tokens, rows, few = _sampled(routing)
    probs = {"probs": part(options["probs"], tokens)} if "probs" in options else {}
    assert_bytes_equal(part(out, tokens), reference.unpermute(part(y, rows), few, **probs))


def _compare_permute_backward(args: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
    grad, routing = args
    tokens, rows, few = _sampled(routing)
    want = reference.permute_backward(part(grad, rows), few, probs_grad=asnumpy(options["probs_grad"][rows]))
    for made, wanted in zip(out, want, strict=True):
        assert_bytes_equal(part(made, tokens), wanted)


def _compare_unpermute_backward(args: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
    grad, y, routing = args
    tokens, rows, few = _sampled(routing)
    want = reference.unpermute_backward(part(grad, tokens), part(y, rows), few,
                                        probs=part(options["probs"], tokens))
    assert_bytes_equal(part(out[0], rows), want[0])
    assert_bytes_equal(part(out[1], tokens), want[1])
    unused = np.flatnonzero(asnumpy(routing.sources) < 0).tolist()
    assert not unused or not bool(bits(out[0])[unused].any())


COMPARE = {"unpermute": _compare_unpermute, "permute_backward": _compare_permute_backward,
           "unpermute_backward": _compare_unpermute_backward}
