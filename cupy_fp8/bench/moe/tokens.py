"""Benchmark rows of the ops on tokens: 64 experts, 8 for each token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import backend, reference
from ...arrays import Array, asnumpy, bits
from ...cases.moe.route import indices, mask
from ...formats import FORMATS, bfloat16, float8_e4m3fn, float8_e8m0fnu, float32
from ...layouts import cdiv
from ...ops.convert.astype import astype
from ...ops.moe.permute import permute, permute_backward, unpermute, unpermute_backward
from ...ops.moe.route import route
from ...results import Scaled
from ...routing import Routing
from ...testing import assert_bytes_equal
from ..quantize.tensor import Spec

_TOKENS, _TOPK, _EXPERTS, _COLUMNS = 8192, 8, 64, 7168
_SAMPLED = 16               # tokens that are checked


def _bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    cp = backend.cupy()
    count = int(np.prod(shape)) * dtype.itemsize
    return cp.random.randint(0, 256, count, np.uint8).view(dtype).reshape(shape)


def _normal(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    x = backend.cupy().random.standard_normal(shape, dtype=np.float32)
    return x if dtype == float32 else astype(x, dtype)


def _routing(tokens: int, align: int, rows: int | None = None) -> Routing:
    assignment = backend.cupy().asarray(indices(tokens, _TOPK, _EXPERTS, "distinct"))
    return route(assignment, num_experts=_EXPERTS, align=align, rows=rows)


def _sampled(routing: Routing) -> tuple[list[int], np.ndarray]:
    """(tokens, their rows). Every slot has a row."""
    tokens = sorted({int(t) for t in np.linspace(0, routing.tokens - 1, _SAMPLED)})
    return tokens, asnumpy(routing.row_map)[tokens]


def _few(rows: np.ndarray) -> tuple[Routing, list[int]]:
    """(a routing of the sampled tokens to their rows alone, in the same order; these rows)."""
    made = reference.route(np.zeros(rows.shape, np.int32), num_experts=1)
    made.row_map[...] = np.argsort(np.argsort(rows.reshape(-1))).reshape(rows.shape)
    return made, sorted(rows.reshape(-1).tolist())


def _route(tokens: int, topk: int, experts: int, align: int, as_mask: bool = False) -> Any:
    def make() -> Any:
        host = mask(tokens, experts, topk) if as_mask else indices(tokens, topk, experts, "distinct")
        x = backend.cupy().asarray(host)
        options: dict[str, Any] = {"num_experts": experts, "topk": topk, "align": align}
        out = route(x, **options)

        def check() -> None:
            want = reference.route(host, **options)._arrays()
            for name, a in out._arrays().items():
                assert_bytes_equal(a, want[name])

        return (lambda: route(x, **options, out=out)), check

    return make


def _permute(tokens: int, dtype: np.dtype[Any], align: int, scales: np.dtype[Any] | None, rows: int | None,
             with_probs: bool) -> Any:
    def make() -> Any:
        routing, data = _routing(tokens, align, rows), _bytes((tokens, _COLUMNS), dtype)
        x: Any = data
        if scales is not None:
            block = (1, 32 if scales == float8_e8m0fnu else 128)
            scale_inv = _bytes((tokens, cdiv(_COLUMNS, block[1])), scales)
            x = Scaled(data, scale_inv, data.shape, False, block, "compact")
        probs = _normal((tokens, _TOPK), float32) if with_probs else None
        out = permute(x, routing, probs=probs)

        def check() -> None:
            moved = out[0] if with_probs else out
            unused = routing.sources < 0
            for to, source in zip(moved, x, strict=True) if isinstance(x, Scaled) else ((moved, x),):
                picked, at = _sampled(routing)
                for slot in range(_TOPK):
                    assert bool((bits(to)[at[:, slot].tolist()] == bits(source)[picked]).all())
                assert not bool(bits(to)[unused].any())
            if probs is not None:
                assert bool((out[1][routing.row_map.reshape(-1)] == probs.reshape(-1)).all())

        return (lambda: permute(x, routing, probs=probs, out=out)), check

    return make


def _unpermute(tokens: int, dtype: np.dtype[Any], weighted: bool) -> Any:
    def make() -> Any:
        routing = _routing(tokens, 1)
        y = _normal((routing.rows, _COLUMNS), dtype)
        probs = _normal((tokens, _TOPK), float32) if weighted else None
        out = unpermute(y, routing, probs=probs)

        def check() -> None:
            picked, at = _sampled(routing)
            few, rows = _few(at)
            few_probs = None if probs is None else asnumpy(probs[picked])
            want = reference.unpermute(asnumpy(y[rows]), few, probs=few_probs)
            assert_bytes_equal(out[picked], want)

        return (lambda: unpermute(y, routing, probs=probs, out=out)), check

    return make


def _permute_backward(tokens: int, dtype: np.dtype[Any]) -> Any:
    def make() -> Any:
        routing = _routing(tokens, 1)
        grad, probs_grad = _normal((routing.rows, _COLUMNS), dtype), _normal((routing.rows,), float32)
        out = permute_backward(grad, routing, probs_grad=probs_grad)

        def check() -> None:
            picked, at = _sampled(routing)
            few, rows = _few(at)
            want = reference.permute_backward(asnumpy(grad[rows]), few, probs_grad=asnumpy(probs_grad[rows]))
            for a, b in zip(out, want, strict=True):
                assert_bytes_equal(a[picked], b)

        return (lambda: permute_backward(grad, routing, probs_grad=probs_grad, out=out)), check

    return make


def _unpermute_backward(tokens: int, dtype: np.dtype[Any], align: int) -> Any:
    def make() -> Any:
        routing = _routing(tokens, align)
        grad, y = _normal((tokens, _COLUMNS), dtype), _normal((routing.rows, _COLUMNS), dtype)
        probs = _normal((tokens, _TOPK), float32)
        out = grad_y, dprobs = unpermute_backward(grad, y, routing, probs=probs)

        def check() -> None:
            picked, at = _sampled(routing)
            few, rows = _few(at)
            want = reference.unpermute_backward(asnumpy(grad[picked]), asnumpy(y[rows]), few,
                                                probs=asnumpy(probs[picked]))
            assert_bytes_equal(grad_y[rows], want[0])
            assert dprobs is not None
            assert want[1] is not None
            assert_bytes_equal(dprobs[picked], want[1])
            assert not bool(bits(grad_y)[routing.sources < 0].any())

        return (lambda: unpermute_backward(grad, y, routing, probs=probs, out=out)), check

    return make


def _all() -> Iterator[Spec]:
    for tokens, topk, experts, align in ((8192, 8, 64, 1), (8192, 8, 64, 16), (8192, 8, 256, 128),
                                         (128, 8, 64, 16), (65536, 8, 64, 1)):
        traffic = 4 * (3 * tokens * topk + experts * (align - 1))
        yield Spec("route", f"top {topk} of {experts} to {align}", (tokens, topk), traffic,
                   _route(tokens, topk, experts, align))
    yield Spec("route", "mask, top 8 of 64 to 1", (_TOKENS, _EXPERTS), _TOKENS * (_EXPERTS + 4 * 3 * _TOPK),
               _route(_TOKENS, _TOPK, _EXPERTS, 1, True))

    def permuted(tokens: int, dtype: np.dtype[Any], align: int, scales: np.dtype[Any] | None = None,
                 rows: int | None = None, probs: bool = False) -> Spec:
        label, scale_bytes = FORMATS[dtype].tag, 0
        if scales is not None:
            block = 32 if scales == float8_e8m0fnu else 128
            label += ", MX" if block == 32 else ", 1x128"
            scale_bytes = cdiv(_COLUMNS, block) * scales.itemsize
        label += f", to {align}" if align > 1 else ""
        label += (", probs" if probs else "") + ("" if rows is None else ", half a tail")
        written = tokens * _TOPK + _EXPERTS * (align - 1) if rows is None else rows
        traffic = (tokens + written) * (_COLUMNS * dtype.itemsize + scale_bytes)
        traffic += probs * 4 * (tokens * _TOPK + written)
        return Spec("permute", label, (tokens, _COLUMNS), traffic,
                    _permute(tokens, dtype, align, scales, rows, probs))

    for align in (1, 16):
        yield permuted(_TOKENS, bfloat16, align)
        yield permuted(_TOKENS, float8_e4m3fn, align, float32)
        yield permuted(_TOKENS, float8_e4m3fn, align, float8_e8m0fnu)
    yield permuted(_TOKENS, bfloat16, 16, probs=True)
    yield permuted(_TOKENS, bfloat16, 1, rows=2 * _TOKENS * _TOPK)
    yield permuted(64, bfloat16, 16)
    rows, token_bytes = _TOKENS * _TOPK, 2 * _COLUMNS
    for weighted in (True, False):
        yield Spec("unpermute", f"bf16{', probs' if weighted else ''}", (_TOKENS, _COLUMNS),
                   (rows + _TOKENS) * token_bytes, _unpermute(_TOKENS, bfloat16, weighted))
    yield Spec("unpermute", "bf16, probs", (64, _COLUMNS), 64 * (_TOPK + 1) * token_bytes,
               _unpermute(64, bfloat16, True))
    yield Spec("permute_backward", "bf16, probs", (_TOKENS, _COLUMNS), (rows + _TOKENS) * token_bytes,
               _permute_backward(_TOKENS, bfloat16))
    for align in (1, 16):
        yield Spec("unpermute_backward", f"bf16{', to 16' if align > 1 else ''}", (_TOKENS, _COLUMNS),
                   (2 * rows + _EXPERTS * (align - 1) + _TOKENS) * token_bytes,
                   _unpermute_backward(_TOKENS, bfloat16, align))


SPECS: tuple[Spec, ...] = tuple(_all())
