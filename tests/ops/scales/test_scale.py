"""Scales from amax against exact division, delayed scaling against a loop over columns and rows, a training loop over both, and what
they refuse."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import oracle
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import DelayedScaling, DelayedScalingState, backend, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases import OPS, Case, poison, values
from cupy_fp8.cli.selftest import check
from cupy_fp8.formats import FORMATS, FP8_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float16, float32
from cupy_fp8.kernels import Variant
from cupy_fp8.ops.scales import scale as scale_ops
from cupy_fp8.reference import numerics
from cupy_fp8.testing import assert_bytes_equal

FLT_MAX = float(np.finfo(np.float32).max)
INF, NAN = float("inf"), float("nan")
LARGEST = {float8_e4m3fn: 448, float8_e5m2: 57344}
#: Every power of two that f32 has, subnormal ones included.
POWERS = np.array([2.0**e for e in range(-149, 128)])

dtypes = pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
pow2s = pytest.mark.parametrize("pow2", [False, True], ids=["any", "pow2"])


def f32(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


# ---- compute_scale ----
def exact_target(dtype: Any, margin: int) -> float:
    """The format's maximum times 2^-margin, rounded to f32, which keeps it: it has three significant bits."""
    exact = LARGEST[dtype] * Fraction(2) ** -margin
    return INF if exact > FLT_MAX else float(np.float32(float(exact)))


def expected_scales(amax: np.ndarray, dtype: Any, margin: int, eps: float, pow2: bool) -> np.ndarray:
    """By f64, whose quotient of two f32 rounds to the correctly rounded f32 (`test_f64_divides_exactly_enough`), and by search among
    the powers of two."""
    with np.errstate(invalid="ignore"):                                 # signalling NaN
        a = amax.astype(np.float64)
    a[a < float(np.float32(eps))] = float(np.float32(eps))
    usable = np.isfinite(a) & (a != 0)
    with np.errstate(over="ignore", under="ignore"):
        scale = (exact_target(dtype, margin) / a[usable]).astype(np.float32)
    scale[scale == np.inf] = FLT_MAX
    if pow2:
        found = np.searchsorted(POWERS, scale.astype(np.float64), side="right") - 1
        scale = np.where(scale > 0, POWERS[found], 0).astype(np.float32)
    out = np.ones(a.shape, np.float32)
    out[usable] = scale
    return out


def test_f64_divides_exactly_enough():
    """To the nearest f32, in fractions, for quotients of every magnitude and those nearest to ties."""
    rng = np.random.default_rng(0)
    amax = np.concatenate([rng.integers(1, 0x7F800000, 2000, np.uint32), 0x7F7FFFFF - np.arange(500, dtype=np.uint32)]).view(np.float32)
    for dtype, margin in ((float8_e4m3fn, 0), (float8_e5m2, 3), (float8_e4m3fn, 12)):
        found = expected_scales(amax, dtype, margin, 0.0, False)
        for a, s in zip(amax.tolist(), found, strict=True):
            exact = Fraction(exact_target(dtype, margin)) / Fraction(a)
            if exact > FLT_MAX:
                assert s == FLT_MAX
                continue
            error = abs(exact - Fraction(float(s)))
            for other in (np.nextafter(s, np.float32(0)), np.nextafter(s, np.float32(np.inf))):
                if np.isfinite(other) and other != s:
                    distance = abs(exact - Fraction(float(other)))
                    assert error < distance or (error == distance and int(s.view(np.uint32)) % 2 == 0)


@pow2s
@pytest.mark.parametrize("eps", [0.0, 2.0**-149, 1e-39, 1e-12, 0.37, 1e30])
@pytest.mark.parametrize("margin", [0, 1, 3, 12, 23, -2, -120, 158, 500])
@dtypes
def test_every_bfloat16_amax(run, dtype, margin, eps, pow2):
    amax = numerics.widen(oracle.patterns(oracle.HALVES[0]))
    assert amax.size == 1 << 16
    out = fp8.empty((1 << 16,), float32, like=run.array(amax))
    poison(out)
    options = {"dtype": dtype, "margin": margin, "eps": eps, "pow2_scale": pow2}
    assert fp8.compute_scale(run.array(amax), **options, out=out) is out
    assert_bytes_equal(out, expected_scales(amax, dtype, margin, eps, pow2))


@pow2s
@dtypes
def test_amax_around_the_edges(run, dtype, pow2):
    """f32 values near where the scale overflows, near powers of two of the scale, subnormal amax, the largest."""
    edges = [LARGEST[dtype] / FLT_MAX, FLT_MAX, 2.0**-126, 2.0**-149, *(LARGEST[dtype] * 2.0**e for e in range(-140, 100, 7))]
    near = np.concatenate([bits(f32(e)) + np.arange(-40, 41) for e in edges])
    amax = near[(near >= 0) & (near < 1 << 31)].astype(np.uint32).view(np.float32)
    for margin in (0, 2, 9, 20):
        got = fp8.compute_scale(run.array(amax), dtype=dtype, margin=margin, pow2_scale=pow2)
        assert_bytes_equal(got, expected_scales(amax, dtype, margin, 0.0, pow2))


@pytest.mark.parametrize(("amax", "options", "scale"), [
    (3.5, {}, 128.0), (448.0, {}, 1.0), (3.0, {}, float(np.float32(448 / 3))), (3.0, {"pow2_scale": True}, 128.0),
    (3.5, {"margin": 2}, 32.0), (3.5, {"margin": -1}, 256.0), (3.5, {"dtype": float8_e5m2}, 16384.0),
    (0.0, {}, 1.0), (-0.0, {}, 1.0), (INF, {}, 1.0), (NAN, {}, 1.0), (-NAN, {}, 1.0), (-3.5, {}, 1.0), (-INF, {}, 1.0),
    (0.0, {"eps": 3.5}, 128.0), (-0.0, {"eps": 3.5}, 128.0), (-INF, {"eps": 3.5}, 128.0), (NAN, {"eps": 3.5}, 1.0),
    (-NAN, {"eps": 3.5}, 1.0), (INF, {"eps": 3.5}, 1.0), (7.0, {"eps": 3.5}, 64.0), (3.5, {"eps": 3.5}, 128.0),
    (1e-45, {"eps": 1e-50}, FLT_MAX),
    (2.0**-149, {}, FLT_MAX), (2.0**-149, {"pow2_scale": True}, 2.0**127), (1e-37, {}, FLT_MAX), (0.0, {"pow2_scale": True}, 1.0),
    (2.0**-140, {"eps": 2.0**-126, "margin": 8}, 1.75 * 2.0**126),
    (FLT_MAX, {}, float(np.float32(448 / FLT_MAX))), (FLT_MAX, {"pow2_scale": True}, 2.0**-120),
    # Subnormal: the largest power of two below, never 0 unless the scale itself is.
    (2.0**127, {"margin": 9}, 1.75 * 2.0**-128), (2.0**127, {"margin": 9, "pow2_scale": True}, 2.0**-128),
    (2.0**127, {"margin": 30, "pow2_scale": True}, 2.0**-148), (2.0**127, {"margin": 31, "pow2_scale": True}, 2.0**-149),
    (2.0**127, {"margin": 32, "pow2_scale": True}, 0.0),
    (1.0, {"margin": 1000}, 0.0), (1.0, {"margin": -1000}, FLT_MAX), (1.0, {"margin": -(10**30), "pow2_scale": True}, 2.0**127),
], ids=str)
def test_values_written_out(run, amax, options, scale):
    assert_bytes_equal(fp8.compute_scale(run.array(f32(amax)), **options), f32(scale))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (2, 3, 5), (1027,)], ids=str)
def test_any_shape(run, shape):
    amax = values("bits", shape, float32)
    got = fp8.compute_scale(run.array(amax))
    assert_bytes_equal(got, expected_scales(amax.reshape(-1), float8_e4m3fn, 0, 0.0, False).reshape(shape))


def test_scale_of_an_amax_uses_the_whole_range(run):
    x = run.array(values("normal", (40, 72), bfloat16))
    amax = fp8.compute_amax(x)
    top = float(run.numpy(amax)[0])
    q = fp8.quantize_tensor(x, fp8.compute_scale(amax))
    assert np.abs(run.numpy(q).data.astype(np.float32)).max() == 448
    assert abs(float(run.numpy(q).scale_inv[0]) * 448 - top) <= top * 2.0**-22


# ---- update_delayed_scaling ----
def next_step(history: np.ndarray, scale: np.ndarray, dtype: Any, margin: int, algo: str,
              amax: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Row by row, column by column, with Python's floats."""
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
                s = float(np.float32(exact_target(dtype, margin) / a))
        if s in (INF, -INF):
            new_scale[c] = FLT_MAX
        elif 0 < a < INF:
            new_scale[c] = s
    return new_history, new_scale


def assert_updates(run: testing.Executor, history: np.ndarray, scale: np.ndarray, amax: np.ndarray | None = None, *,
                   dtype: Any = float8_e4m3fn, margin: int = 0, algo: str = "max") -> tuple[np.ndarray, np.ndarray]:
    """The op does what the loop does, in place, and leaves amax alone. Returns the new history and scale."""
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


#: What a column may hold; with a length of 1 to 3, all combinations of these for row 0, the other rows, amax and the scale.
SPECIAL = (0.0, -0.0, NAN, INF, 2.0**-149, 3.5, FLT_MAX, -3.5, -INF)
PREVIOUS = (1.0, 0.37, INF, -INF, NAN, 0.0)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("reduced", [False, True], ids=["plain", "reduced"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_special_values(run, length, reduced, algo):
    grid = np.meshgrid(*[f32(*SPECIAL)] * min(length, 2), f32(*PREVIOUS), *[f32(*SPECIAL)] * reduced, indexing="ij")
    columns = [g.reshape(-1) for g in grid]
    rows: list[np.ndarray] = list(columns[:min(length, 2)])
    if length == 3:
        rows.append(np.roll(rows[1], 5))
    amax = columns[-1].copy() if reduced else None
    assert_updates(run, np.stack(rows), columns[min(length, 2)].copy(), amax, dtype=float8_e5m2, algo=algo)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("reduced", [None, "bits", "normal"], ids=str)
@pytest.mark.parametrize(("length", "n"), [(1, 1), (1, 40), (2, 33), (3, 64), (16, 100), (17, 512), (1024, 1), (1024, 2), (1025, 3),
                                           (511, 5), (513, 17), (4608, 1), (4609, 1), (9300, 2), (146, 32), (290, 65), (16, 1000)], ids=str)
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
            assert sorted(new[1:].ravel().tolist()) == sorted(np.delete(history, 1 if length > 1 else 0, 0).ravel().tolist())


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
    history = np.array([[0xFFC12345, 1], [0x7F800001, 2], [0x7FC00000, 0x80000000]], np.uint32).view(np.float32)
    new, _ = assert_updates(run, history, f32(1, 1))
    assert bits(new)[:, 0].tolist() == [0, 0x7FC00000, 0xFFC12345]


def test_an_old_amax_leaves_after_history_len_steps(run):
    state = DelayedScalingState(1, DelayedScaling(history_len=4), like=run.array(f32(0)))
    seen = []
    for step in range(7):
        state.amax_history[0, 0] = 7.0 if step == 1 else 3.5
        state.update()
        seen.append(float(state.scale[0]))
    assert seen == [128, 64, 64, 64, 64, 128, 128]


def test_no_tensors(run):
    state = DelayedScalingState(0, DelayedScaling(history_len=5), like=run.array(f32(0)))
    state.update()
    state.update(run.array(f32()))
    assert state.amax_history.shape == (5, 0)


def test_columns_of_a_block():
    """Whole lines where there is parallelism enough, one column where a single history is long."""
    assert scale_ops._columns_log2(16, 512, 132) == 5
    assert scale_ops._columns_log2(1024, 10_000, 132) == 5
    assert scale_ops._columns_log2(1024, 1, 132) == 0
    assert scale_ops._columns_log2(1024, 512, 132) == 2
    for length in (1, 16, 1024, 100_000):
        for n in (1, 2, 3, 31, 32, 33, 1000, 1 << 40):
            log2 = scale_ops._columns_log2(length, n, 132)
            assert 0 <= log2 <= 5
            assert 1 << log2 < 2 * n


@pytest.mark.parametrize(("broken", "message"), [
    (lambda history, scale, **_: (history, scale), "^history: .* elements of float32"),
    (lambda *args, **options: reference.update_delayed_scaling(*args, **options), "^history was not returned"),
    (lambda history, scale, **options: (fp8.update_delayed_scaling(history, scale, **options)[0], scale.copy()), "^scale was not returned"),
], ids=["does nothing", "not in place", "returns a copy"])
def test_a_broken_update_is_caught(broken, message):
    """By the check that tests and selftest use for every op."""
    case = Case("update_delayed_scaling", float32, (5, 7), "normal", options={"dtype": float8_e4m3fn})
    with testing.executor("reference") as run, pytest.raises(AssertionError, match=message):
        check(dataclasses.replace(OPS["update_delayed_scaling"], function=broken), case, run)


# ---- the state, in training ----
@dtypes
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_training_loop(run, algo, dtype):
    """Three tensors over several steps: cast with the state's views, update, cast with the new scales. Against the formulas."""
    recipe = DelayedScaling(dtype, margin=1, history_len=3, algo=algo)
    state = DelayedScalingState(3, recipe, like=run.array(f32(0)))
    scales, histories = [1.0] * 3, [[0.0] * 3 for _ in range(3)]          # histories: oldest first
    outs = [recipe.empty((40, 72), columnwise=True, like=state.scale) for _ in range(3)]
    for step in range(6):
        for i in range(3):
            x = values("normal", (40, 72), bfloat16, seed=10 * step + i)
            if (i, step) == (2, 3):
                x[:] = 0
            q = recipe.quantize(run.array(x), columnwise=True, scale=state.scale[i:i + 1], amax=state.amax_history[0, i:i + 1], out=outs[i])
            assert q is outs[i]
            want = reference.quantize_tensor(x, np.float32(scales[i]), dtype=dtype, columnwise=True)
            assert_bytes_equal(q.data, want.data)
            assert_bytes_equal(q.scale_inv, want.scale_inv)
            histories[i] = [*histories[i][1:], float(np.abs(x.astype(np.float32)).max())]
            a = max(histories[i]) if algo == "max" else histories[i][-1]
            if a:
                scales[i] = float(np.float32(LARGEST[dtype] / 2 / a))
        state.update()
        assert run.numpy(state.scale).tolist() == scales
        assert run.numpy(state.amax_history)[0].tolist() == [0, 0, 0]
        assert run.numpy(state.amax_history)[1:].T.tolist() == [h[1:] for h in histories]


def test_training_loop_on_two_ranks(run):
    """Each rank casts its own part; both update with the maximum over the ranks and so keep equal scales and histories."""
    recipe = DelayedScaling(history_len=2)
    ranks = [DelayedScalingState(2, recipe, like=run.array(f32(0))) for _ in range(2)]
    for step in range(3):
        for rank, state in enumerate(ranks):
            for i in range(2):
                x = run.array(values("normal", (9, 11), float32, seed=100 * step + 10 * rank + i))
                recipe.quantize(x, scale=state.scale[i:i + 1], amax=state.amax_history[0, i:i + 1])
        reduced = np.maximum(*(run.numpy(state.amax_history)[0] for state in ranks))
        for state in ranks:
            state.update(run.array(reduced))
        assert_bytes_equal(ranks[0].scale, ranks[1].scale)
        assert_bytes_equal(ranks[0].amax_history, ranks[1].amax_history)
        assert run.numpy(ranks[0].amax_history)[1].tolist() == reduced.tolist()


def test_a_new_scale_never_changes_what_was_quantised(run):
    state = DelayedScalingState(2, DelayedScaling(history_len=2), like=run.array(f32(0)))
    q = state.recipe.quantize(run.array(values("normal", (16, 24), bfloat16)), columnwise=True, scale=state.scale[1:],
                              amax=state.amax_history[0, 1:])
    assert q.rowwise is not None
    assert q.columnwise is not None
    held = [run.numpy(a).copy() for part in (q.rowwise, q.columnwise) for a in part]
    values_before = run.numpy(q.dequantize()).copy()
    state.update()
    assert float(state.scale[1]) != 1
    bits(state.scale).fill(0x7FC00000)
    for before, now in zip(held, [a for part in (q.rowwise, q.columnwise) for a in part], strict=True):
        assert_bytes_equal(now, before)
    assert_bytes_equal(q.dequantize(), values_before)


def test_state_starts_at_one_and_zero(run):
    state = DelayedScalingState(5, DelayedScaling(float8_e5m2), like=run.array(f32(0)))
    assert_bytes_equal(state.scale, np.ones(5, np.float32))
    assert_bytes_equal(state.amax_history, np.zeros((1024, 5), np.float32))
    kind = "cupy" if run.name == "cuda" else "numpy"
    assert repr(state) == f"DelayedScalingState(5 tensors × 1024 steps, float8_e5m2, max, {kind})"


def test_state_uses_its_recipe(run):
    for recipe in (DelayedScaling(float8_e5m2, 3, 4, "most_recent"), DelayedScaling(margin=-1, history_len=2)):
        state = DelayedScalingState(1, recipe, like=run.array(f32(0)))
        for amax in (7.0, 3.5):
            state.amax_history[0, 0] = amax
            state.update()
        a = 3.5 if recipe.algo == "most_recent" else 7.0
        assert float(state.scale[0]) == LARGEST[recipe.dtype] / 2.0**recipe.margin / a


# ---- what is refused ----
Refused = Callable[..., None]


@pytest.fixture
def never_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(self: Variant, *_: Any) -> None:
        raise AssertionError(f"{self.kernel.entry} was launched")

    monkeypatch.setattr(Variant, "launch", launch)


@pytest.fixture(params=["reference", "host"])
def refused(request: pytest.FixtureRequest, never_launched: None) -> Iterator[Refused]:
    """The call raises `error` with a message that matches, and leaves its arrays as they were."""
    if problem := testing.executor_problem(request.param):
        pytest.skip(problem)

    def check(error: type[Exception], pattern: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        held = [a for a in (*args, *kwargs.values()) if isinstance(a, np.ndarray)]
        before = [a.tobytes() for a in held]
        with pytest.raises(error, match=pattern) as caught:
            function(*args, **kwargs)
        assert caught.type is error
        assert [a.tobytes() for a in held] == before, "memory was written"

    with testing.executor(request.param):
        yield check


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def read_only(a: np.ndarray) -> np.ndarray:
    a.flags.writeable = False
    return a


def misaligned(*shape: int) -> np.ndarray:
    return np.ones(int(np.prod(shape)) * 4 + 1, np.uint8)[1:].view(np.float32).reshape(shape)


@pytest.mark.parametrize(("args", "kwargs", "error", "message"), [
    (([1.0],), {}, TypeError, r"^amax: expected a numpy.ndarray or cupy.ndarray, got list \(cupy_fp8.asarray makes one\)"),
    ((1.0,), {}, TypeError, "^amax: expected a numpy.ndarray or cupy.ndarray, got float"),
    ((ones(3, dtype=np.float64),), {}, TypeError, "^amax: expected dtype float32, got float64"),
    ((ones(3, dtype=float16),), {}, TypeError, "^amax: expected dtype float32, got float16"),
    ((ones(3),), {"dtype": bfloat16}, TypeError, "^dtype: expected one of float8_e4m3fn, float8_e5m2, got bfloat16"),
    ((ones(3),), {"margin": 0.5}, TypeError, "^margin: expected an integer, got 0.5"),
    ((ones(3),), {"eps": "0"}, TypeError, "^eps: expected a number, got '0'"),
    ((ones(3),), {"eps": -1e-9}, ValueError, "^eps: expected a finite float32 of 0 or more, got -1e-09"),
    ((ones(3),), {"eps": NAN}, ValueError, "^eps: expected a finite float32 of 0 or more, got nan"),
    ((ones(3),), {"eps": INF}, ValueError, "^eps: expected a finite float32 of 0 or more, got inf"),
    ((ones(3),), {"eps": 1e39}, ValueError, "^eps: "),
    ((ones(3),), {"eps": 10**400}, ValueError, "^eps: "),
    ((ones(3),), {"out": [1.0]}, TypeError, "^out: expected a numpy.ndarray"),
    ((ones(3),), {"out": ones(3, dtype=float16)}, TypeError, "^out: expected dtype float32, got float16"),
    ((ones(3),), {"out": ones(4)}, ValueError, r"^out: expected shape \(3,\), got \(4,\)"),
    ((ones(3),), {"out": ones(3, 1)}, ValueError, r"^out: expected shape \(3,\), got \(3, 1\)"),
    ((ones(3),), {"out": ones(6)[::2]}, ValueError, "^out: expected a C-contiguous array"),
    ((ones(3),), {"out": read_only(ones(3))}, ValueError, "^out: the array is read-only"),
    ((ones(3),), {"out": misaligned(3)}, ValueError, "^out: address .* is not a multiple of the element size 4"),
])
def test_compute_scale_refuses(refused, args, kwargs, error, message):
    refused(error, message, fp8.compute_scale, *args, **kwargs)


def test_out_is_not_amax(refused):
    memory = ones(9)
    for out in (memory[:5], memory[4:]):
        refused(ValueError, "^out: overlaps amax in memory", fp8.compute_scale, memory[:5], out=out)


@pytest.mark.parametrize(("history", "scale", "kwargs", "error", "message"), [
    ([[1.0]], ones(1), {}, TypeError, "^history: expected a numpy.ndarray or cupy.ndarray, got list"),
    (ones(2, 3, dtype=float16), ones(3), {}, TypeError, "^history: expected dtype float32, got float16"),
    (ones(3), ones(3), {}, ValueError, r"^history: expected shape \[L, n\] with L of 1 or more, got \(3,\)"),
    (ones(2, 3, 1), ones(3), {}, ValueError, r"^history: expected shape \[L, n\].*got \(2, 3, 1\)"),
    (ones(0, 3), ones(3), {}, ValueError, r"^history: expected shape \[L, n\] with L of 1 or more, got \(0, 3\)"),
    (ones(3, 2).T, ones(3), {}, ValueError, "^history: expected a C-contiguous array"),
    (read_only(ones(2, 3)), ones(3), {}, ValueError, "^history: the array is read-only"),
    (misaligned(2, 3), ones(3), {}, ValueError, "^history: address .* is not a multiple"),
    (ones(2, 3), [1.0] * 3, {}, TypeError, "^scale: expected a numpy.ndarray"),
    (ones(2, 3), 1.0, {}, TypeError, "^scale: expected a numpy.ndarray or cupy.ndarray, got float"),
    (ones(2, 3), ones(3, dtype=np.float64), {}, TypeError, "^scale: expected dtype float32, got float64"),
    (ones(2, 3), ones(2), {}, ValueError, r"^scale: expected shape \(3,\), got \(2,\)"),
    (ones(2, 3), ones(1, 3), {}, ValueError, r"^scale: expected shape \(3,\), got \(1, 3\)"),
    (ones(2, 3), ones(6)[::2], {}, ValueError, "^scale: expected a C-contiguous array"),
    (ones(2, 3), read_only(ones(3)), {}, ValueError, "^scale: the array is read-only"),
    (ones(2, 3), ones(3), {"dtype": float16}, TypeError, "^dtype: expected one of float8_e4m3fn, float8_e5m2, got float16"),
    (ones(2, 3), ones(3), {"margin": 1.0}, TypeError, "^margin: expected an integer, got 1.0"),
    (ones(2, 3), ones(3), {"algo": "mean"}, ValueError, r"^algo: expected one of \('max', 'most_recent'\), got 'mean'"),
    (ones(2, 3), ones(3), {"amax": [1.0] * 3}, TypeError, "^amax: expected a numpy.ndarray"),
    (ones(2, 3), ones(3), {"amax": ones(3, dtype=float16)}, TypeError, "^amax: expected dtype float32, got float16"),
    (ones(2, 3), ones(3), {"amax": ones(4)}, ValueError, r"^amax: expected shape \(3,\), one for each column of history, got \(4,\)"),
    (ones(2, 3), ones(3), {"amax": ones(1, 3)}, ValueError, r"^amax: expected shape \(3,\).*got \(1, 3\)"),
])
def test_update_refuses(refused, history, scale, kwargs, error, message):
    refused(error, message, fp8.update_delayed_scaling, history, scale, **{"dtype": float8_e4m3fn, **kwargs})


def test_update_refuses_overlaps(refused):
    memory, options = ones(24), {"dtype": float8_e4m3fn}
    history = memory[4:16].reshape(4, 3)
    refused(ValueError, "^scale: overlaps history", fp8.update_delayed_scaling, history, memory[2:5], **options)
    refused(ValueError, "^scale: overlaps history", fp8.update_delayed_scaling, history, history[0], **options)
    refused(ValueError, "^history: overlaps amax", fp8.update_delayed_scaling, history, memory[:3], amax=history[0], **options)
    refused(ValueError, "^history: overlaps amax", fp8.update_delayed_scaling, history, memory[:3], amax=memory[15:18], **options)
    refused(ValueError, "^scale: overlaps amax", fp8.update_delayed_scaling, history, memory[17:20], amax=memory[19:22], **options)


class StandIn:
    """What the checks see of a CuPy array before they refuse it."""

    dtype, shape, size = float32, (3,), 3


def test_mixed_kinds(refused, monkeypatch):
    backend.gpu_problem()                               # asks the real CuPy, if there is one, and remembers
    module = types.ModuleType("cupy")
    module.ndarray = StandIn                            # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    mixed, options = ": a cupy array among numpy arrays; move it with cupy_fp8.asarray", {"dtype": float8_e4m3fn}
    refused(TypeError, f"^out{mixed}", fp8.compute_scale, ones(3), out=StandIn())
    refused(TypeError, f"^scale{mixed}", fp8.update_delayed_scaling, ones(2, 3), StandIn(), **options)
    refused(TypeError, f"^amax{mixed}", fp8.update_delayed_scaling, ones(2, 3), ones(3), amax=StandIn(), **options)


@pytest.mark.parametrize(("args", "error", "message"), [
    ((1.5, DelayedScaling()), TypeError, "^n: expected an integer, got 1.5"),
    ((-1, DelayedScaling()), ValueError, "^n: expected 0 or more tensors, got -1"),
    ((2, "max"), TypeError, "^recipe: expected a DelayedScaling, got str"),
    ((2, DelayedScaling), TypeError, "^recipe: expected a DelayedScaling, got type"),
])
def test_state_refuses(refused, args, error, message):
    refused(error, message, DelayedScalingState, *args, like="numpy")


def test_amax_need_not_be_contiguous(run):
    history, scale, amax = values("normal", (5, 7), float32), np.ones(7, np.float32), values("normal", (14,), float32, 2)
    desired = next_step(history, scale, float8_e4m3fn, 0, "max", amax[::2])
    mine = fp8.update_delayed_scaling(run.array(history.copy()), run.array(scale), dtype=float8_e4m3fn, amax=run.array(amax)[::2])
    for actual, want in zip(mine, desired, strict=True):
        assert_bytes_equal(actual, want)


# ---- on a GPU ----
@pytest.mark.gpu
@pytest.mark.full
def test_every_float32_amax():
    """All 2^32, in each option, against the reference."""
    cp, chunk = backend.cupy(), 1 << 24
    patterns, out = cp.arange(chunk, dtype=cp.uint32), cp.empty(chunk, cp.float32)
    options: tuple[dict[str, Any], ...] = (
        {}, {"pow2_scale": True}, {"dtype": float8_e5m2}, {"eps": 1e-12}, {"margin": 3}, {"margin": -3, "pow2_scale": True},
        {"dtype": float8_e5m2, "margin": 16, "eps": 1e-38, "pow2_scale": True})

    def check(start: int, got: list[np.ndarray]) -> None:
        amax = (np.arange(chunk, dtype=np.uint32) + np.uint32(start)).view(np.float32)
        for actual, chosen in zip(got, options, strict=True):
            with np.errstate(invalid="ignore"):                         # signalling NaN
                assert_bytes_equal(actual, reference.compute_scale(amax, **chosen))

    with ThreadPoolExecutor(8) as pool:
        pending = []
        for start in range(0, 1 << 32, chunk):
            got = []
            for chosen in options:
                poison(out)
                got.append(fp8.compute_scale((patterns + cp.uint32(start)).view(cp.float32), **chosen, out=out).get())
            pending.append(pool.submit(check, start, got))
            if len(pending) == 16:
                pending.pop(0).result()
        for done in pending:
            done.result()


@pytest.mark.gpu
@pytest.mark.parametrize("reduced", [False, True], ids=["plain", "reduced"])
@pytest.mark.parametrize(("length", "n"), [(1024, 10_000), (16, 512), (1024, 512), (1024, 1), (1024, 133), (100_000, 3), (1, 100_003),
                                           (2049, 4111)], ids=str)
def test_large_histories(length, n, reduced):
    cp = backend.cupy()
    history, scale = np.abs(values("normal", (length, n), float32)), np.ones(n, np.float32)
    history[np.random.default_rng(1).integers(0, length, n), np.arange(n)] = np.random.default_rng(2).uniform(100, 1000, n)
    amax = np.abs(values("normal", (n,), float32, 3)) if reduced else None
    mine = cp.asarray(history), cp.asarray(scale)
    for _ in range(3):
        fp8.update_delayed_scaling(*mine, dtype=float8_e4m3fn, amax=None if amax is None else cp.asarray(amax))
        history, scale = reference.update_delayed_scaling(history, scale, dtype=float8_e4m3fn, amax=amax)
        for actual, want in zip(mine, (history, scale), strict=True):
            assert_bytes_equal(actual, want)


@pytest.mark.gpu
@pytest.mark.full
def test_more_than_two_to_the_31_elements():
    """64-bit offsets: one value in each column, at a random row."""
    cp, length, n = backend.cupy(), 1024, (1 << 21) + 77
    history, scale = cp.zeros((length, n), cp.float32), cp.ones(n, cp.float32)
    rows = cp.asarray(np.random.default_rng(0).integers(0, length, n))
    history[rows, cp.arange(n)] = cp.arange(1, n + 1, dtype=cp.float32)
    fp8.update_delayed_scaling(history, scale, dtype=float8_e5m2)
    assert_bytes_equal(scale, np.float32(57344) / np.arange(1, n + 1, dtype=np.float32))
    moved = cp.where(rows == 0, length - 1, rows - 1)                  # row 1, the oldest, leaves
    stays = rows != 1
    columns = cp.arange(n)
    assert bool((history[moved[stays], columns[stays]] == columns[stays].astype(cp.float32) + 1).all())
    assert int(cp.count_nonzero(history)) == int(stays.sum())


@pytest.mark.gpu
@pytest.mark.parametrize("reduced", [False, True], ids=["plain", "reduced"])
def test_update_in_a_graph(reduced):
    """Captured once, replayed over changing contents at the same addresses."""
    cp, recipe = backend.cupy(), DelayedScaling(history_len=19)
    state = DelayedScalingState(70, recipe, like="cupy")
    amax = cp.zeros(70, cp.float32) if reduced else None
    state.update(amax)                                                  # the warm-up
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        state.update(amax)
        graph = stream.end_capture()
        history, scale = state.amax_history.get(), state.scale.get()
        for step in range(25):
            row = values("normal", (70,), float32, step)
            buffer = None if amax is None else np.where(np.arange(70) % 4 == 0, 0, np.abs(row)).astype(np.float32)
            state.amax_history[0] = cp.asarray(np.abs(row))
            history[0] = np.abs(row)
            if amax is not None:
                amax[...] = cp.asarray(buffer)
            graph.launch(stream)
            stream.synchronize()
            history, scale = reference.update_delayed_scaling(history, scale, dtype=float8_e4m3fn, amax=buffer)
            assert_bytes_equal(state.amax_history, history)
            assert_bytes_equal(state.scale, scale)


@pytest.mark.gpu
def test_a_training_step_in_a_graph():
    """Two casts and the update, captured once; every replay quantises the new x with the scale that the replays before found."""
    cp, recipe = backend.cupy(), DelayedScaling(history_len=3)
    state, mirror = (DelayedScalingState(2, recipe, like=kind) for kind in ("cupy", "numpy"))
    xs = [fp8.empty((64, 80), bfloat16, like="cupy") for _ in range(2)]
    outs = [recipe.empty((64, 80), columnwise=True, like="cupy") for _ in range(2)]

    def step() -> None:
        for i in range(2):
            recipe.quantize(xs[i], columnwise=True, scale=state.scale[i:i + 1], amax=state.amax_history[0, i:i + 1], out=outs[i])
        state.update()

    for x in xs:
        bits(x).fill(0)
    step()                                                              # the warm-up: of zeros, so the scales stay
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for n in range(8):
            for out in outs:
                poison(out.data)
                poison(out.scale_inv)
            sources = [values("normal", (64, 80), bfloat16, 2 * n + i) for i in range(2)]
            for x, source in zip(xs, sources, strict=True):
                bits(x).set(bits(source))
            graph.launch(stream)
            stream.synchronize()
            for i, source in enumerate(sources):
                want = recipe.quantize(source, columnwise=True, scale=mirror.scale[i:i + 1], amax=mirror.amax_history[0, i:i + 1])
                column, want_column = outs[i].columnwise, want.columnwise
                assert column is not None
                assert want_column is not None
                assert_bytes_equal(outs[i].data, want.data)
                assert_bytes_equal(column.data, want_column.data)
                assert_bytes_equal(outs[i].scale_inv, want.scale_inv)
            mirror.update()
            assert_bytes_equal(state.scale, mirror.scale)
            assert_bytes_equal(state.amax_history, mirror.amax_history)


@pytest.mark.gpu
def test_what_cannot_be_captured():
    cp = backend.cupy()
    state, amax = DelayedScalingState(3, DelayedScaling(history_len=2), like="cupy"), cp.ones(6, cp.float32)
    state.update()
    fp8.compute_scale(amax)
    calls: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: fp8.compute_scale(amax), "^out: needed while a CUDA graph is captured"),
        (lambda: state.update(amax[::2]), "^amax: not C-contiguous, and a copy cannot be made"))
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        for call, message in calls:
            stream.begin_capture()
            with pytest.raises(ValueError, match=message):
                call()
            stream.end_capture()


def test_formats_table_agrees():
    assert {dtype: FORMATS[dtype].max for dtype in FP8_DTYPES} == LARGEST
