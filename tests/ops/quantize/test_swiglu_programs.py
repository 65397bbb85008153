"""The choice of SwiGLU's program, blocks of threads that take several tiles, and biases of experts."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from launches import Noted, note_launches
from test_swiglu import BLOCKS, CURRENT, DELAYED, MX, RECIPES, every_recipe, normal
from tiers import where_kernels_run

import cupy_fp8 as fp8
from cupy_fp8 import reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.calls.call import Call
from cupy_fp8.calls.row_segments import find_groups_of_rows
from cupy_fp8.formats import bfloat16, float8_e5m2, float16, float32
from cupy_fp8.kernels import Launch, Variant
from cupy_fp8.ops.quantize import fused
from cupy_fp8.testing import assert_bytes_equal

GPT_OSS: dict[str, Any] = {"form": "gpt_oss", "clamp": 1.5, "interleaved": True}
TORCHAO = fp8.MXScaling(profile="torchao", scale_layout="swizzled")
VLLM = fp8.BlockScaling(profile="vllm")


def path_of(variant: Variant) -> str | None:
    return dict(variant.defines).get("PATH")


def paths_of(launched: list[Noted]) -> list[str]:
    """Return the paths of launches that have one, each at its first occurrence."""
    return list(dict.fromkeys(filter(None, (path_of(one.variant) for one in launched))))


def check_both(run: Any, recipe: Any, x: np.ndarray, grad: np.ndarray | None, how: dict[str, Any]) -> None:
    """Check that y and, with grad, the gradients equal the reference."""
    given = {name: run.array(a) if isinstance(a, np.ndarray) else a for name, a in how.items()}
    assert_bytes_equal(fp8.swiglu_quantize(run.array(x), recipe, **given),
                       reference.swiglu_quantize(x, recipe, **how))
    if grad is not None:
        assert_bytes_equal(fp8.swiglu_backward_quantize(run.array(grad), run.array(x), recipe, **given),
                           reference.swiglu_backward_quantize(grad, x, recipe, **how))


# ---- programs ----
def misaligned(run: Any, a: np.ndarray) -> Any:
    """Return the same array at an address without wide accesses."""
    whole = run.array(np.concatenate([np.zeros(1, a.dtype), a.reshape(-1)]))
    return whole[1:].reshape(a.shape)


@pytest.mark.parametrize(("shape", "plain", "plain_backward"), [
    ((21, 512), "tiles", "tiles"), ((130, 64), "tiles", "options"), ((9, 36), "any", "any")])
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@every_recipe
def test_programs_agree(run, recipe, monkeypatch, shape, plain, plain_backward, dtype):
    """Calls without options have separate programs; a clamp beyond all values makes those with options
    compute the same, and rows without wide accesses the fallback. Gradients without whole tiles are an
    option. Types other than bf16 to e4m3 have one program for all of these except the fallback."""
    how, options = recipe
    launched = note_launches(monkeypatch)
    x, grad = normal(shape, dtype), normal((shape[0], shape[1] // 2), dtype, seed=1)
    probs = run.array(normal(shape[:1], seed=2))
    calls = [(run.array(x), None), (run.array(x), 1e30), (misaligned(run, x), None)]
    how_else = {"columnwise": True, "probs": probs, **options}
    forward = [fp8.swiglu_quantize(x, how, clamp=c, **how_else) for x, c in calls]
    forward_paths = paths_of(launched)
    launched.clear()
    backward = [fp8.swiglu_backward_quantize(run.array(grad), x, how, clamp=c, **how_else) for x, c in calls]
    if run.name != "reference":
        # a block would contain both da and db
        straddled = how is BLOCKS and shape[1] == 64
        want = [plain, "any" if plain == "any" else "options", "any"]
        want_backward = ["any"] if straddled else [plain_backward, *want[1:]]
        if dtype != bfloat16:
            want, want_backward = (["any" if path == "any" else "wide" for path in w]
                                   for w in (want, want_backward))
        assert forward_paths == list(dict.fromkeys(want))
        assert paths_of(launched) == list(dict.fromkeys(want_backward))
    assert_bytes_equal([forward[0], backward[0]] * 2, [forward[1], backward[1], forward[2], backward[2]])


OF_EXPERTS: dict[str, Any] = {"bias": np.zeros((2, 144), bfloat16), "splits": [3, 4]}


@pytest.mark.parametrize(("how", "half", "more", "path", "backward"), [
    (DELAYED, 72, {"scale": 1.0}, "rows", "options"), (DELAYED, 128, {"scale": 1.0}, "rows", "tiles"),
    (DELAYED, 128, {"scale": 1.0, "columnwise": True}, "tiles", "tiles"),
    (MX, 72, {}, "rows", "any"), (MX, 96, {}, "rows", "options"), (MX, 128, {}, "rows", "rows"),
    (MX, 72, GPT_OSS, "options", "options"), (MX, 100, GPT_OSS, "any", "any"),
    (MX, 72, {"clamp": float("inf")}, "rows", "any"), (BLOCKS, 96, {}, "rows", "any"),
    (BLOCKS, 96, GPT_OSS, "options", "options"), (BLOCKS, 256, {}, "rows", "rows"),
    (BLOCKS, 256, {"columnwise": True}, "tiles", "tiles"),
    (fp8.BlockScaling((1, 32)), 96, {}, "rows", "options"), (VLLM, 256, {}, "quotients", "any"),
    (VLLM, 256, GPT_OSS, "quotients", "any"), (VLLM, 100, GPT_OSS, "any", "any"),
    (fp8.BlockScaling(profile="vllm", dtype=float8_e5m2), 256, {}, "any", "any"),
    (fp8.MXScaling(float8_e5m2), 256, {}, "wide", "rows"),
    (fp8.MXScaling(float8_e5m2), 256, GPT_OSS, "wide", "wide"), (MX, 72, OF_EXPERTS, "experts", "any"),
    (BLOCKS, 72, OF_EXPERTS, "experts", "any"), (VLLM, 72, OF_EXPERTS, "quotients", "any")])
def test_which_call_takes_which_program(monkeypatch, how, half, more, path, backward):
    """Wide rows have separate programs; but no block may contain both da and db, and gradients have no
    quotients (vllm)."""
    launched = []
    monkeypatch.setattr(Launch, "start", lambda launch, *_: launched.append(path_of(launch.variant)))
    with testing.executor("host"):
        fp8.swiglu_quantize(np.zeros((8, 2 * half), bfloat16), how, **more)
        assert launched.pop() == path
        fp8.swiglu_backward_quantize(np.zeros((8, half), bfloat16), np.zeros((8, 2 * half), bfloat16), how,
                                     **more)
        assert launched.pop() == backward


@pytest.mark.parametrize("how", [DELAYED, CURRENT, BLOCKS, MX, TORCHAO], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_what_does_not_exist_counts_nowhere(run, how, interleaved):
    """Rows and columns of a tile beyond the array have no effect, although biases or weights are Inf or NaN
    there and would be NaN times 0."""
    options = {"scale": 1.0} if how is DELAYED else {}
    for rows, half in ((3, 40), (130, 200), (35, 96)):
        x, grad = normal((rows, 2 * half), bfloat16), normal((rows, half), bfloat16, 1)
        bias = normal((2 * half,), bfloat16, 2)
        bias[5], bias[11], bias[half + 20] = 3e38, np.inf, np.nan
        bias[half - 3] = bias[2 * half - 3] = 3e38
        # no value is then as large as that of a row of zeros
        x[:, 5], x[:, half - 3] = -3e38, -3e38
        probs = normal((rows,), seed=3)
        probs[1] = np.inf
        # nearly everything is clipped to 0, whatever the weight
        for clamp in (None, 2.0**-20):
            how_else: dict[str, Any] = {"bias": bias, "probs": probs, "clamp": clamp, "form": "gpt_oss",
                                        "interleaved": interleaved, "columnwise": True, **options}
            with np.errstate(all="ignore"):
                check_both(run, how, x, grad, how_else)


# ---- biases of experts ----
@pytest.mark.full
@pytest.mark.parametrize("half", [64, 27])
@pytest.mark.parametrize("rows", [[100, 0, 33, 1, 130], [0, 0], [264], [1] * 70])
def test_biases_of_experts_are_those_of_each_alone(run, half, rows):
    """Rows of no expert have none at all: -0 is unchanged."""
    x, bias = normal((270, 2 * half), bfloat16), normal((len(rows), 2 * half), bfloat16, seed=1)
    bits(x)[264:, ::3] = 0x8000
    grad = normal((270, half), bfloat16, seed=2)
    for how, options in RECIPES.values():
        if how is CURRENT:
            continue
        given = {"bias": run.array(bias), "splits": rows, **GPT_OSS, **options}
        q = run.numpy(fp8.swiglu_quantize(run.array(x), how, **given)).data
        back = run.numpy(fp8.swiglu_backward_quantize(run.array(grad), run.array(x), how, **given)[0]).data
        start = 0
        for own, count in zip([*bias, None], [*rows, 270 - sum(rows)], strict=True):
            here, options["bias"] = slice(start, start + count), own
            assert_bytes_equal(q[here], reference.swiglu_quantize(x[here], how, **GPT_OSS, **options).data)
            want, _ = reference.swiglu_backward_quantize(grad[here], x[here], how, **GPT_OSS, **options)
            assert_bytes_equal(back[here], want.data)
            start += count
        del options["bias"]


@pytest.mark.parametrize(("sizes", "rows"), [
    ([3, 0, 200], 300), ([-5, 7, 1 << 40, 9], 140), ([1 << 62, 1 << 62, 1 << 62], 129), ([], 1),
    ([0] * 100 + [5], 128), ([2] * 300, 600)])
def test_the_group_of_every_row(sizes, rows):
    """The kernel finds it from sizes on the device, which may be wrong. Rows of tiles beyond the end belong
    to none."""
    splits = np.array(sizes, np.int64)
    want, start = np.full(-(-rows // 128) * 128, 0xFFFFFFFF, np.uint32), 0
    for group, size in enumerate(sizes):
        end = min(start + max(size, 0), rows)
        want[start:end], start = group, end
    with testing.executor("host"):
        call = Call()
        call.read("x", np.zeros((rows, 1), float32), (float32,))
        found = find_groups_of_rows(call, call.splits("splits", splits), rows, 128)
        words = call.workspaces[0].array
        words[...] = 77
        found.launch.run()
    assert_bytes_equal(words[:len(want)], want)
    assert (words[len(want):] == 77).all()


# ---- blocks of threads that take several tiles ----
@pytest.fixture
def several_tiles(monkeypatch):
    """Give blocks several tiles, as in large arrays. Returns the path of each launch, and the number of tiles
    of its blocks."""
    monkeypatch.setattr(fused, "_ENOUGH_BLOCKS", 1)
    found, grid = [], fused._grid

    def noted(program: fused.Program, *given: Any) -> tuple[int, int]:
        blocks, tiles = grid(program, *given)
        found.append((program.path, tiles))
        return blocks, tiles

    monkeypatch.setattr(fused, "_grid", noted)
    return found


OF_COLUMNS = fp8.BlockScaling((1, 64), scale_layout="compact")
WITHOUT_OPTIONS = product((BLOCKS, fp8.BlockScaling((1, 32), profile="vllm"), OF_COLUMNS, MX, TORCHAO),
                          [False], [128, 129, 385, 900, 1024],
                          [(True, False), (True, True), (False, True)], [None])
WITH_OPTIONS = product((DELAYED, BLOCKS, OF_COLUMNS, VLLM, MX, TORCHAO), [True], [129, 900],
                       [(True, False), (True, True)], [None, 6])


@pytest.mark.full
@where_kernels_run
@pytest.mark.parametrize(("recipe", "with_options", "rows", "directions", "experts"),
                         [*WITHOUT_OPTIONS, *WITH_OPTIONS])
def test_tiles_one_below_the_other(run, several_tiles, recipe, with_options, rows, directions, experts):
    """Rows of the next tile are being loaded while this one is stored; the last tile, and the last block, may
    be short."""
    for dtype, half in ((bfloat16, 200 if with_options else 256), (float32, 136)):
        x, grad = normal((rows, 2 * half), dtype, 1), normal((rows, half), dtype, 3)
        how: dict[str, Any] = {"probs": normal((rows,), seed=2), "rowwise": directions[0],
                               "columnwise": directions[1]}
        if with_options:
            shape = (2 * half,) if experts is None else (experts, 2 * half)
            how |= {"bias": normal(shape, dtype, 4), **GPT_OSS}
        if experts is not None:             # some tiles have more than two
            how["splits"] = np.array([rows // 3, 17, 0, 9, rows // 3, 5])
        if recipe is DELAYED:
            how["scale"] = 0.5
        check_both(run, recipe, x, grad if with_options or not half % 128 else None, how)
    takes_rows = fused.ROWS in {path for path, _ in several_tiles}
    if run.name == "host" and rows >= 256 and (with_options or takes_rows):
        assert max(tiles for _, tiles in several_tiles) > 1


# ---- scales that include weights ----
@pytest.mark.parametrize("recipe", [
    BLOCKS, fp8.BlockScaling(dtype=float8_e5m2, eps=2.0**-30), fp8.BlockScaling((1, 32), profile="sglang"),
    MX, fp8.MXScaling(float8_e5m2, profile="torchao", scale_layout="swizzled")], ids=str)
@pytest.mark.parametrize("together", [1, 64])
def test_weights_of_any_size(run, recipe, together):
    """A row-wise scale includes the weight of its row if this changes no bit: not if weights or maxima are
    extreme, 0 or NaN. A warp does so if all of its rows allow it. together: number of similar rows."""
    weights = np.array([1, -1, 0, -0.0, np.nan, np.inf, -np.inf, 0.3, -3e38, 1e-45, 2.0**-41, 2.0**-40,
                        2.0**-39, 2.0**39, -(2.0**40), 1.7 * 2.0**39, 1e-38, -7.0], float32)
    exponents = np.array([0, -140, -126, -101, -100, -60, -59, -30, 20, 59, 60, 61, 100, 120], np.int32)
    if together > 1:
        weights, exponents = weights[[0, 7, 8, 9, 10, 12, 14, 15]], exponents[[0, 1, 4, 5, 8, 9, 12]]
    probs = np.repeat(weights, exponents.size * together)
    for columns in (128, 72):
        a, b = normal((probs.size, columns), seed=1), normal((probs.size, columns), seed=2)
        with np.errstate(over="ignore"):
            b = np.ldexp(b, np.tile(np.repeat(exponents, together), weights.size)[:, None]).astype(float32)
        b[::5, 3], b[::7, 40:] = 0, np.ldexp(b[::7, 40:], -70)          # some codes are 0, of both signs
        if together == 1:
            b[3::50, 9], b[7::60, 11] = np.inf, np.nan
        x = np.concatenate([a, b], axis=1)
        check_both(run, recipe, x, None, {"probs": probs})
