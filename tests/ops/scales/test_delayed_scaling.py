"""Delayed scaling: update_delayed_scaling against a loop over columns and rows, its errors, and large
histories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import backend, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases import values
from cupy_fp8.formats import FORMATS, float8_e4m3fn, float8_e5m2, float32
from cupy_fp8.ops.scales import scale as scale_ops
from cupy_fp8.testing import assert_bytes_equal

FLT_MAX = float(np.finfo(np.float32).max)
INF, NAN = float("inf"), float("nan")


def f32(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def next_step(history: np.ndarray, scale: np.ndarray, dtype: Any, margin: int, algo: str,
              amax: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Compute row by row, column by column, with Python's floats."""
    length, n = history.shape
    new_history, new_scale = history.copy(), scale.copy()
    for c in range(n):
        last = history[0, c]
        if amax is not None:
            if float(amax[c]) != 0:
                last = amax[c]
            if float(last) == 0:
                continue
        seen = [float(last)]
        if algo == "max":
            seen += [float(v) for v in history[1:, c]]
        a = max((v for v in seen if v == v), default=0.0)
        for i in range(1, length - 1):
            new_history[i, c] = history[i + 1, c]
        new_history[length - 1, c] = last
        new_history[0, c] = 0
        s = float(scale[c])
        if 0 < a < INF:
            with np.errstate(over="ignore"):
                s = float(np.float32(FORMATS[dtype].max * 2.0**-margin / a))
        if s in (INF, -INF):
            new_scale[c] = FLT_MAX
        elif 0 < a < INF:
            new_scale[c] = s
    return new_history, new_scale


def assert_updates(run: testing.Executor, history: np.ndarray, scale: np.ndarray, amax: np.ndarray
                   | None = None, *,
                   dtype: Any = float8_e4m3fn, margin: int = 0, algo: Any = "max") -> tuple[np.ndarray,
                                                                                            np.ndarray]:
    """Check that the op equals the loop, in place, and does not change amax. Returns the new history and
    scale."""
    desired = next_step(history, scale, dtype, margin, algo, amax)
    mine = run.array(history.copy()), run.array(scale.copy())
    buffer = None if amax is None else run.array(amax.copy())
    returned = fp8.update_delayed_scaling(*mine, dtype=dtype, margin=margin, algo=algo, amax=buffer)
    assert returned[0] is mine[0]
    assert returned[1] is mine[1]
    for actual, want in zip(mine, desired, strict=True):
        assert_bytes_equal(actual, want)
    if amax is not None:
        assert_bytes_equal(buffer, amax)
    return desired


#: Values in a column. With a length of 1 to 3, row 0, the other rows, amax and the scale take all
#: combinations.
SPECIAL = (0.0, -0.0, NAN, INF, 2.0**-149, 3.5, FLT_MAX, -3.5, -INF)
PREVIOUS = (1.0, 0.37, INF, -INF, NAN, 0.0)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("reduced", [False, True], ids=["plain", "reduced"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_special_values(run, length, reduced, algo):
    grid = np.meshgrid(*[f32(*SPECIAL)] * min(length, 2), f32(*PREVIOUS), *[f32(*SPECIAL)] * reduced,
                       indexing="ij")
    columns = [g.reshape(-1) for g in grid]
    rows: list[np.ndarray] = list(columns[:min(length, 2)])
    if length == 3:
        rows.append(np.roll(rows[1], 5))
    amax = columns[-1].copy() if reduced else None
    assert_updates(run, np.stack(rows), columns[min(length, 2)].copy(), amax, dtype=float8_e5m2, algo=algo)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("reduced", [None, "bits", "normal"], ids=str)
@pytest.mark.parametrize(("length", "n"), [(1, 1), (1, 40), (2, 33), (3, 64), (16, 100), (17, 512), (1024, 1),
                                           (1024, 2), (1025, 3),
                                           (511, 5), (513, 17), (4608, 1), (4609, 1), (9300, 2), (146, 32),
                                           (290, 65), (16, 1000)], ids=str)
def test_against_a_loop(run, length, n, reduced, algo):
    for kind in ("normal", "bits"):
        history, scale = values(kind, (length, n), float32), values("normal", (n,), float32, 1)
        history[0, ::3] = 0
        amax = None if reduced is None else values(reduced, (n,), float32, 2)
        if amax is not None:
            amax[::2] = 0
        assert_updates(run, history, scale, amax, margin=1, algo=algo)


def test_every_row_counts(run):
    """The maximum is found wherever it is, and the rows move by one: no two are alike."""
    for length, n in ((37, 3), (1500, 1), (70, 40)):
        for where in {*range(0, length, 11), 1, length - 1}:
            history = (1 + np.arange(length * n).reshape(length, n)).astype(np.float32)
            history[where] += 1e6
            new, scale = assert_updates(run, history, np.ones(n, np.float32))
            assert (scale < 448 / 1e6).all()
            assert sorted(new[1:].ravel().tolist()) == sorted(np.delete(history, 1 if length > 1 else 0,
                                                                        0).ravel().tolist())


def test_nothing_changes_where_both_are_zero(run):
    history, scale = f32(0, -0.0, 0, 5, 0).reshape(1, 5).repeat(4, 0), f32(NAN, INF, -2, 3, 4)
    history[1:] = 7
    amax = f32(0, 0, -0.0, 0, 2)
    new_history, new_scale = assert_updates(run, history, scale, amax)
    assert_bytes_equal(new_history[:, :3], history[:, :3])
    assert_bytes_equal(new_scale[:3], scale[:3])
    assert new_history[:, 3].tolist() == [0, 7, 7, 5]
    assert new_scale[3:].tolist() == [64, 64]


def test_nan_is_moved_bit_for_bit(run):
    history = np.array([[0xFFC12345, 1], [0x7F800001, 2], [0x7FC00000, 0x80000000]],
                       np.uint32).view(np.float32)
    new, _ = assert_updates(run, history, f32(1, 1))
    assert bits(new)[:, 0].tolist() == [0, 0x7FC00000, 0xFFC12345]


def test_columns_of_a_block():
    """Whole lines if there is enough parallelism, one column if a single history is long."""
    assert scale_ops._columns_log2(16, 512, 132) == 5
    assert scale_ops._columns_log2(1024, 10_000, 132) == 5
    assert scale_ops._columns_log2(1024, 1, 132) == 0
    assert scale_ops._columns_log2(1024, 512, 132) == 2
    for length in (1, 16, 1024, 100_000):
        for n in (1, 2, 3, 31, 32, 33, 1000, 1 << 40):
            log2 = scale_ops._columns_log2(length, n, 132)
            assert 0 <= log2 <= 5
            assert 1 << log2 < 2 * n


# ---- on a GPU ----
@pytest.mark.gpu
@pytest.mark.parametrize("reduced", [False, True], ids=["plain", "reduced"])
@pytest.mark.parametrize(("length", "n"), [(1024, 10_000), (16, 512), (1024, 512), (1024, 1), (1024, 133),
                                           (100_000, 3), (1, 100_003),
                                           (2049, 4111)], ids=str)
def test_large_histories(length, n, reduced):
    cp = backend.cupy()
    history, scale = np.abs(values("normal", (length, n), float32)), np.ones(n, np.float32)
    history[np.random.default_rng(1).integers(0, length, n),
            np.arange(n)] = np.random.default_rng(2).uniform(100, 1000, n)
    amax = np.abs(values("normal", (n,), float32, 3)) if reduced else None
    mine = cp.asarray(history), cp.asarray(scale)
    for _ in range(3):
        fp8.update_delayed_scaling(*mine, dtype=float8_e4m3fn, amax=None if amax is None
                                   else cp.asarray(amax))
        history, scale = reference.update_delayed_scaling(history, scale, dtype=float8_e4m3fn, amax=amax)
        for actual, want in zip(mine, (history, scale), strict=True):
            assert_bytes_equal(actual, want)
