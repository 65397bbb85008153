"""DelayedScalingState in training: cast with its views, update, cast with the new scales; in a CUDA graph
too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_fp8 import DelayedScaling, DelayedScalingState, reference
from cupy_fp8.arrays import bits
from cupy_fp8.cases import poison, values
from cupy_fp8.formats import FORMATS, FP8_DTYPES, bfloat16, float8_e5m2, float32
from cupy_fp8.testing import assert_bytes_equal

LARGEST = {dtype: FORMATS[dtype].max for dtype in FP8_DTYPES}
dtypes = pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)


def f32(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


@dtypes
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_training_loop(run, algo, dtype):
    """Three tensors over several steps: cast with the state's views, update, cast with the new scales.
    Against the formulas."""
    recipe = DelayedScaling(dtype, margin=1, history_len=3, algo=algo)
    state = DelayedScalingState(3, recipe, like=run.array(f32(0)))
    scales, histories = [1.0] * 3, [[0.0] * 3 for _ in range(3)]          # histories: oldest first
    outs = [recipe.empty((40, 72), columnwise=True, like=state.scale) for _ in range(3)]
    for step in range(6):
        for i in range(3):
            x = values("normal", (40, 72), bfloat16, seed=10 * step + i)
            if (i, step) == (2, 3):
                x[:] = 0
            q = recipe.quantize(run.array(x), columnwise=True, scale=state.scale[i:i + 1],
                                amax=state.amax_history[0, i:i + 1], out=outs[i])
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
    """Each rank casts its own part; both update with the maximum over the ranks and so keep equal scales and
    histories."""
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
    q = state.recipe.quantize(run.array(values("normal", (16, 24), bfloat16)), columnwise=True,
                              scale=state.scale[1:],
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
    for recipe in (DelayedScaling(float8_e5m2, margin=3, history_len=4, algo="most_recent"),
                   DelayedScaling(margin=-1, history_len=2)):
        state = DelayedScalingState(1, recipe, like=run.array(f32(0)))
        for amax in (7.0, 3.5):
            state.amax_history[0, 0] = amax
            state.update()
        a = 3.5 if recipe.algo == "most_recent" else 7.0
        assert float(state.scale[0]) == LARGEST[recipe.dtype] / 2.0**recipe.margin / a


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


# ---- in a CUDA graph ----
def test_a_training_step_in_a_graph(device):
    """Two casts and the update, captured once; every replay quantises the new x with the scale that the
    replays before found."""
    recipe, like = DelayedScaling(history_len=3), device.array(np.zeros(1, np.float32))
    state, mirror = (DelayedScalingState(2, recipe, like=kind) for kind in (like, "numpy"))
    xs = [device.array(np.zeros((64, 80), bfloat16)) for _ in range(2)]
    outs = [recipe.empty((64, 80), columnwise=True, like=like) for _ in range(2)]

    def quantize(state: DelayedScalingState, i: int, x: Any, out: Any = None) -> Any:
        return recipe.quantize(x, columnwise=True, scale=state.scale[i:i + 1],
                               amax=state.amax_history[0, i:i + 1], out=out)

    def step() -> None:
        for i in range(2):
            quantize(state, i, xs[i], outs[i])
        state.update()

    step()                                              # amax is of zeros, so the scales are unchanged
    device.cupy.cuda.get_current_stream().synchronize()
    with device.cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for n in range(8):
            sources = [values("normal", (64, 80), bfloat16, 2 * n + i) for i in range(2)]
            for x, source, out in zip(xs, sources, outs, strict=True):
                bits(x)[...] = bits(device.array(source))
                poison(out.data)
                poison(out.scale_inv)
            graph.launch(stream)
            stream.synchronize()
            for i, source in enumerate(sources):
                assert_bytes_equal(outs[i], quantize(mirror, i, source))
            mirror.update()
            assert_bytes_equal(state.scale, mirror.scale)
            assert_bytes_equal(state.amax_history, mirror.amax_history)
