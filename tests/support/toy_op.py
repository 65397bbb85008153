"""scale_rows, the example of CONTRIBUTING.md: an op defined outside the package, here and in toy_op.cu.

In the package each part would be a file of its own, named in the headings. `pytest -p toy_op` makes the
generic tests cover the op. Run as a program, this file is the op's selftest on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import cases
from cupy_fp8.__main__ import main
from cupy_fp8.arrays import Array
from cupy_fp8.calls.call import Call, Input, Op, run
from cupy_fp8.calls.descriptions import Description, one_array
from cupy_fp8.cases import ALIGNED_MATRIX, MATRIX, SHAPES, Case, Timed, source, values
from cupy_fp8.formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e4m3fn, float32, lookup
from cupy_fp8.kernels import Kernel, Launch, Variant, grid_size
from cupy_fp8.reference import numerics


# ---- cupy_fp8/reference/<family>/scale_rows.py ----
def reference(x: np.ndarray, scale: np.ndarray, dtype: Any = float8_e4m3fn) -> np.ndarray:
    """out[m, k] = narrow(fl(widen(x[m, k]) * scale[m]))."""
    return numerics.narrow(numerics.mul(numerics.widen(x), scale[:, None]), np.dtype(dtype))


# ---- cupy_fp8/ops/<family>/scale_rows.py ----
_THREADS = 256
#: In the package this is Kernel("<family>/scale_rows", …), for kernels_cu/<family>/scale_rows.cu.
_KERNEL = Kernel(Path(__file__).resolve().with_name("toy_op.cu"), "scale_rows", block=_THREADS)


def scale_rows(x: Array, scale: Array, dtype: Any = float8_e4m3fn, *, out: Array | None = None) -> Array:
    """Each row times its scale, as FP8: out[m, k] = narrow(fl(x[m, k] * scale[m])).

    x : bfloat16, float16 or float32 array [M, K].  scale : float32 array [M].
    dtype : float8_e4m3fn or float8_e5m2.  out : [M, K] of that dtype, written and returned.
    Raises TypeError, ValueError, DeviceError; nothing is written then. Bytes moved: every array once.

    >>> import numpy as np
    >>> scale_rows(np.ones((2, 2), np.float32), np.array([1, 300], np.float32)).astype(np.float32).tolist()
    [[1.0, 1.0], [288.0, 288.0]]
    """
    return run(_SCALE_ROWS, (x, scale, dtype), out)


class _Inputs(NamedTuple):
    x: Input
    scale: Input
    to: np.dtype[Any]


class _ScaleRows(Op[_Inputs]):
    def arguments(self, call: Call, x: Any, scale: Any, dtype: Any) -> _Inputs:
        to = lookup(dtype, FP8_DTYPES, "dtype").dtype
        inputs = _Inputs(call.read("x", x, INPUT_DTYPES), call.read("scale", scale, (float32,)), to)
        if inputs.x.array.ndim != 2:
            raise ValueError(f"x: expected an array of two dimensions, got shape {inputs.x.shape}")
        if inputs.scale.shape != inputs.x.shape[:1]:
            raise ValueError(f"scale: expected shape {inputs.x.shape[:1]}, got {inputs.scale.shape}")
        return inputs

    def result(self, inputs: _Inputs) -> Description:
        return one_array(inputs.x.shape, inputs.to)

    def reference(self, inputs: _Inputs) -> np.ndarray:
        return reference(inputs.x.array, inputs.scale.array, inputs.to)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        x = inputs.x.array
        if x.size:
            yield _KERNEL.variant(IN=x.dtype, OUT=inputs.to).bind(
                x, grid_size(-(-x.size // _THREADS), x.shape),
                x=inputs.x.at, scale=inputs.scale.at, out=written[0], n=x.size, columns=x.shape[1])


_SCALE_ROWS = _ScaleRows()


def variants() -> Iterator[Variant]:
    """Every variant that this op may launch."""
    for dtype, to in product(INPUT_DTYPES, FP8_DTYPES):
        yield _KERNEL.variant(IN=dtype, OUT=to)


# ---- cupy_fp8/cases/<family>/scale_rows.py ----
def _inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (source(case), values("edges", case.shape[:1], float32)), dict(case.options)


def _cases() -> Iterator[Case]:
    for dtype, to, shape in product(INPUT_DTYPES, FP8_DTYPES, (MATRIX, ALIGNED_MATRIX)):
        yield Case("scale_rows", dtype, shape, options={"dtype": to})
    for matrix in SHAPES:
        if len(matrix) == 2:
            yield Case("scale_rows", float32, matrix, "edges")
    for layout in ("offset", "strided"):
        yield Case("scale_rows", bfloat16, (40, 72), "normal", layout)


def _timed() -> Iterator[Timed]:
    for n in (4096, 16384):
        yield Timed("bf16→e4m3", Case("scale_rows", bfloat16, (n, n), "normal"))


SCALE_ROWS = cases.Registration(
    "scale_rows", scale_rows, reference, _inputs, _cases,
    "each row times its scale, as FP8",
    programs=(variants,),
    timed=_timed)


# In the package: register(SCALE_ROWS), so that importing the module of the cases registers the op.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Called by `pytest -p toy_op` before anything iterates over the ops."""
    cases.register(SCALE_ROWS)


# In the package: a line of tests/support/far_calls.py.
def pytest_configure() -> None:
    """Called by `pytest -p toy_op` before tests are collected."""
    from far_arrays import BLOCKS, FAR, Far
    from far_calls import CALLS, ON_DEVICE

    def call(m: Any, x: Array) -> Array:
        scale = np.full(len(x), 0.5, np.float32)
        return reference(x, scale) if m is fp8.reference else scale_rows(x, fp8.asarray(scale, like=x))

    far = Far(call, np.dtype(bfloat16), (FAR, 128), end=BLOCKS)
    CALLS["scale_rows"] = ON_DEVICE["scale_rows"] = far


if __name__ == "__main__":
    cases.register(SCALE_ROWS)
    sys.exit(main(["selftest", "scale_rows", "--full", "--executor", "host"]))
