"""DelayedScaling as a recipe: a value that allocates results without a launch, and takes one launch per
call."""

from __future__ import annotations

import ctypes
import dataclasses
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from small_results import SHAPE, direction_parameter, kind_parameter, parts, x_of
from tiers import where_kernels_run

import cupy_fp8 as fp8
from cupy_fp8 import DelayedScaling, backend, cases, testing
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e5m2, float32


# ---- DelayedScaling ----
def test_delayed_scaling_is_comparable():
    recipe = DelayedScaling()
    assert (recipe.dtype, recipe.margin, recipe.history_len, recipe.algo) == (float8_e4m3fn, 0, 1024, "max")
    assert recipe == DelayedScaling(float8_e4m3fn.type) == DelayedScaling("float8_e4m3fn")
    assert recipe != DelayedScaling(float8_e5m2)
    assert len({recipe, DelayedScaling(), DelayedScaling(margin=1)}) == 2
    assert type(DelayedScaling(float8_e5m2.type).dtype) is type(float8_e5m2)
    assert dataclasses.replace(recipe, margin=-2).margin == -2
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert DelayedScaling(history_len=1, algo="most_recent",
                          margin=3) == DelayedScaling(margin=3, history_len=1, algo="most_recent")


# ---- empty ----
@kind_parameter
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (0, 5), (5, 0)], ids=str)
@direction_parameter
def test_empty(directions, shape, kind):
    for like in (kind, x_of(kind)):
        q = DelayedScaling(float8_e5m2).empty(shape, like=like, **directions)
        assert (q.shape, q.dtype) == (shape, float8_e5m2)
        assert ["rowwise" in q.parts,
                "columnwise" in q.parts] == [directions["rowwise"], directions.get("columnwise", False)]
        for part in parts(q):
            assert part.transposed is (part is q.parts.get("columnwise"))
            assert part.data.shape == ((*shape[:-2], shape[-1], shape[-2]) if part.transposed else shape)
            assert part.data.dtype == float8_e5m2
            assert part.data.flags.c_contiguous
            assert (part.scale_inv.shape, part.scale_inv.dtype, part.shape) == ((1,), float32, shape)
            assert part.scale_inv is parts(q)[0].scale_inv
            assert backend.kind_of(part.data) == backend.kind_of(part.scale_inv) == kind


def test_empty_of_an_integer_shape():
    assert DelayedScaling().empty(7, like="numpy").shape == (7,)
    assert DelayedScaling().empty((), like="numpy").shape == ()


@direction_parameter
def test_empty_initialises_nothing(directions, monkeypatch):
    """NumPy's own empty arrays, with whatever bytes they had."""
    made: list[np.ndarray] = []
    real = np.empty

    def empty(*args: Any, **kwargs: Any) -> np.ndarray:
        made.append(real(*args, **kwargs))
        made[-1].view(np.uint8).fill(0xAA)
        return made[-1]

    monkeypatch.setattr(np, "empty", empty)
    q = DelayedScaling().empty(SHAPE, like="numpy", **directions)
    held = {id(a): a for part in parts(q) for a in part}
    assert {id(a) for a in made} == set(held)
    assert all((a.view(np.uint8) == 0xAA).all() for a in held.values())


@kind_parameter
@direction_parameter
def test_empty_uses_buffers_as_they_are(directions, kind):
    buffers = {name: (fp8.empty(SHAPE if name == "rowwise" else SHAPE[::-1], float8_e4m3fn, like=kind),
                      fp8.empty(1, float32, like=kind))
               for name, on in directions.items() if on}
    for pair in buffers.values():
        for a in pair:
            cases.poison(a)
    q = DelayedScaling().empty(SHAPE, buffers=buffers, **directions)
    for name, (data, scale_inv) in buffers.items():
        part = getattr(q, name)
        assert part.data is data
        assert part.scale_inv is scale_inv
        assert part.transposed is (name == "columnwise")
        assert (fp8.asnumpy(data).view(np.uint8) == 0xAA).all()
        assert (fp8.asnumpy(scale_inv).view(np.uint8) == 0xAA).all()
    x = x_of(kind)
    assert DelayedScaling().quantize(x, scale=2.0, out=q, **directions) is q
    testing.assert_bytes_equal(q, fp8.quantize_tensor(x, 2.0, **directions))


# ---- launches ----
@where_kernels_run
@direction_parameter
def test_empty_launches_nothing(directions, run, launched):
    x = run.array(x_of())
    row = (run.array(np.empty(SHAPE, float8_e4m3fn)), run.array(np.empty(1, np.float32)))
    launched.clear()
    DelayedScaling().empty((300, 500), like=x, **directions)
    DelayedScaling().empty(SHAPE, buffers={"rowwise": row})
    assert launched == []


@where_kernels_run
@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (5, 0), (130, 257), (2, 133, 144)], ids=str)
@pytest.mark.parametrize(("rowwise", "columnwise", "transposed"),
                         [d for d in product((True, False), repeat=3) if d[0] or d[1]])
def test_one_launch_per_cast(rowwise, columnwise, transposed, shape, run, launched):
    x, scale, amax = (run.array(a) for a in (x_of(shape=shape), np.array([2.0], np.float32),
                                             np.zeros(1, np.float32)))
    flag = run.array(np.zeros(1, np.float32))
    directions = {"rowwise": rowwise, "columnwise": columnwise, "transposed": transposed}
    expected = "cast_transpose" if columnwise and transposed else "cast"
    out = fp8.quantize_tensor(x, scale, **directions)
    for options in ({}, {"amax": amax}, {"out": out}, {"amax": amax, "noop": flag, "out": out}):
        for value in (scale, 2.0):
            launched.clear()
            fp8.quantize_tensor(x, value, **options, **directions)
            assert launched == [expected]


@where_kernels_run
@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (130, 257)], ids=str)
def test_one_launch_per_call(shape, run, launched):
    """Everything else that quantises takes one launch, and so does compute_amax; conversions of nothing
    launch nothing."""
    x, scale = run.array(x_of(shape=shape)), run.array(np.array([2.0], np.float32))
    both = fp8.cast_transpose(x, scale)
    nothing = 0 in shape
    for call, entries in (
            (lambda: fp8.cast_transpose(x, scale), ["cast_transpose"]),
            (lambda: fp8.cast_transpose(x, scale, out=both), ["cast_transpose"]),
            (lambda: fp8.quantize_tensor(x, scale, columnwise=True, transposed=False), ["cast"]),
            (lambda: DelayedScaling().quantize(x, scale=scale), ["cast"]),
            (lambda: DelayedScaling().quantize(x, scale=scale, columnwise=True), ["cast_transpose"]),
            (lambda: fp8.compute_amax(x), ["compute_amax"]),
            (lambda: fp8.compute_amax(x, out=scale), ["compute_amax"]),
            (lambda: fp8.astype(x, float8_e4m3fn), [] if nothing else ["convert"]),
            (lambda: fp8.transpose(both.data), [] if nothing else ["transpose"]),
            (both.dequantize, [] if nothing else ["convert"]),
            (parts(both)[1].dequantize, [] if nothing else ["dequantize_blocks_transposed"])):
        launched.clear()
        call()
        assert launched == entries


# ---- a CUDA graph contains everything that a call puts on its stream ----
def nodes_of(call: Callable[[], Any]) -> int:
    """Return the number of nodes of a captured call. It runs once before, to compile, and to fill the
    stream's memory pool."""
    cp = backend.cupy()
    cp.cuda.get_current_stream().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        try:
            # memory must not return to the pool before the capture ends
            kept = call()
        finally:
            graph = stream.end_capture()
        count = ctypes.c_size_t()
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.cuGraphGetNodes(ctypes.c_void_p(graph.graph), None, ctypes.byref(count)) == 0
    del kept
    return count.value


@pytest.mark.gpu
@direction_parameter
def test_empty_puts_nothing_on_the_stream(directions):
    cp = backend.cupy()
    assert nodes_of(lambda: DelayedScaling().empty((300, 500), like="cupy", **directions)) == 0
    x = cp.zeros((300, 500), cp.float32)
    out = fp8.quantize_tensor(x, 2.0, **directions)
    # the same count sees a kernel
    assert nodes_of(lambda: fp8.quantize_tensor(x, 2.0, out=out, **directions)) == 1


@pytest.mark.gpu
def test_one_node_per_call_with_out():
    cp = backend.cupy()
    x, scale = x_of("cupy", (130, 257)), cp.ones(1, cp.float32)
    amax, flag = cp.zeros(1, cp.float32), cp.zeros(1, cp.float32)
    both = fp8.cast_transpose(x, scale)
    values, data, flipped = both.dequantize(bfloat16), fp8.astype(x, float8_e4m3fn), fp8.transpose(both.data)
    for call in (lambda: fp8.cast_transpose(x, scale, amax=amax, noop=flag, out=both),
                 lambda: fp8.compute_amax(x, out=amax),
                 lambda: fp8.dequantize(both, dtype=bfloat16, out=values),
                 lambda: fp8.astype(x, float8_e4m3fn, out=data),
                 lambda: fp8.transpose(both.data, out=flipped)):
        assert nodes_of(call) == 1
