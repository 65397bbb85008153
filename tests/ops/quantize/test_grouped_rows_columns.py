"""group_quantize with a scale for every row, and for every column of each group. test_ops has the kernels' bytes."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from group_arrays import needs_host
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scale_arrays import guarded, raw

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, backend, cases, kernels, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.calls import call, row_segments
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e5m2, float16, float32
from cupy_fp8.grouped import Grouped
from cupy_fp8.kernels import Variant
from cupy_fp8.layouts import round_up, scale_shape

ROWS, COLUMNS = (1, None), (None, 1)
RECIPES: list[Any] = [
    *(BlockScaling(block, scale_layout=layout) for block, layout in product((ROWS, COLUMNS), ("gemm_ready", "compact", "deepgemm_sm90"))),
    *(BlockScaling(ROWS, profile=profile, scale_layout="compact") for profile in ("deepgemm", "tilekernels", "vllm", "sglang", "torchao")),
    BlockScaling(COLUMNS, float8_e5m2, eps=0.5, pow2_scale=False), BlockScaling(COLUMNS, profile="vllm", pow2_scale=True)]
DIRECTIONS: list[dict[str, Any]] = [
    {"rowwise": row, "columnwise": column} for row, column in ((True, False), (False, True), (True, True))]
PARTS = ("rowwise", "columnwise", "scale_inv", "columnwise_scale_inv", "offsets")


def described(g: Grouped) -> list[tuple[Any, Any, tuple[Any, Any]]]:
    """Data, scales and blocks of each direction that there is."""
    assert g.block is not None
    found = ((g.rowwise, g.scale_inv, g.block), (g.columnwise, g.columnwise_scale_inv, (g.block[1], g.block[0])))
    return [each for each in found if each[0] is not None]


def expect_groups(g: Grouped, x: np.ndarray, sizes: Any, recipe: Any, **directions: bool) -> None:
    """Data and scales are those of quantize_block of each group, one after the other. Of columns every group has a line of scales, without
    rows that of zeros; the rest is 0."""
    ends, layout = np.cumsum([0, *sizes]), recipe.scale_layout
    parts = [recipe.quantize(x[a:b], **directions) for a, b in pairwise(ends)]
    zeros = recipe.quantize(np.zeros((1, x.shape[1]), x.dtype), **directions)
    for name, (data, scale_inv, block) in zip([n for n, on in directions.items() if on], described(g), strict=True):
        of = [getattr(part, name) for part in parts]
        want = np.concatenate([np.zeros(0, np.uint8), *(bits(s.data).reshape(-1) for s in of)])
        got = raw(data)
        testing.assert_bytes_equal(got[: want.size], want)
        assert not got[want.size :].any()
        lines = [s.scale_inv if s.shape[0] or block != COLUMNS else getattr(zeros, name).scale_inv for s in of]
        scales = np.concatenate([np.zeros(0, np.float32), *(s.reshape(-1) for s in lines)])
        got = fp8.asnumpy(scale_inv)
        if block == COLUMNS:
            width = x.shape[1] if layout == "compact" else round_up(x.shape[1], 4)
            assert got.shape == (len(sizes), width)
        testing.assert_bytes_equal(got.reshape(-1)[: scales.size], scales)
        assert not got.reshape(-1)[scales.size :].any()
        for member, s in zip(g, of, strict=True):
            mine = getattr(member, name)
            assert (mine.shape, mine.transposed, mine.block, mine.scale_layout) == (s.shape, s.transposed, s.block, s.scale_layout)
            testing.assert_bytes_equal(mine.data, s.data)
            testing.assert_bytes_equal(mine.scale_inv, s.scale_inv)
    assert fp8.asnumpy(g.offsets).tolist() == (ends * x.shape[1]).tolist()


@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_groups_are_what_the_recipe_makes_of_them(run, recipe, directions):
    x = cases.values("edges", (300, 150), bfloat16)
    for sizes in ([130, 0, 1, 128], [0, 300], [300, 0], [0, 0, 0], []):
        g = fp8.group_quantize(run.array(x), sizes, recipe, **directions)
        expect_groups(g, x, sizes, recipe, **directions)
        assert repr(g.block) in repr(recipe)


def test_scales_by_their_formula(run):
    """torchao's: 448 / max(amax, 1e-12), of each row, and of each column of each group."""
    x, sizes = cases.values("normal", (200, 68), float32), [70, 0, 127]
    x[:, 5] = 0
    g = fp8.group_quantize(run.array(x), sizes, BlockScaling(ROWS, profile="torchao", scale_layout="compact"), columnwise=True)

    def inverses(amax: np.ndarray) -> np.ndarray:
        scale: np.ndarray = np.float32(448) / np.maximum(amax, np.float32(1e-12))
        return np.float32(1) / scale

    np.testing.assert_array_equal(fp8.asnumpy(g.scale_inv)[:197, 0], inverses(np.abs(x[:197]).max(axis=1)))
    amax = np.stack([np.abs(x[:70]).max(axis=0), np.zeros(68, np.float32), np.abs(x[70:197]).max(axis=0)])
    np.testing.assert_array_equal(fp8.asnumpy(g.columnwise_scale_inv), inverses(amax))
    got = fp8.asnumpy(g[2].columnwise.data).astype(np.float32)
    np.testing.assert_array_equal(got, (x[70:197].T * (np.float32(448) / np.maximum(amax[2], np.float32(1e-12)))[:, None]).clip(
        -448, 448).astype(float8_e4m3fn).astype(np.float32))


@pytest.mark.full
@needs_host
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 140), max_size=8), st.integers(1, 140), st.integers(0, 40), st.sampled_from(RECIPES),
       st.sampled_from(DIRECTIONS), st.sampled_from([1, 4, 8]), st.sampled_from([bfloat16, float16, float32]), st.integers(0, 3))
def test_any_groups(sizes, columns, spare, recipe, directions, multiple, dtype, lead):
    """At any address."""
    dtype = np.dtype(dtype)
    with testing.executor("host") as run:
        x, _ = guarded(run, (sum(sizes) + spare, columns * multiple), dtype, lead * dtype.itemsize)
        bits(x)[...] = bits(cases.values("bits", x.shape, dtype))
        g = fp8.group_quantize(x, sizes, recipe, **directions)
    expect_groups(g, x, sizes, recipe, **directions)


@needs_host
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 40), max_size=4), st.sampled_from([1024, 2048, 4096, 8192]), st.integers(-9, 9), st.integers(1, 3),
       st.sampled_from([bfloat16, float32]), st.booleans())
def test_any_length_of_rows(sizes, columns, more, times, dtype, divides):
    """Around what one, two, four and eight warps keep, and what one block takes; the largest element anywhere."""
    columns, recipe = columns * times + more, BlockScaling(ROWS, profile="vllm" if divides else "te")
    x = cases.values("normal", (sum(sizes), columns), np.dtype(dtype))
    x[np.arange(len(x)), np.random.default_rng(columns).integers(0, columns, len(x))] = 1000
    with testing.executor("host"):
        g = fp8.group_quantize(x, sizes, recipe)
    expect_groups(g, x, sizes, recipe, rowwise=True)


def test_the_order_of_groups_does_not_matter(run):
    """Nor how many others there are: only the bytes move."""
    x = cases.values("normal", (260, 72), bfloat16)
    recipe = BlockScaling(ROWS, scale_layout="compact")
    g = fp8.group_quantize(run.array(x), [100, 31, 129], recipe, columnwise=True)
    other = fp8.group_quantize(run.array(np.concatenate([x[131:], x[:100], x[100:131]])), [129, 0, 100, 31], recipe, columnwise=True)
    for i, j in ((0, 2), (1, 3), (2, 0)):
        for a, b in ((g[i].rowwise, other[j].rowwise), (g[i].columnwise, other[j].columnwise)):
            testing.assert_bytes_equal(a.data, b.data)
            testing.assert_bytes_equal(a.scale_inv, b.scale_inv)


def test_dequantize(run):
    x, sizes = cases.values("normal", (90, 40), bfloat16), [40, 0, 33]
    for block, directions in product((ROWS, COLUMNS), DIRECTIONS):
        recipe = BlockScaling(block)
        g = fp8.group_quantize(run.array(x), sizes, recipe, **directions)
        want = np.zeros((90, 40), np.float32)
        want[:40], want[40:73] = (recipe.quantize(x[a:b], **directions).dequantize() for a, b in ((0, 40), (40, 73)))
        testing.assert_bytes_equal(g.dequantize(), want)
        testing.assert_bytes_equal(fp8.dequantize(g), want)


@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
@pytest.mark.parametrize("block", [ROWS, COLUMNS], ids=str)
def test_sizes_may_change_in_place(run, block, directions, monkeypatch):
    """What an earlier call left in the result, or in its workspace, is gone; nothing else is written."""
    kept: dict[str, Any] = {}
    made = kernels.workspace
    monkeypatch.setattr(call, "workspace", lambda owner, x, use, words: kept.setdefault(use, made(owner, x, use, words)))
    splits, recipe = run.array(np.array([100, 3, 97])), BlockScaling(block)
    fresh = fp8.group_quantize(run.array(np.zeros((200, 136), np.float32)), splits, recipe, **directions)
    parts = {name: guarded(run, a.shape, a.dtype) for name in PARTS if (a := getattr(fresh, name)) is not None}
    out = Grouped(splits, shape=fresh.shape, block=fresh.block, scale_layout=fresh.scale_layout, **{n: a for n, (a, _) in parts.items()})
    for seed, sizes in enumerate(([100, 3, 97], [0, 150, 7], [1, 1, 1], [0, 0, 0], [200, 0, 0], [66, 67, 67])):
        x = cases.values("normal", (200, 136), float32, seed) * np.float32(10.0**-seed)
        bits(splits)[...] = run.array(np.array(sizes))
        for a, _ in parts.values():
            cases.poison(a)
        assert fp8.group_quantize(run.array(x), splits, recipe, **directions, check=True, out=out) is out
        expect_groups(out, x, sizes, recipe, **directions)
    assert all(intact() for _, intact in parts.values())


@needs_host
def test_launches(monkeypatch):
    """Rows alone: one; else one that finds groups and clears, one for the maxima, and one that quantises."""
    launched: list[str] = []
    monkeypatch.setattr(Variant, "launch", lambda self, *_, **__: launched.append(self.kernel.entry))
    monkeypatch.setattr(row_segments, "_MANY", 1000)
    x = cases.values("normal", (64, 128), bfloat16)
    with testing.executor("host"):
        for block, directions in ((ROWS, DIRECTIONS[0]), (ROWS, DIRECTIONS[2]), (COLUMNS, DIRECTIONS[0]), (COLUMNS, DIRECTIONS[1])):
            fp8.group_quantize(x, [10, 20], BlockScaling(block), **directions)
    assert launched == ["group_quantize_rows", *["group_find_segments", "group_quantize_lines", "group_quantize_lines"] * 3]


def test_noop_writes_nothing(run):
    x = run.array(cases.values("normal", (64, 128), bfloat16))
    for block, directions in product((ROWS, COLUMNS), DIRECTIONS):
        splits, recipe = run.array(np.array([10, 20])), BlockScaling(block)
        out = fp8.group_quantize(x, splits, recipe, **directions)
        held = [getattr(out, name) for name in PARTS if getattr(out, name) is not None]
        want = [raw(a) for a in held]
        for a in held:
            cases.poison(a)
        for value in (1.0, 0.0):
            fp8.group_quantize(x, splits, recipe, **directions, noop=run.array(np.array([value], np.float32)), out=out)
            for a, b in zip(held, want, strict=True):
                assert (raw(a).view(np.uint8) == 0xAA).all() if value else np.array_equal(raw(a), b)


@pytest.mark.parametrize("columns", [16, 5])
@pytest.mark.parametrize("offsets", [(0, 1, 3), (-1, 1, 2), (0, 2, 3), (2**60, -(2**63), 0)], ids=str)
def test_wrong_offsets_stay_within_the_arrays(run, offsets, columns, monkeypatch):
    """Of rows alone too. In tens of rows."""
    if run.name == "reference":
        pytest.skip("does not use them")
    monkeypatch.setattr("cupy_fp8.calls.splits.compare_offsets", lambda *_: None)
    x = cases.values("normal", (30, columns), bfloat16)
    given_offsets = run.array(np.array([max(-(2**63), min(10 * columns * n, 2**63 - 1)) for n in offsets]))
    for block, directions in product((ROWS, COLUMNS), DIRECTIONS):
        recipe = BlockScaling(block)
        right = fp8.group_quantize(x, [10, 20], recipe, **directions)
        parts = {name: guarded(run, a.shape, a.dtype) for name in PARTS[:4] if (a := getattr(right, name)) is not None}
        out = Grouped(run.array(np.array([10, 20])), given_offsets, (30, columns), block=block, scale_layout=right.scale_layout,
                      **{name: a for name, (a, _) in parts.items()})
        fp8.group_quantize(run.array(x), out.splits, recipe, **directions, offsets=given_offsets, out=out)
        assert all(intact() for _, intact in parts.values())
        assert bool(fp8.device_errors(clear=True)) == (offsets != (0, 1, 3))
        if offsets == (0, 1, 3):
            expect_groups(out, x, [10, 20], recipe, **directions)


def test_refusals_write_nothing():
    x, splits = cases.values("normal", (30, 128), bfloat16), np.array([10, 20])
    out = fp8.group_quantize(x, splits, BlockScaling(ROWS), columnwise=True)
    assert out.columnwise_scale_inv is not None
    short = Grouped(splits, out.offsets, out.shape, out.rowwise, out.columnwise, out.scale_inv, out.columnwise_scale_inv[:1], ROWS,
                    "gemm_ready")
    for name in PARTS:
        cases.poison(getattr(out, name))
    for message, options in (
            ("scales, amaxes: belong to per-tensor recipes", {"scales": np.ones(2, np.float32)}),
            (r"out: expected block \(None, 1\), got \(1, None\)", {"recipe": BlockScaling(COLUMNS)}),
            ("out: expected scale_layout compact, got gemm_ready", {"recipe": BlockScaling(ROWS, scale_layout="compact")}),
            ("out.columnwise: expected none for these options, got one", {"columnwise": False}),
            (r"out\.columnwise_scale_inv: expected shape \(2, 128\), got \(1, 128\)", {"out": short})):
        given_options: dict[str, Any] = {"recipe": BlockScaling(ROWS), "columnwise": True, "out": out, **options}
        with pytest.raises(ValueError, match="^" + message):
            fp8.group_quantize(x, splits, given_options.pop("recipe"), **given_options)
    assert all((raw(getattr(out, name)).view(np.uint8) == 0xAA).all() for name in PARTS)


@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[4]], ids=str)
def test_saved_and_loaded(recipe, tmp_path):
    x, sizes = cases.values("normal", (90, 71), bfloat16), np.array([40, 0, 33])
    g = fp8.group_quantize(x, sizes, recipe, columnwise=True)
    fp8.save(tmp_path / "groups.npz", g=g)
    expect_groups(fp8.load(tmp_path / "groups.npz")["g"], x, sizes, recipe, rowwise=True, columnwise=True)
    damaged = Grouped(**{**g.__getstate__(), "scale_inv": g.columnwise_scale_inv})
    fp8.save(tmp_path / "damaged.npz", g=damaged)
    with pytest.raises(ValueError, match=r"g\.scale_inv: expected .*float32 of shape"):
        fp8.load(tmp_path / "damaged.npz")


def test_members_without_rows_have_no_scales():
    """Whatever the line that is kept for them."""
    g = fp8.group_quantize(np.ones((9, 6), np.float32), [4, 0, 5], BlockScaling(COLUMNS, scale_layout="compact", profile="torchao"))
    assert [member.rowwise.scale_inv.shape for member in g] == [(1, 6), scale_shape((0, 6), COLUMNS, "compact"), (1, 6)]
    one = np.float32(1)
    want = one / (np.float32(448) / np.array([1, 1e-12, 1], np.float32))
    assert g.scale_inv is not None
    np.testing.assert_array_equal(g.scale_inv, np.repeat(want[:, None], 6, axis=1))
    assert repr(g) == "Grouped(float8_e4m3fn[9, 6] in 3 groups, block column×1, compact scales, rowwise, numpy)"


# ---- on a GPU ----
@pytest.mark.gpu
@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
@pytest.mark.parametrize("block", [ROWS, COLUMNS], ids=str)
def test_graph_replay_follows_the_sizes(block, directions, monkeypatch):
    cp = backend.cupy()
    x, recipe = cases.values("normal", (500, 144), bfloat16), BlockScaling(block)
    for many in (row_segments._MANY, 0):                               # runs found by the blocks that take them, and before
        monkeypatch.setattr(row_segments, "_MANY", many)
        on_gpu, splits = fp8.asarray(x, like="cupy"), cp.asarray([200, 0, 300])
        out = fp8.group_quantize(on_gpu, splits, recipe, **directions)
        fp8.group_quantize(on_gpu, splits, recipe, **directions, out=out)        # makes its workspace
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture()
            fp8.group_quantize(on_gpu, splits, recipe, **directions, out=out)
            graph = stream.end_capture()
            for sizes in ([100, 17, 300], [0, 0, 500], [499, 0, 0]):
                splits.set(np.array(sizes))
                for name in PARTS:
                    if getattr(out, name) is not None:
                        cases.poison(getattr(out, name))
                graph.launch(stream)
                stream.synchronize()
                expect_groups(out, x, sizes, recipe, **directions)
    assert fp8.device_errors() == ()


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("columnwise", [False, True])
def test_more_than_two_to_the_31_elements(columnwise):
    cp = backend.cupy()
    rows, columns, splits = 33_000, 65_536, [5, 32_768, 0, 200]
    x = fp8.full((rows, columns), 1.0, bfloat16, like="cupy")
    bits(x)[-30, 7] = int(np.array(4.0, bfloat16).view(np.uint16))
    out = fp8.group_quantize(x, splits, BlockScaling(ROWS, scale_layout="compact"), columnwise=columnwise)
    of_rows = np.zeros((rows, 1), np.float32)
    of_rows[: sum(splits)] = 2.0**-8
    of_rows[-30] = 2.0**-6
    testing.assert_bytes_equal(out.scale_inv, of_rows)
    codes = reference.astype(np.array([256, 64], np.float32), float8_e4m3fn).view(np.uint8).tolist()
    end, data = sum(splits) * columns, bits(out.rowwise)
    assert [int((data == code).sum()) for code in codes] == [end - columns + 1, columns - 1]
    assert not bool(data[end:].any())
    if columnwise:
        of_columns = np.full((4, columns), 2.0**-8, np.float32)
        of_columns[2], of_columns[3, 7] = 1, 2.0**-6
        testing.assert_bytes_equal(out.columnwise_scale_inv, of_columns)
        data = bits(out.columnwise)
        assert [int((data == code).sum()) for code in codes] == [end - 199, 199]
        assert not bool(data[end:].any())
        assert int(bits(out[3].columnwise.data)[7, rows - 30 - 32_773]) == codes[0]
    assert cp.all(bits(out.splits) == cp.asarray(splits))
