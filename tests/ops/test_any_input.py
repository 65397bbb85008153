"""Ops on per-tensor data: any bits, shapes and scales that Hypothesis finds, any layout of memory, any order
of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import covering
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import needs_host, quick_if

import cupy_fp8 as fp8
from cupy_fp8 import Scaled, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases import OPS
from cupy_fp8.cases.covering import Recorded
from cupy_fp8.cli.selftest import check
from cupy_fp8.formats import BYTE_DTYPES, FORMATS, FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e5m2, float32
from cupy_fp8.layouts import swap_last

directions_of = st.sampled_from([
    dict(zip(("rowwise", "columnwise", "transposed"), flags, strict=True))
    for flags in ((True, False, True), (False, True, True), (True, True, True), (True, True, False),
                  (False, True, False))])


def matrices(a: np.ndarray) -> np.ndarray:
    return a if a.ndim >= 2 else a.reshape(1, -1)


@st.composite
def quantize_tensor(draw: Any) -> Any:
    x, scale, amax = draw(testing.arrays()), draw(testing.scales()), draw(st.floats(width=32))
    options = {"dtype": draw(st.sampled_from(FP8_DTYPES)), **(draw(directions_of) if x.ndim >= 2 else {})}
    given_scale = np.array([scale], np.float32) if draw(st.booleans()) else scale

    def call(m: Any) -> Any:
        seen = np.array([amax], np.float32)
        own = given_scale if m is fp8 else np.float32(scale)
        return m.quantize_tensor(x, own, amax=seen, **options), seen

    return call


@st.composite
def cast_transpose(draw: Any) -> Any:
    x, scale = matrices(draw(testing.arrays())), draw(testing.scales())
    dtype = draw(st.sampled_from(FP8_DTYPES))
    return lambda m: m.cast_transpose(x, np.float32(scale), dtype=dtype)


@st.composite
def dequantize(draw: Any) -> Any:
    data = draw(st.sampled_from(FP8_DTYPES).flatmap(testing.arrays))
    dtype = draw(st.sampled_from(INPUT_DTYPES))
    transposed = data.ndim >= 2 and draw(st.booleans())
    scale_inv = np.array([draw(testing.scales())], np.float32)
    s = Scaled(data, scale_inv, swap_last(data.shape) if transposed else data.shape, transposed)
    return lambda m: m.dequantize(s, dtype=dtype)


@st.composite
def astype(draw: Any) -> Any:
    a = draw(st.sampled_from(list(FORMATS)).flatmap(testing.arrays))
    to, saturate = draw(st.sampled_from(list(FORMATS))), draw(st.booleans())
    return lambda m: m.astype(a, to, saturate=saturate)


@st.composite
def transpose(draw: Any) -> Any:
    a = matrices(draw(st.sampled_from(BYTE_DTYPES).flatmap(testing.arrays)))
    return lambda m: m.transpose(a)


@st.composite
def compute_amax(draw: Any) -> Any:
    x, nan = draw(testing.arrays()), draw(st.sampled_from(["ignore", "propagate"]))
    return lambda m: m.compute_amax(x, nan=nan)


@needs_host
@pytest.mark.parametrize("op", [quantize_tensor, cast_transpose, dequantize, astype, transpose, compute_amax])
def test_any_call(op):
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(op())
    def equals_the_reference(call: Callable[[Any], Any]) -> None:
        with testing.executor("host"):
            testing.assert_bytes_equal(call(fp8), call(reference))

    equals_the_reference()


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # of 40 x 96 elements: 17 x 25
    "sliced": lambda a: a[3:20, 8:33],
    "stepped": lambda a: a[1:35:2, ::3][:, :25],
    "backwards": lambda a: a[::-1, ::-1][:17, :25],
    "transposed": lambda a: np.ascontiguousarray(a[:25, :17]).T,
    "fortran": lambda a: np.asfortranarray(a[:17, :25]),
    "broadcast": lambda a: np.broadcast_to(a[:1, :25], (17, 25)),
    "offset": lambda a: a.reshape(-1)[5 : 5 + 17 * 25].reshape(17, 25),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [bfloat16, float32], ids=str)
def test_any_layout(dtype, view, place):
    x = VIEWS[view](bits(cases.values("bits", (40, 96), dtype))).view(dtype)
    there, dense = place.array(x), np.ascontiguousarray(x)
    assert there.flags.c_contiguous == (view == "offset")
    for call in (lambda m, x: m.cast_transpose(x, 2.0), lambda m, x: m.quantize_tensor(x, 2.0),
                 lambda m, x: m.compute_amax(x), lambda m, x: m.astype(x, float8_e5m2)):
        testing.assert_bytes_equal(place.run.numpy(call(fp8, there)), call(reference, dense))
    testing.assert_bytes_equal(fp8.asnumpy(there), dense)


# ---- any order of threads ----
def check_in_order(chosen: Iterable[Recorded], order: str, seed: int,
                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_FP8_HOST_ORDER", order)
    monkeypatch.setenv("CUPY_FP8_HOST_SEED", str(seed))
    with testing.executor("host") as run:
        for one in chosen:
            check(OPS[one.case.op], one.case, run)


@needs_host
@pytest.mark.parametrize(("order", "seed"), quick_if(lambda how: how[1] == 0, [
    ("asc", 0), ("desc", 0), *(("random", seed) for seed in (0, 1, 2, 12345, 2**31))]))
def test_any_schedule(order, seed, monkeypatch):
    """Every entry point is run."""
    check_in_order(covering.entry_cases(), order, seed, monkeypatch)


@needs_host
@pytest.mark.full
@pytest.mark.parametrize(("order", "seed"), [("desc", 0), ("random", 1)])
@pytest.mark.parametrize("op", OPS)
def test_any_schedule_of_quick_cases(op, order, seed, monkeypatch):
    """Every option of an op is run."""
    check_in_order((one for one in covering.quick_cases() if one.case.op == op), order, seed, monkeypatch)
