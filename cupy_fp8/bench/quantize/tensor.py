"""Benchmark rows of the per-tensor ops: the bytes that each must move, and a check of the bytes that the
timed call wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import backend, reference
from ...arrays import Array, asnumpy, empty
from ...formats import bfloat16, float8_e4m3fn, float8_e5m2, float16, float32
from ...layouts import swap_last
from ...ops.convert.astype import astype, transpose
from ...ops.convert.dequantize import dequantize
from ...ops.quantize.tensor import quantize_tensor
from ...ops.scales.amax import compute_amax
from ...ops.scales.scale import compute_scale, update_delayed_scaling
from ...recipes import DelayedScaling
from ...results import Scaled
from ...testing import assert_bytes_equal
from ..measure import Spec as Spec

SIZES = ((4096, 4096), (8192, 8192), (16384, 8192), (16384, 16384))
_MAIN = ((16384, 8192),)
_HISTORIES = ((16, 512), (1024, 1), (1024, 10_000))
_SAMPLED_ROWS = 16
_SCALE = 0.37


def _normal(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    cp = backend.cupy()
    x = cp.random.standard_normal(shape, dtype=cp.float32)
    return x if dtype == float32 else astype(x, dtype)


def _sample(rows: int) -> list[int]:
    return sorted({int(r) for r in np.linspace(0, rows - 1, _SAMPLED_ROWS)})


def _quantize(shape: tuple[int, int], source: np.dtype[Any], to: np.dtype[Any], row: bool, column: bool,
              with_amax: bool, current: bool = False, dbias: bool = False) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        x, scale = _normal(shape, source), None if current else cp.full(1, _SCALE, cp.float32)
        amax = cp.zeros(1, cp.float32) if with_amax else None
        out = DelayedScaling(to).empty(shape, rowwise=row, columnwise=column, dbias=dbias, like=x)

        def check() -> None:
            picked = _sample(shape[0])
            used = asnumpy(compute_scale(compute_amax(x), dtype=to)) if scale is None else asnumpy(scale)
            want = reference.quantize_tensor(asnumpy(x[picked]), used, dtype=to)
            if "rowwise" in out.parts:
                assert_bytes_equal(asnumpy(out.rowwise.data.view("u1")[picked]).view(to), want.data)
            if "columnwise" in out.parts:
                assert_bytes_equal(asnumpy(out.columnwise.data.view("u1")[:, picked]).view(to),
                                   reference.transpose(want.data))
            if amax is not None:
                assert_bytes_equal(amax, compute_amax(x))
            if out.dbias is not None:
                picked = _sample(shape[1])
                assert_bytes_equal(out.dbias[picked],
                                   reference.numerics.tree_sum(asnumpy(x[:, picked]).astype(np.float32), 0))

        return (lambda: quantize_tensor(x, scale, dtype=to, rowwise=row, columnwise=column, amax=amax,
                                        dbias=dbias, out=out)), check

    return make


def _amax(shape: tuple[int, int], source: np.dtype[Any]) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        x, out = _normal(shape, source), cp.empty(1, cp.float32)

        def check() -> None:
            top = cp.abs(x.astype(cp.float32)).max()
            assert float(out[0]) == float(top), (float(out[0]), float(top))

        return (lambda: compute_amax(x, out=out)), check

    return make


def _convert(shape: tuple[int, int], source: np.dtype[Any], to: np.dtype[Any]) -> Any:
    def make() -> Any:
        a = astype(_normal(shape, float32), source) if source != float32 else _normal(shape, float32)
        out = empty(shape, to, like=a)

        def check() -> None:
            picked = _sample(shape[0])
            storage = f"u{a.dtype.itemsize}"
            rows = asnumpy(a.view(storage)[picked]).view(source)
            assert_bytes_equal(asnumpy(out.view(f"u{out.dtype.itemsize}")[picked]).view(to),
                               reference.astype(rows, to))

        return (lambda: astype(a, to, out=out)), check

    return make


def _dequantize(shape: tuple[int, int], to: np.dtype[Any], transposed: bool) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        q = quantize_tensor(_normal(shape, bfloat16), cp.full(1, _SCALE, cp.float32), rowwise=not transposed,
                            columnwise=transposed)
        s = q.columnwise if transposed else q.rowwise
        assert s is not None
        out = empty(shape, to, like=s.data)

        def check() -> None:
            picked = _sample(shape[0])
            raw = s.data.view("u1")
            data = asnumpy(cp.ascontiguousarray(raw.T[picked] if transposed else raw[picked])).view(s.dtype)
            part = Scaled(data, asnumpy(s.scale_inv), data.shape)
            assert_bytes_equal(asnumpy(out.view(f"u{out.dtype.itemsize}")[picked]).view(to),
                               reference.dequantize(part, dtype=to))

        return (lambda: dequantize(s, dtype=to, out=out)), check

    return make


def _transpose(shape: tuple[int, int]) -> Any:
    def make() -> Any:
        a = astype(_normal(shape, bfloat16), float8_e4m3fn)
        out = empty(swap_last(shape), float8_e4m3fn, like=a)

        def check() -> None:
            assert bool((out.view("u1") == a.view("u1").T).all())

        return (lambda: transpose(a, out=out)), check

    return make


def _compute_scale(shape: tuple[int, int]) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        amax, out = cp.abs(_normal(shape, float32)), cp.empty(shape, cp.float32)

        def check() -> None:
            assert_bytes_equal(out, reference.compute_scale(asnumpy(amax)))

        return (lambda: compute_scale(amax, out=out)), check

    return make


def _update(shape: tuple[int, int], reduced: bool) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        history, scale = cp.abs(_normal(shape, float32)), cp.ones(shape[1], cp.float32)
        amax = cp.abs(_normal(shape[1:], float32)) if reduced else None

        def call() -> Any:
            return update_delayed_scaling(history, scale, dtype=float8_e4m3fn, amax=amax)

        def check() -> None:
            """Checks one more step, since the timing decides how many came before."""
            history[...] = cp.abs(_normal(shape, float32))
            desired = reference.update_delayed_scaling(asnumpy(history), asnumpy(scale), dtype=float8_e4m3fn,
                                                       amax=None if amax is None else asnumpy(amax))
            for actual, want in zip(call(), desired, strict=True):
                assert_bytes_equal(actual, want)

        return call, check

    return make


def _all() -> Iterator[Spec]:
    def spec(op: str, label: str, shape: tuple[int, int], bytes_per_element: int, make: Any) -> Spec:
        return Spec(op, label, shape, shape[0] * shape[1] * bytes_per_element, make)

    for shape in SIZES:
        yield spec("quantize_tensor", "bf16→e4m3 row +amax", shape, 3,
                   _quantize(shape, bfloat16, float8_e4m3fn, True, False, True))
        yield spec("quantize_tensor", "bf16→e4m3 column +amax", shape, 3,
                   _quantize(shape, bfloat16, float8_e4m3fn, False, True, True))
        yield spec("cast_transpose", "bf16→e4m3 +amax", shape, 4, _quantize(shape, bfloat16, float8_e4m3fn,
                                                                            True, True, True))
        yield spec("quantize_tensor", "bf16→e4m3 row +amax +dbias", shape, 3,
                   _quantize(shape, bfloat16, float8_e4m3fn, True, False, True, dbias=True))
        yield spec("cast_transpose", "bf16→e4m3 +amax +dbias", shape, 4,
                   _quantize(shape, bfloat16, float8_e4m3fn, True, True, True, dbias=True))
        yield spec("quantize_tensor", "bf16→e4m3 current row", shape, 3,
                   _quantize(shape, bfloat16, float8_e4m3fn, True, False, False, current=True))
        yield spec("cast_transpose", "bf16→e4m3 current", shape, 4,
                   _quantize(shape, bfloat16, float8_e4m3fn, True, True, False, current=True))
        yield spec("compute_amax", "bf16", shape, 2, _amax(shape, bfloat16))
        yield spec("dequantize", "e4m3→bf16", shape, 3, _dequantize(shape, bfloat16, False))
        yield spec("dequantize", "e4m3→bf16 stored transposed", shape, 3, _dequantize(shape, bfloat16, True))
        yield spec("astype", "bf16→e4m3", shape, 3, _convert(shape, bfloat16, float8_e4m3fn))
        yield spec("astype", "e4m3→bf16", shape, 3, _convert(shape, float8_e4m3fn, bfloat16))
        yield spec("transpose", "e4m3", shape, 2, _transpose(shape))
    for shape in ((1, 512), (4096, 4096)):
        yield spec("compute_scale", "f32", shape, 8, _compute_scale(shape))
    for shape in _HISTORIES:
        yield spec("update_delayed_scaling", "history × tensors", shape, 8, _update(shape, False))
        yield spec("update_delayed_scaling", "history × tensors, reduced amax", shape, 8,
                   _update(shape, True))
    for shape in _MAIN:
        for source, size in ((float32, 4), (float16, 2)):
            name, e4m3 = {float32: "f32", float16: "f16"}[source], float8_e4m3fn
            row, column = (True, False), (False, True)
            yield spec("quantize_tensor", f"{name}→e5m2 row +amax", shape, size + 1,
                       _quantize(shape, source, float8_e5m2, *row, True))
            yield spec("quantize_tensor", f"{name}→e4m3 column +amax", shape, size + 1,
                       _quantize(shape, source, e4m3, *column, True))
            yield spec("cast_transpose", f"{name}→e4m3 +amax", shape, size + 2,
                       _quantize(shape, source, e4m3, True, True, True))
            yield spec("cast_transpose", f"{name}→e4m3 +amax +dbias", shape, size + 2,
                       _quantize(shape, source, e4m3, True, True, True, dbias=True))
            yield spec("compute_amax", name, shape, size, _amax(shape, source))
            yield spec("dequantize", f"e5m2→{name}", shape, size + 1, _dequantize(shape, source, False))
            yield spec("astype", f"{name}→e4m3", shape, size + 1, _convert(shape, source, float8_e4m3fn))
            yield spec("astype", f"e5m2→{name}", shape, size + 1, _convert(shape, float8_e5m2, source))


SPECS: tuple[Spec, ...] = tuple(_all())
