"""Benchmark rows of the ops on groups of rows: the tokens of an expert layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import backend
from ...arrays import Array, bits, empty
from ...cases.groups import sizes
from ...formats import FORMATS, bfloat16, float8_e4m3fn, float8_e8m0fnu, float32
from ...layouts import padded_rows
from ...ops.moe.pad import pad_groups, sort_chunks, unpad_groups
from ...results import Scaled
from ..quantize.tensor import Spec

_ALIGN = 16


def _filled(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    cp = backend.cupy()
    count = int(np.prod(shape)) * dtype.itemsize
    return cp.random.randint(0, 256, count, np.uint8).view(dtype).reshape(shape)


def _sorted(shape: tuple[int, ...], dtype: np.dtype[Any], groups: int) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        host, order = sizes(shape[0], groups), np.random.default_rng(1).permutation(groups)
        x, splits, on_device = _filled(shape, dtype), cp.asarray(host), cp.asarray(order)
        out = empty(shape, dtype, like=x)
        starts = np.cumsum(host) - host
        rows = cp.asarray(np.concatenate([np.arange(starts[g], starts[g] + host[g]) for g in order]))

        def check() -> None:
            assert bool((bits(out) == bits(x)[rows]).all())

        return (lambda: sort_chunks(x, splits, on_device, out=out)), check

    return make


def _padded(shape: tuple[int, ...], dtype: np.dtype[Any], groups: int) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        host = sizes(shape[0], groups)
        x, splits = _filled(shape, dtype), cp.asarray(host)
        y = pad_groups(x, splits, _ALIGN)
        taken = -(-host // _ALIGN) * _ALIGN
        places = np.repeat(np.cumsum(taken) - taken - (np.cumsum(host) - host), host) + np.arange(shape[0])
        zeros = cp.asarray(np.setdiff1d(np.arange(len(y)), places))

        def check() -> None:
            assert bool((bits(y)[cp.asarray(places)] == bits(x)).all())
            assert not bool(bits(y)[zeros].any())

        return (lambda: pad_groups(x, splits, _ALIGN, out=y)), check

    return make


def _padded_scaled(shape: tuple[int, int], scales: tuple[int, int], dtype: np.dtype[Any], groups: int) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        host = sizes(shape[0], groups)
        x = Scaled(_filled(shape, float8_e4m3fn), _filled(scales, dtype), shape, False,
                   (1, shape[1] // scales[1]), "compact")
        splits = cp.asarray(host)
        y = pad_groups(x, splits, _ALIGN)

        def check() -> None:
            for mine, theirs in zip(y, x, strict=True):
                assert bool((bits(mine) == bits(pad_groups(theirs, host.tolist(), _ALIGN))).all())

        return (lambda: pad_groups(x, splits, _ALIGN, out=y)), check

    return make


def _unpadded(shape: tuple[int, ...], dtype: np.dtype[Any], groups: int) -> Any:
    def make() -> Any:
        x, splits = _filled(shape, dtype), backend.cupy().asarray(sizes(shape[0], groups))
        y, out = pad_groups(x, splits, _ALIGN), empty(shape, dtype, like=x)

        def check() -> None:
            assert bool((bits(out) == bits(x)).all())

        return (lambda: unpad_groups(y, splits, _ALIGN, out=out)), check

    return make


_MAKERS = {"pad_groups": _padded, "unpad_groups": _unpadded, "sort_chunks": _sorted}


def _all() -> Iterator[Spec]:
    def spec(op: str, dtype: np.dtype[Any], shape: tuple[int, int], groups: int) -> Spec:
        rows = padded_rows(shape[0], groups, _ALIGN) if op == "pad_groups" else shape[0]
        label = f"{FORMATS[dtype].tag}, {groups} groups{'' if op == 'sort_chunks' else f' to {_ALIGN}'}"
        return Spec(op, label, shape, (shape[0] + rows) * shape[1] * dtype.itemsize,
                    _MAKERS[op](shape, dtype, groups))

    for op in _MAKERS:
        for dtype in (bfloat16, float8_e4m3fn):
            yield spec(op, dtype, (16384, 7168), 64)
    yield spec("pad_groups", bfloat16, (16384, 7168), 512)
    yield spec("pad_groups", float32, (1 << 20, 1), 64)
    yield spec("pad_groups", float8_e4m3fn, (16384, 7161), 64)
    shape = (16384, 7168)
    for label, block, dtype in (("1×128 f32", 128, float32), ("1×32 E8M0", 32, float8_e8m0fnu)):
        scales = (shape[0], shape[1] // block)
        moved = (shape[0] + padded_rows(shape[0], 64, _ALIGN)) * (shape[1] + scales[1] * dtype.itemsize)
        yield Spec("pad_groups", f"e4m3 and {label} scales, 64 groups to {_ALIGN}", shape, moved,
                   _padded_scaled(shape, scales, dtype, 64))


SPECS: tuple[Spec, ...] = tuple(_all())
