"""What the ops promise beyond right bytes once: noop, out=, accumulation, any scale, any layout, any schedule; and on a GPU graphs,
streams, threads, devices, every float32 there is, and arrays past 2**31 elements."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cupy_fp8 as fp8
from cupy_fp8 import DelayedScaling, Quantized, Scaled, backend, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases import DIRECTIONS, OPS, Case
from cupy_fp8.cli.selftest import check
from cupy_fp8.formats import BYTE_DTYPES, FORMATS, FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float16, float32
from cupy_fp8.results import swap_last

NOTHING, POISON = 1.0, 0xAA
workspace = importlib.import_module("cupy_fp8.kernels.workspace")     # the module: the package has a function of that name
direction_parameter = pytest.mark.parametrize("directions", DIRECTIONS, ids=lambda d: "-".join(k for k, on in d.items() if on))


def one(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def parts(q: Quantized) -> list[Scaled]:
    return [part for part in (q.rowwise, q.columnwise) if part is not None]


def held(*results: Any) -> list[Any]:
    """Every array of results and arrays, each once."""
    arrays = [a for r in results for a in ([*(v for p in parts(r) for v in p), *([] if r.dbias is None else [r.dbias])]
                                           if isinstance(r, Quantized) else [r])]
    return list({id(a): a for a in arrays}.values())


def poison(*results: Any) -> None:
    for a in held(*results):
        cases.poison(a)


def raw(a: Any) -> bytes:
    return bytes(fp8.asnumpy(a).tobytes())


def is_poison(a: Any) -> bool:
    return set(raw(a)) <= {POISON}


def address(a: Any) -> int:
    return int(a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr)


def assert_same(actual: Quantized, desired: Quantized) -> None:
    for mine, theirs in ((actual.rowwise, desired.rowwise), (actual.columnwise, desired.columnwise)):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            testing.assert_bytes_equal(mine.data, theirs.data)
            testing.assert_bytes_equal(mine.scale_inv, theirs.scale_inv)
            assert (mine.shape, mine.transposed) == (theirs.shape, theirs.transposed)


# ---- noop ----
@pytest.mark.parametrize("shape", [(37, 70), (2, 5, 130), (0, 4)], ids=str)
@direction_parameter
def test_noop_of_one_writes_nothing(directions, shape, run):
    x, scale, amax, flag = (run.array(a) for a in (cases.values("bits", shape, bfloat16), one(3.0), one(-7.0), one(NOTHING)))
    out = fp8.quantize_tensor(x, scale, **directions)
    poison(out)
    before = raw(amax)
    assert fp8.quantize_tensor(x, scale, amax=amax, noop=flag, out=out, **directions) is out
    assert all(is_poison(a) for a in held(out))
    assert raw(amax) == before
    assert raw(flag) == raw(one(NOTHING))


@pytest.mark.parametrize("value", [0.0, 2.0, -1.0, float("nan"), float("inf"), np.nextafter(np.float32(1), np.float32(0)), 2.0**-149])
@direction_parameter
def test_any_other_noop_writes(directions, value, run):
    host = cases.values("normal", (37, 70), float32)
    x, scale, amax, flag = (run.array(a) for a in (host, one(3.0), one(0.0), one(value)))
    out = fp8.quantize_tensor(x, scale, **directions)
    poison(out)
    assert fp8.quantize_tensor(x, scale, amax=amax, noop=flag, out=out, **directions) is out
    assert_same(out, reference.quantize_tensor(host, one(3.0), **directions))
    testing.assert_bytes_equal(amax, reference.compute_amax(host))


def test_noop_is_looked_at_on_every_call(run):
    host = cases.values("normal", (5, 9), float32)
    x, flag, out = run.array(host), run.array(one(NOTHING)), run.array(fp8.cast_transpose(host, 1.0))
    for value in (1.0, 0.0, 1.0, 3.0):
        poison(out)
        flag.fill(value)
        fp8.cast_transpose(x, 2.0, noop=flag, out=out)
        if value == NOTHING:
            assert all(is_poison(a) for a in held(out))
        else:
            assert_same(out, reference.cast_transpose(host, 2.0))


# ---- out= ----
@direction_parameter
def test_a_result_is_written_in_place(directions, run):
    scale = run.array(one(0.7))
    out = fp8.quantize_tensor(run.array(cases.values("normal", (50, 60), bfloat16)), scale, **directions)
    objects, addresses = [id(a) for a in held(out)], [address(a) for a in held(out)]
    for seed in range(3):
        host = cases.values("bits", (50, 60), bfloat16, seed)
        poison(out)
        assert fp8.quantize_tensor(run.array(host), scale, out=out, **directions) is out
        assert [id(a) for a in held(out)] == objects
        assert [address(a) for a in held(out)] == addresses
        assert_same(out, reference.quantize_tensor(host, one(0.7), **directions))


def test_arrays_are_written_in_place(run):
    host = cases.values("normal", (30, 50), bfloat16)
    x = run.array(host)
    q = fp8.cast_transpose(x, 2.0)
    column = q.columnwise
    assert column is not None
    calls: list[tuple[Callable[..., Any], Any]] = [
        (lambda **k: fp8.astype(x, float8_e5m2, **k), reference.astype(host, float8_e5m2)),
        (lambda **k: fp8.transpose(q.data, **k), fp8.asnumpy(column.data)),
        (lambda **k: fp8.dequantize(q, **k), reference.dequantize(run.numpy(q))),
        (lambda **k: fp8.dequantize(column, dtype=float16, **k), reference.dequantize(run.numpy(q), dtype=float16)),
        (lambda **k: fp8.compute_amax(x, **k), reference.compute_amax(host)),
    ]
    for call, want in calls:
        out = call()
        testing.assert_bytes_equal(out, want)
        at = address(out)
        for _ in range(2):
            poison(out)
            assert call(out=out) is out
            assert address(out) == at
            testing.assert_bytes_equal(out, want)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_element_of_any_shape(shape, run):
    host = cases.values("normal", (20, 30), float32)
    x, out, scale, amax = (run.array(a) for a in (host, one(-1).reshape(shape), one(2).reshape(shape), one(0).reshape(shape)))
    assert fp8.compute_amax(x, out=out) is out
    assert out.shape == shape
    assert raw(out) == raw(reference.compute_amax(host))
    q = fp8.cast_transpose(x, scale, amax=amax)
    assert amax.shape == shape
    assert raw(amax) == raw(out)
    assert_same(q, reference.cast_transpose(host, 2.0))
    fp8.cast_transpose(x, scale, amax=amax, noop=run.array(one(NOTHING).reshape(shape)), out=q)


def test_separate_scale_inv_are_both_written(run):
    host = cases.values("normal", (33, 40), float16)
    x, scale = run.array(host), run.array(one(3.0))
    for transposed in (True, False):
        want = reference.cast_transpose(host, one(3.0), transposed=transposed)
        fresh = fp8.cast_transpose(x, scale, transposed=transposed)
        row, column = parts(fresh)
        out = Quantized(row, Scaled(column.data, fp8.empty_like(row.scale_inv), column.shape, column.transposed))
        poison(out)
        assert len({id(a) for p in parts(out) for a in p}) == (4 if transposed else 3)
        assert fp8.cast_transpose(x, scale, transposed=transposed, out=out) is out
        assert_same(out, want)


def test_empty_results_serve_as_out(run):
    host = cases.values("normal", (33, 40), float32)
    x = run.array(host)
    several: list[dict[str, Any]] = list(DIRECTIONS[:3])
    for directions in several:
        out = DelayedScaling().empty(host.shape, like=x, **directions)
        assert fp8.quantize_tensor(x, 2.0, out=out, **directions) is out
        assert_same(out, reference.quantize_tensor(host, 2.0, **directions))


def test_one_out_for_changing_inputs(run):
    """Same shape: any dtype. Another shape, output dtype or direction is an error, and the next fitting call works."""
    out = fp8.cast_transpose(run.array(cases.values("normal", (12, 20), bfloat16)), 2.0)
    for dtype in (float32, float16, bfloat16, float32):
        host = cases.values("normal", (12, 20), dtype)
        assert fp8.cast_transpose(run.array(host), 2.0, out=out) is out
        assert_same(out, reference.cast_transpose(host, 2.0))
        before = [raw(a) for a in held(out)]
        for shape in ((20, 12), (12, 21), (1, 12, 20), (0, 20)):
            with pytest.raises(ValueError, match=r"^out\.rowwise: expected per-tensor data of shape"):
                fp8.cast_transpose(run.array(np.zeros(shape, np.float32)), 2.0, out=out)
        with pytest.raises(TypeError, match=r"^out\.rowwise\.data: expected dtype float8_e5m2, got float8_e4m3fn"):
            fp8.cast_transpose(run.array(host), 2.0, dtype=float8_e5m2, out=out)
        with pytest.raises(ValueError, match=r"^out: has a columnwise part, but columnwise=False"):
            fp8.quantize_tensor(run.array(host), 2.0, out=out)
        assert [raw(a) for a in held(out)] == before


# ---- amax, scales ----
@direction_parameter
def test_amax_accumulates(directions, run):
    amax, seen = run.array(one(0.0)), 0.0
    for seed in range(4):
        host = cases.values("normal", (40, 70), bfloat16, seed)
        fp8.quantize_tensor(run.array(host), 2.0, amax=amax, **directions)
        seen = max(seen, float(reference.compute_amax(host)[0]))
        assert float(amax[0]) == seen
    fp8.quantize_tensor(run.array(np.zeros((40, 70), bfloat16)), 2.0, amax=amax, **directions)
    fp8.quantize_tensor(run.array(np.full((40, 70), np.nan, bfloat16)), 2.0, amax=amax, **directions)
    assert float(amax[0]) == seen
    fp8.quantize_tensor(run.array(np.full((40, 70), -np.inf, bfloat16)), 2.0, amax=amax, **directions)
    assert float(amax[0]) == np.inf


def test_compute_amax_does_not_accumulate(run):
    out = run.array(one(1e30))
    for value in (5.0, 2.0, 0.0):
        fp8.compute_amax(run.array(np.full((300, 70), -value, np.float32)), out=out)
        assert float(out[0]) == value


SCALAR_SCALES: list[Any] = [1, 3, 0, -2, 2**200, 0.37, -0.0, 1e300, -1e300, 1e-300, float("inf"), float("nan"), np.float32(0.37),
                            np.float64(0.1), np.float16(0.1), np.int8(-3), np.uint64(2**63), np.float64(1e39)]


@pytest.mark.parametrize("scale", SCALAR_SCALES, ids=repr)
def test_a_scalar_scale_is_its_float32(scale, run):
    host = cases.values("bits", (24, 40), float32)
    x = run.array(host)
    with np.errstate(over="ignore"):
        array = np.array([np.float32(scale)])
    want = reference.cast_transpose(host, array)
    assert_same(fp8.cast_transpose(x, scale), want)
    assert_same(fp8.cast_transpose(x, run.array(array)), want)
    assert_same(fp8.quantize_tensor(x, scale), reference.quantize_tensor(host, array))
    assert_same(DelayedScaling().quantize(x, scale=scale), reference.quantize_tensor(host, array))
    out = fp8.cast_transpose(x, 1.0)
    assert_same(fp8.cast_transpose(x, scale, out=out), want)


# ---- any input ----
needs_host = pytest.mark.skipif(testing.executor_problem("host") is not None, reason=str(testing.executor_problem("host")))
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
directions_strategy = st.sampled_from([{"rowwise": r, "columnwise": c, "transposed": t} for r, c, t in (
    (True, False, True), (False, True, True), (True, True, True), (True, True, False), (False, True, False))])


def on_host(call: Callable[[], Any]) -> Any:
    with testing.executor("host"):
        return call()


@needs_host
@few
@given(testing.arrays(), testing.scales(), st.sampled_from(FP8_DTYPES), directions_strategy, st.floats(width=32), st.booleans())
def test_any_quantize_tensor(x, scale, dtype, directions, start, as_array):
    if x.ndim < 2:
        directions = {}
    amax, amax_too = one(start), one(start)
    want = reference.quantize_tensor(x, np.float32(scale), dtype=dtype, amax=amax, **directions)
    given_scale = one(scale) if as_array else scale
    assert_same(on_host(lambda: fp8.quantize_tensor(x, given_scale, dtype=dtype, amax=amax_too, **directions)), want)
    testing.assert_bytes_equal(amax_too, amax)


@needs_host
@few
@given(testing.arrays(), testing.scales(), st.sampled_from(FP8_DTYPES))
def test_any_cast_transpose(x, scale, dtype):
    if x.ndim < 2:
        x = x.reshape(1, -1)
    want = reference.cast_transpose(x, np.float32(scale), dtype=dtype)
    out = on_host(lambda: fp8.cast_transpose(x, scale, dtype=dtype))
    assert_same(out, want)
    poison(out)
    assert_same(on_host(lambda: fp8.cast_transpose(x, scale, dtype=dtype, out=out)), want)


@needs_host
@few
@given(st.sampled_from(FP8_DTYPES).flatmap(testing.arrays), testing.scales(), st.sampled_from(INPUT_DTYPES), st.booleans())
def test_any_dequantize(data, scale_inv, dtype, transposed):
    transposed = transposed and data.ndim >= 2
    s = Scaled(data, one(scale_inv), swap_last(data.shape) if transposed else data.shape, transposed)
    testing.assert_bytes_equal(on_host(lambda: fp8.dequantize(s, dtype=dtype)), reference.dequantize(s, dtype=dtype))


@needs_host
@few
@given(st.sampled_from(list(FORMATS)).flatmap(testing.arrays), st.sampled_from(list(FORMATS)), st.booleans())
def test_any_astype(a, dtype, saturate):
    testing.assert_bytes_equal(on_host(lambda: fp8.astype(a, dtype, saturate)), reference.astype(a, dtype, saturate))


@needs_host
@few
@given(st.sampled_from(BYTE_DTYPES).flatmap(testing.arrays))
def test_any_transpose(a):
    if a.ndim < 2:
        a = a.reshape(-1, 1)
    testing.assert_bytes_equal(on_host(lambda: fp8.transpose(a)), reference.transpose(a))


@needs_host
@few
@given(testing.arrays(), st.sampled_from(["ignore", "propagate"]))
def test_any_compute_amax(x, nan):
    testing.assert_bytes_equal(on_host(lambda: fp8.compute_amax(x, nan=nan)), reference.compute_amax(x, nan=nan))


VIEWS: dict[str, Callable[[Any, Any], Any]] = {         # of a 40 x 96 array and its module: 17 x 25 elements
    "sliced": lambda a, xp: a[3:20, 8:33],
    "stepped": lambda a, xp: a[1:35:2, ::3][:, :25],
    "backwards": lambda a, xp: a[::-1, ::-1][:17, :25],
    "transposed": lambda a, xp: xp.ascontiguousarray(a[:25, :17]).T,
    "fortran": lambda a, xp: xp.asfortranarray(a[:17, :25]),
    "broadcast": lambda a, xp: xp.broadcast_to(a[:1, :25], (17, 25)),
    "offset": lambda a, xp: a.reshape(-1)[5 : 5 + 17 * 25].reshape(17, 25),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [bfloat16, float32], ids=str)
def test_any_layout(dtype, view, run):
    words = bits(cases.values("bits", (40, 96), dtype))
    dense = np.ascontiguousarray(VIEWS[view](words, np)).view(dtype)
    words = run.array(words)
    x = VIEWS[view](words, backend.module_of(words)).view(dtype)
    assert x.shape == (17, 25)
    assert x.flags.c_contiguous == (view == "offset")
    assert_same(fp8.cast_transpose(x, 2.0), reference.cast_transpose(dense, 2.0))
    assert_same(fp8.quantize_tensor(x, 2.0), reference.quantize_tensor(dense, 2.0))
    testing.assert_bytes_equal(fp8.compute_amax(x), reference.compute_amax(dense))
    testing.assert_bytes_equal(fp8.astype(x, float8_e5m2), reference.astype(dense, float8_e5m2))
    assert raw(x) == dense.tobytes()


@pytest.mark.parametrize("lead", [1, 2, 3])
def test_misaligned_numpy_input(lead):
    """An address that no kernel could load from: copied, like everything a kernel cannot read as it is."""
    for name in ("reference", "host"):
        if testing.executor_problem(name):
            continue
        with testing.executor(name):
            dense = cases.values("bits", (9, 31), float32)
            x = np.empty(dense.nbytes + lead, np.uint8)[lead:].view(np.float32).reshape(dense.shape)
            bits(x)[...] = bits(dense)
            assert_same(fp8.cast_transpose(x, 2.0), reference.cast_transpose(dense, 2.0))
            testing.assert_bytes_equal(fp8.compute_amax(x), reference.compute_amax(dense))


# ---- any schedule ----
def scheduled_cases() -> Iterator[Case]:
    for directions in DIRECTIONS:
        yield Case("quantize_tensor", bfloat16, (130, 257), "normal", options={"amax": 0.0, **directions})
    yield Case("cast_transpose", float32, (2, 133, 144), "bits", options={"amax": -1.0})
    yield Case("dequantize", float8_e4m3fn, (144, 264), options={"dtype": bfloat16, "transposed": True})
    yield Case("astype", float16, (33, 670), "edges", options={"to": float8_e4m3fn})
    yield Case("transpose", float8_e5m2, (272, 520))
    for nan in ("ignore", "propagate"):
        yield Case("compute_amax", float32, (257, 520), "bits", options={"nan": nan})


@needs_host
@pytest.mark.parametrize(("order", "seed"), [("asc", 0), ("desc", 0), *(("random", seed) for seed in (0, 1, 2, 12345, 2**31))])
def test_any_schedule(order, seed, monkeypatch):
    monkeypatch.setenv("CUPY_FP8_HOST_ORDER", order)
    monkeypatch.setenv("CUPY_FP8_HOST_SEED", str(seed))
    with testing.executor("host") as run:
        for case in scheduled_cases():
            check(OPS[case.op], case, run)


# ---- on a GPU: CUDA graphs ----
@dataclass
class Captured:
    """A call with out=: what it reads and may be changed between replays, and what it must then have written."""

    inputs: list[tuple[Any, Callable[[int], np.ndarray]]]       # a device array, and its contents by seed
    call: Callable[[], Any]
    outputs: list[Any]
    want: Callable[[int], list[np.ndarray]]


def capturable() -> Iterator[tuple[str, Callable[[], Captured]]]:
    shape = (130, 272)

    def quantize(directions: dict[str, Any], dtype: np.dtype, current: bool = False) -> Captured:
        x, scale, amax, flag = (fp8.asarray(a, like="cupy") for a in (cases.values("normal", shape, dtype), one(1), one(0), one(0)))
        out = fp8.quantize_tensor(x, None if current else scale, **directions)

        def values(seed: int) -> np.ndarray:
            return cases.values("bits", shape, dtype, seed)

        def scale_of(seed: int) -> np.ndarray:
            return one(0.3 + seed)

        def want(seed: int) -> list[np.ndarray]:
            seen = one(0)
            return [*held(reference.quantize_tensor(values(seed), None if current else scale_of(seed), amax=seen, **directions)), seen]

        return Captured([(x, values), (scale, scale_of), (amax, lambda seed: one(0)), (flag, lambda seed: one(0))],
                        lambda: fp8.quantize_tensor(x, None if current else scale, amax=amax, noop=flag, out=out, **directions),
                        [*held(out), amax], want)

    def plain(call: Callable[..., Any], expected: Callable[[np.ndarray], np.ndarray], dtype: np.dtype) -> Captured:
        def values(seed: int) -> np.ndarray:
            return cases.values("bits", shape, dtype, seed)

        x = fp8.asarray(values(0), like="cupy")
        out = call(x)
        return Captured([(x, values)], lambda: call(x, out=out), [out], lambda seed: [expected(values(seed))])

    def dequantize(transposed: bool) -> Captured:
        scale_inv = fp8.asarray(one(0.7), like="cupy")
        logical = swap_last(shape) if transposed else shape
        return plain(lambda data, **k: fp8.dequantize(Scaled(data, scale_inv, logical, transposed), dtype=bfloat16, **k),
                     lambda data: reference.dequantize(Scaled(data, one(0.7), logical, transposed), dtype=bfloat16), float8_e4m3fn)

    for directions in DIRECTIONS:
        name = "-".join(k for k, on in directions.items() if on)
        yield f"quantize_tensor-{name}", lambda directions=directions: quantize(directions, bfloat16)      # type: ignore[misc]
        yield f"current-{name}", lambda directions=directions: quantize(directions, bfloat16, True)         # type: ignore[misc]
        yield f"dbias-{name}", lambda directions=directions: quantize({**directions, "dbias": True}, bfloat16)      # type: ignore[misc]
    yield "current-dbias", lambda: quantize({"rowwise": True, "columnwise": True, "dbias": True}, float32, True)
    yield "cast_transpose", lambda: quantize({"rowwise": True, "columnwise": True}, float32)
    yield "compute_amax", lambda: plain(fp8.compute_amax, reference.compute_amax, bfloat16)
    yield "astype", lambda: plain(lambda a, **k: fp8.astype(a, float8_e5m2, **k), lambda a: reference.astype(a, float8_e5m2), float32)
    yield "transpose", lambda: plain(fp8.transpose, reference.transpose, float8_e4m3fn)
    yield "dequantize", lambda: dequantize(False)
    yield "dequantize-transposed", lambda: dequantize(True)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in capturable()])
def test_graph_replay(make):
    cp = backend.cupy()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        captured = make()
        captured.call()                                                     # the warm-up
        stream.synchronize()
        stream.begin_capture()
        captured.call()
        graph = stream.end_capture()
        for seed in (1, 2):
            for a, contents in captured.inputs:
                bits(a).set(bits(contents(seed)))
            reset = {id(a) for a, _ in captured.inputs}                     # an amax buffer is both
            poison(*(a for a in captured.outputs if id(a) not in reset))
            for replay in range(2):                                         # the second finds what the first left behind
                graph.launch(stream)
                stream.synchronize()
                for i, (actual, desired) in enumerate(zip(captured.outputs, captured.want(seed), strict=True)):
                    assert raw(actual) == desired.tobytes(), (seed, replay, i)


@pytest.mark.gpu
def test_graph_replay_obeys_noop():
    cp = backend.cupy()
    host = cases.values("normal", (100, 48), bfloat16)
    x, flag, amax = (fp8.asarray(a, like="cupy") for a in (host, one(0), one(0)))
    out = fp8.cast_transpose(x, 2.0)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        fp8.cast_transpose(x, 2.0, amax=amax, noop=flag, out=out)
        stream.begin_capture()
        fp8.cast_transpose(x, 2.0, amax=amax, noop=flag, out=out)
        graph = stream.end_capture()
        for value in (1.0, 0.0, 1.0):
            flag.fill(value)
            amax.fill(0)
            poison(out)
            graph.launch(stream)
            stream.synchronize()
            assert float(amax[0]) == (0.0 if value == NOTHING else float(reference.compute_amax(host)[0]))
            if value == NOTHING:
                assert all(is_poison(a) for a in held(out))
            else:
                assert_same(out, reference.cast_transpose(host, 2.0))


def refused_in_capture(call: Callable[[], Any], message: str) -> None:
    """The call raises ValueError while a stream is captured, and the capture ends as if it had not been made."""
    cp = backend.cupy()
    cp.cuda.get_current_stream().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(ValueError, match=message):
                call()
        finally:
            stream.end_capture()


@pytest.mark.gpu
def test_what_cannot_be_captured():
    cp = backend.cupy()
    x = cp.zeros((16, 48), cp.float32)
    x8 = fp8.astype(x, float8_e4m3fn)
    out, values, amax = fp8.quantize_tensor(x[:, ::2], 2.0), cp.zeros((16, 24), cp.float32), cp.zeros(1, cp.float32)
    fp8.compute_amax(x)
    refused_in_capture(lambda: fp8.compute_amax(x), "^out: needed while a CUDA graph is captured")
    strided = "not C-contiguous, and a copy cannot be made while a CUDA graph is captured"
    refused_in_capture(lambda: fp8.quantize_tensor(x[:, ::2], 2.0, out=out), f"^x: {strided}")
    refused_in_capture(lambda: fp8.compute_amax(x.T, out=amax), f"^x: {strided}")
    refused_in_capture(lambda: fp8.astype(x[:, ::2], float8_e4m3fn, out=out.data), f"^a: {strided}")
    refused_in_capture(lambda: fp8.transpose(x8.T, out=fp8.empty_like(x8)), f"^a: {strided}")
    refused_in_capture(lambda: fp8.dequantize(Scaled(x8[:, ::2], amax, (16, 24)), out=values), "^q.data: not C-contiguous")
    assert fp8.quantize_tensor(x[:, ::2], 2.0, out=out) is out              # and works again outside


# ---- on a GPU: devices, streams, threads ----
def gpu_count() -> int:
    return 0 if backend.gpu_problem() else int(backend.cupy().cuda.runtime.getDeviceCount())


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", [case for case in cases.all_cases() if case.shape == cases.MATRIX and case.values == "bits"], ids=str)
def test_an_array_of_another_device(case):
    """Ops run where their array is, whatever device is current; results and scratch memory are there too."""
    cp = backend.cupy()
    op = OPS[case.op]
    args, kwargs = op.inputs(case)
    desired = cases.outputs(op.reference(*args, **kwargs), kwargs)
    with testing.executor("cuda") as run:
        with cp.cuda.Device(1):
            args, kwargs = run.array_arguments(*op.inputs(case))
            cp.cuda.Device(1).synchronize()
        for current in (0, 1, 0):
            with cp.cuda.Device(current):
                if "amax" in kwargs:
                    with cp.cuda.Device(1):
                        kwargs["amax"].set(op.inputs(case)[1]["amax"])
                        cp.cuda.Device(1).synchronize()
                result = op.function(*args, **kwargs)
                assert cp.cuda.runtime.getDevice() == current
            cp.cuda.Device(1).synchronize()
            actual = cases.outputs(result, kwargs)
            with cp.cuda.Device(1):
                for name, a in actual.items():
                    assert a.data.device_id == 1, name
                    testing.assert_bytes_equal(a, desired[name])


@pytest.mark.gpu
def test_threads_with_streams_of_their_own():
    cp = backend.cupy()
    problems: list[BaseException] = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        try:
            stream = cp.cuda.Stream(non_blocking=True)
            with stream:
                host = cases.values("bits", (257, 528), bfloat16, seed)
                x, scale, amax = (fp8.asarray(a, like="cupy") for a in (host, one(0.5 + seed), one(0)))
                want, seen = reference.cast_transpose(host, one(0.5 + seed), dtype=float8_e5m2), reference.compute_amax(host)
                out = DelayedScaling(float8_e5m2).empty(host.shape, columnwise=True, like=x)
                start.wait()
                for _ in range(50):
                    fp8.cast_transpose(x, scale, dtype=float8_e5m2, amax=amax, out=out)
                    values, top, flipped = out.dequantize(), fp8.compute_amax(x), fp8.transpose(out.data)
                stream.synchronize()
                assert_same(out, want)
                testing.assert_bytes_equal(flipped, parts(want)[1].data)
                testing.assert_bytes_equal(values, reference.dequantize(want))
                for a in (amax, top):
                    testing.assert_bytes_equal(a, seen)
        except BaseException as error:
            problems.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


# ---- on a GPU: every float32, and arrays past 2**31 elements ----
CHUNK, BUCKET = 1 << 26, 1 << 16        # float32 patterns per launch; those that share their upper half


class Expected:
    """The reference's bytes for every float32. Rounding is monotonic in the magnitude, so a bucket whose first and last pattern
    give one byte gives it throughout; only the few others are computed in full."""

    def __init__(self, dtype: np.dtype) -> None:
        first = np.arange(1 << 16, dtype=np.uint32) << 16
        self.dtype = dtype
        self.byte, last = self.of(first), self.of(first | 0xFFFF)
        self.full = {int(b): self.of(first[b] | np.arange(BUCKET, dtype=np.uint32)) for b in np.flatnonzero(self.byte != last)}

    def of(self, patterns: np.ndarray) -> np.ndarray:
        return bits(reference.quantize_tensor(patterns.view(np.float32), np.float32(1), dtype=self.dtype).data)

    def differs(self, bucket: int, got: np.ndarray) -> str:
        """The first difference of a bucket's bytes, or nothing."""
        want = self.full.get(bucket, self.byte[bucket])
        wrong = np.flatnonzero(got != want)
        return f"{self.dtype} of {(bucket << 16) + int(wrong[0]):#010x}: {got[wrong[0]]:#04x} is wrong" if wrong.size else ""


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_buckets_are_the_reference(dtype):
    expected = Expected(dtype)
    assert 100 < len(expected.full) < 400
    some = np.random.default_rng(5).integers(0, 1 << 16, 40)
    for bucket in (*some.tolist(), *list(expected.full)[:5], 0, 0x7F7F, 0x7F80, 0x7FC0, 0x8000, 0xFF80, 0xFFFF):
        got = expected.of((np.uint32(bucket) << 16) | np.arange(BUCKET, dtype=np.uint32))
        assert expected.differs(bucket, got) == ""
        got[77] ^= 1
        assert "is wrong" in expected.differs(bucket, got)


def every_float32() -> None:
    """quantize_tensor (scale 1) of all 2**32 bit patterns, to both formats: bytes equal to the reference's."""
    cp = backend.cupy()
    one_on_gpu, patterns = cp.ones(1, cp.float32), cp.arange(CHUNK, dtype=cp.uint32)
    out = {dtype: DelayedScaling(dtype).empty(CHUNK, like=patterns) for dtype in FP8_DTYPES}
    expected = {dtype: Expected(dtype) for dtype in FP8_DTYPES}
    compared = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for first in range(0, 1 << 32, CHUNK):
            x = (patterns + cp.uint32(first)).view(cp.float32)
            for dtype in FP8_DTYPES:
                poison(out[dtype])
                fp8.quantize_tensor(x, one_on_gpu, dtype=dtype, out=out[dtype])
                got = fp8.asnumpy(out[dtype].data).view(np.uint8).reshape(-1, BUCKET)
                buckets = range(first // BUCKET, first // BUCKET + len(got))
                assert [text for text in pool.map(expected[dtype].differs, buckets, got) if text] == []
                compared += got.size
    print("compared", compared)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("bitcode", ["0", "1"], ids=["hardware", "bitcode"])
def test_every_float32(bitcode):
    """In a fresh process, since kernels compiled for the other conversions would be used again."""
    root = str(Path(fp8.__file__).resolve().parent.parent)
    path = os.pathsep.join(p for p in (root, str(Path(__file__).parent), os.environ.get("PYTHONPATH")) if p)
    env = os.environ | {"CUPY_FP8_BITCODE": bitcode, "PYTHONPATH": path}
    program = "import test_behaviour; test_behaviour.every_float32()"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"compared {2 * 2**32}\n"


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("shape", [((1 << 16) + 1, (1 << 15) + 8), (3, 29872, 24000)], ids=str)
def test_more_than_two_to_the_31_elements(shape):
    """The bytes at both ends, around 2**31, and at 200 000 other places, in both directions; and amax wherever the largest is."""
    cp = backend.cupy()
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    n = rows * columns
    assert n > 1 << 31
    words = cp.empty((rows, columns), np.uint16)
    words[...] = cp.asarray(bits(cases.values("normal", (columns,), bfloat16)))
    words += (cp.arange(rows, dtype=cp.uint32) % 61).astype(cp.uint16)[:, None]     # every row differs from its neighbours
    x, words = words.view(bfloat16).reshape(shape), words.reshape(-1)
    marked = [0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, n - 2, n - 1]
    picked = np.unique(np.concatenate([np.random.default_rng(3).integers(0, n, 200_000), marked]))
    top = int(np.array([3.0e4], bfloat16).view(np.uint16)[0])                       # above everything else
    words[n - 1] = top

    def sample(a: Any, at: np.ndarray) -> np.ndarray:
        return np.asarray(bits(a).reshape(-1)[cp.asarray(at)].get()).view(a.dtype)

    m, k = shape[-2:]
    matrix, inside = np.divmod(picked, m * k)
    flipped = matrix * m * k + inside % k * m + inside // k                         # where the picked elements are in transposed data
    want = reference.quantize_tensor(sample(x, picked), one(0.01))
    scale, amax = cp.full(1, 0.01, cp.float32), cp.zeros(1, cp.float32)
    largest = reference.compute_amax(sample(x, np.array([n - 1])))

    q = fp8.cast_transpose(x, scale, amax=amax)
    row, column = parts(q)
    testing.assert_bytes_equal(amax, largest)
    testing.assert_bytes_equal(q.scale_inv, want.scale_inv)
    for _ in range(2):
        testing.assert_bytes_equal(sample(row.data, picked), want.data)
        testing.assert_bytes_equal(sample(column.data, flipped), want.data)
        poison(q)
        fp8.quantize_tensor(x, scale, out=Quantized(row))
        fp8.quantize_tensor(x, scale, rowwise=False, columnwise=True, out=Quantized(None, column))

    testing.assert_bytes_equal(fp8.compute_amax(x), largest)
    words[n - 1] = 0
    for at in marked:
        words[at] = top
        testing.assert_bytes_equal(fp8.compute_amax(x), largest)
        words[at] = 0
    assert float(fp8.compute_amax(x)[0]) < float(largest[0])


def test_threads_that_share_a_stream_do_not_share_a_workspace(monkeypatch):
    """Their launches mix: what one call's first launch leaves for its second is not to be found by another's."""
    monkeypatch.setattr(workspace, "current_stream", lambda device: 0)
    monkeypatch.setattr(workspace, "_zeros", lambda device, words: np.zeros(words, np.uint32))
    x: Any = SimpleNamespace(data=SimpleNamespace(device_id=0))

    def words() -> Any:
        return workspace.workspace(None, x, "a test", 8)

    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(words).result()
        assert theirs is other.submit(words).result()
    assert words() is words()
    assert words() is not theirs


@pytest.mark.gpu
def test_a_workspace_lives_with_the_memory_it_serves():
    """Views come and go between calls, and between capture and replay; the array that owns the memory is what counts."""
    cp = backend.cupy()
    x, results = fp8.asarray(cases.values("normal", (64, 64), float32), like="cupy"), cp.zeros(4, cp.float32)
    want = reference.compute_amax(fp8.asnumpy(x))
    refused_in_capture(partial(fp8.compute_amax, x, out=results[1:2]), "call once before the capture")
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        fp8.compute_amax(x, out=results[1:2])
        places = [place for place in workspace._of_array if place[0] == id(results)]
        assert [place[:2] for place in places] == [(id(results), results.data.ptr + 4)]
        words = workspace._of_array[places[0]][1]
        stream.begin_capture()
        fp8.compute_amax(x, out=results[1:2])
        graph = stream.end_capture()
        assert workspace._of_array[places[0]][1] is words
        results.fill(7)
        graph.launch(stream)
        stream.synchronize()
    testing.assert_bytes_equal(results[1:2], want)
    assert results.get()[[0, 2, 3]].tolist() == [7, 7, 7]
    del results
    assert places[0] not in workspace._of_array


def test_calls_that_are_remembered_keep_no_array_alive():
    with testing.executor("host"):
        x = np.ones((64, 96), np.float32)
        gone = weakref.ref(x)
        for _ in range(2):
            fp8.quantize_tensor(x, 2.0, columnwise=True)
            fp8.compute_amax(x)
            fp8.quantize_mx(x, out=fp8.quantize_mx(x))
        del x
        gc.collect()
        assert gone() is None


@needs_host
@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
def test_a_scale_of_minus_zero_is_another_one(given):
    """Both zeros are equal and hash alike, but a remembered call with one is no call with the other."""
    x = np.array([[1, 2], [3, 4]], np.float32)
    with testing.executor("host"):
        out: dict[str, Any] = {"out": fp8.cast_transpose(x, 1.0)} if given else {}
        for _ in range(8):                          # memory of several alignments is remembered
            for scale in (0.0, -0.0):
                want = reference.cast_transpose(x, np.float32(scale))
                assert_same(fp8.cast_transpose(x, scale, **out), want)


@pytest.mark.gpu
def test_workspaces_are_not_inherited_with_an_address():
    """An array at the address of one that is gone gets workspaces that live as long as itself, not those that were remembered."""
    cp = fp8.xp
    x = cp.arange(1000, dtype=cp.float32)
    memory = cp.cuda.alloc(4)
    outs = []
    for _ in range(2):
        out = cp.ndarray((1,), cp.float32, memory)
        for _ in range(2):
            assert float(fp8.compute_amax(x, out=out)[0]) == 999
        outs.append(weakref.ref(out))
        owned = [entry for entry in importlib.import_module("cupy_fp8.kernels.workspace")._of_array.values() if entry[0]() is out]
        assert len(owned) == 1
        del out, owned
        gc.collect()
        assert outs[-1]() is None
