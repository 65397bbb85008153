"""group_quantize in blocks: every group is what the recipe makes of its rows, whatever the others are. test_ops has the kernels' bytes,
test_group_lines blocks of whole lines."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scale_arrays import raw

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, MXScaling, backend, cases, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import bfloat16, float8_e5m2, float32
from cupy_fp8.grouped import Grouped
from cupy_fp8.kernels import Variant
from cupy_fp8.layouts import group_scales, group_unit, grouped_scale_shape, scale_shape

needs_host = pytest.mark.skipif(testing.executor_problem("host") is not None, reason=str(testing.executor_problem("host")))
RECIPES: list[Any] = [
    *(BlockScaling(block, scale_layout=layout) for block, layout in product(((1, 128), (128, 1), (1, 32)), ("gemm_ready", "compact"))),
    *(BlockScaling((128, 128), scale_layout=layout) for layout in ("gemm_ready", "compact")), BlockScaling(profile="vllm"),
    BlockScaling(dtype=float8_e5m2, profile="deepgemm", scale_layout="deepgemm_sm90"),
    *(MXScaling(block=block, scale_layout=layout) for block, layout in product(((1, 32), (32, 32)), ("compact", "swizzled")))]
DIRECTIONS = [{"rowwise": row, "columnwise": column} for row, column in ((True, False), (False, True), (True, True))]
#: Names of a Grouped's arrays that a call writes.
PARTS = ("rowwise", "columnwise", "scale_inv", "columnwise_scale_inv", "offsets")


def expect_members(g: Grouped, x: np.ndarray, sizes: Any, recipe: Any, **directions: bool) -> None:
    """Every member is what the recipe makes of its rows; the rest is 0, scales too."""
    ends = np.cumsum([0, *sizes])
    held = {"rowwise": 0, "columnwise": 0}
    for i, member in enumerate(g):
        want = recipe.quantize(x[ends[i] : ends[i + 1]], **directions)
        for name in held:
            mine, theirs = getattr(member, name), getattr(want, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert (mine.shape, mine.transposed, mine.block, mine.scale_layout) == (
                    theirs.shape, theirs.transposed, theirs.block, theirs.scale_layout)
                testing.assert_bytes_equal(mine.data, theirs.data)
                testing.assert_bytes_equal(mine.scale_inv, theirs.scale_inv)
                held[name] += mine.scale_inv.size
    for name, scale_inv in (("rowwise", g.scale_inv), ("columnwise", g.columnwise_scale_inv)):
        data = getattr(g, name)
        assert data is None or not raw(data)[ends[-1] * x.shape[1] :].any()
        assert scale_inv is None or not raw(scale_inv).reshape(-1)[held[name] * scale_inv.dtype.itemsize :].any()


@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_members_are_what_the_recipe_makes_of_them(run, recipe, directions):
    x, sizes = cases.values("normal", (300, 150), bfloat16), [130, 0, 1, 128]
    g = fp8.group_quantize(run.array(x), sizes, recipe, **directions)
    expect_members(g, x, sizes, recipe, **directions)
    values = fp8.asnumpy(g.dequantize())
    assert not values[259:].any()
    testing.assert_bytes_equal(values[131:259], fp8.asnumpy(g[3].dequantize()))


@pytest.mark.parametrize("recipe", [BlockScaling(), MXScaling()], ids=str)
def test_rows_at_any_multiple_of_eight_bytes(run, recipe):
    """Panels need no more. (A single array's rows of whole blocks are read 16 bytes at a time.)"""
    x, sizes = cases.values("normal", (40, 256), bfloat16), [13, 27]
    memory = run.array(np.concatenate([np.zeros(4, bfloat16), x.reshape(-1)]))
    expect_members(fp8.group_quantize(memory[4:].reshape(40, 256), sizes, recipe), x, sizes, recipe)


@pytest.mark.full
@needs_host
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 140), min_size=1, max_size=8), st.integers(1, 140), st.integers(0, 40), st.sampled_from(RECIPES),
       st.sampled_from(DIRECTIONS), st.booleans())
def test_any_groups(sizes, columns, spare, recipe, directions, by_four):
    columns = columns * 4 if by_four else columns
    x = cases.values("bits", (sum(sizes) + spare, columns), float32)
    with testing.executor("host"):
        g = fp8.group_quantize(x, sizes, recipe, **directions)
    expect_members(g, x, sizes, recipe, **directions)


@pytest.mark.full
@pytest.mark.parametrize("directions", [{"columnwise": True}, {"rowwise": False, "columnwise": True}], ids=str)
@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("source", [bfloat16, float32])
def test_runs_of_tiles(run, source, block, directions):
    """What follows the last whole sector of a column goes from tile to tile, and out at the end of a run; of less than a sector, too."""
    sizes = [1, 517, 31, 0, 1030, 33, 259, 32, 131, 2, 48, 780, 256]
    x = cases.values("normal", (sum(sizes) + 3, 132), source)
    g = fp8.group_quantize(run.array(x), sizes, BlockScaling(block), **directions)
    expect_members(g, x, sizes, BlockScaling(block), **directions)


def test_sizes_may_change_in_place(run):
    """A result's room is for any sizes; what an earlier call left there is cleared."""
    x = cases.values("normal", (200, 136), bfloat16)
    for recipe in (BlockScaling(), MXScaling(scale_layout="swizzled")):
        splits = run.array(np.array([100, 3, 97]))
        out = fp8.group_quantize(run.array(x), splits, recipe, columnwise=True)
        for sizes in ([0, 150, 7], [1, 1, 1], [0, 0, 0], [200, 0, 0], [66, 67, 67]):
            bits(splits)[...] = run.array(np.array(sizes))
            for name in PARTS:
                cases.poison(getattr(out, name))
            assert fp8.group_quantize(run.array(x), splits, recipe, columnwise=True, out=out) is out
            expect_members(out, x, sizes, recipe, columnwise=True)


@needs_host
def test_one_launch(monkeypatch):
    launched: list[str] = []
    monkeypatch.setattr(Variant, "launch", lambda self, *_, **__: launched.append(self.kernel.entry))
    x = cases.values("normal", (64, 128), bfloat16)
    with testing.executor("host"):
        for recipe in (BlockScaling(), MXScaling()):
            fp8.group_quantize(x, [10, 20], recipe, columnwise=True)
    assert launched == ["group_quantize_block", "group_quantize_mx"]


def test_noop_writes_nothing(run):
    x, noop = run.array(cases.values("normal", (64, 128), bfloat16)), run.array(np.ones(1, np.float32))
    for recipe in (BlockScaling(), MXScaling()):
        splits = run.array(np.array([10, 20]))
        out = fp8.group_quantize(x, splits, recipe, columnwise=True)
        before = {name: raw(getattr(out, name)) for name in PARTS}
        fp8.group_quantize(x * 2 if run.name != "cuda" else x, splits, recipe, columnwise=True, noop=noop, out=out)
        assert all(np.array_equal(raw(getattr(out, name)), a) for name, a in before.items())


@pytest.mark.parametrize(("message", "options"), [
    ("scales, amaxes: belong to per-tensor recipes", {"scales": np.ones(2, np.float32)}),
    ("scales, amaxes: belong to per-tensor recipes", {"amaxes": np.ones(2, np.float32)}),
    (r"out: expected block \(1, None\), got \(1, 128\)", {"recipe": BlockScaling((1, None))}),
    ("rowwise, columnwise: expected at least one", {"rowwise": False, "columnwise": False}),
    ("out: expected scale_layout compact, got gemm_ready", {"recipe": BlockScaling(scale_layout="compact")}),
    (r"out: expected block \(1, 32\), got \(1, 128\)", {"recipe": MXScaling()}),
    ("out.columnwise: expected none for these options, got one", {"columnwise": False}),
], ids=str)  # fmt: skip
def test_refusals_write_nothing(message, options):
    x, splits = cases.values("normal", (30, 128), bfloat16), np.array([10, 20])
    out = fp8.group_quantize(x, splits, BlockScaling(), columnwise=True)
    for name in PARTS:
        cases.poison(getattr(out, name))
    before = {name: raw(getattr(out, name)) for name in PARTS}
    given_options = {"recipe": BlockScaling(), "columnwise": True, "out": out, **options}
    with pytest.raises(ValueError, match="^" + message):
        fp8.group_quantize(x, splits, given_options.pop("recipe"), **given_options)
    assert all(np.array_equal(raw(getattr(out, name)), a) for name, a in before.items())


def test_results_in_other_memory_are_refused():
    x, splits = cases.values("normal", (30, 128), bfloat16), np.array([10, 20])
    out = fp8.group_quantize(x, splits, BlockScaling(), columnwise=True)
    assert out.scale_inv is not None
    short = Grouped(splits, out.offsets, out.shape, out.rowwise, out.columnwise, out.scale_inv[:-1], out.columnwise_scale_inv, out.block,
                    out.scale_layout)
    with pytest.raises(ValueError, match=r"^out\.scale_inv: expected"):
        fp8.group_quantize(x, splits, BlockScaling(), columnwise=True, out=short)
    same = Grouped(splits, out.offsets, out.shape, out.rowwise, out.rowwise, out.scale_inv, out.columnwise_scale_inv, out.block,
                   out.scale_layout)
    with pytest.raises(ValueError, match=r"^out\.columnwise: overlaps out\.rowwise"):
        fp8.group_quantize(x, splits, BlockScaling(), columnwise=True, out=same)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_shape_of_scales_is_the_bound(recipe):
    """However the rows are divided, the scales fit; some division needs all of the room, but for less than a unit."""
    shape = (70, 40)
    q = recipe.quantize(np.zeros(shape, np.float32), columnwise=True)
    for s in (q.rowwise, q.columnwise):
        described = s.block, s.scale_layout, s.transposed
        unit = group_unit(*described)
        for groups in (1, 3, 70, 200):
            room = np.prod(grouped_scale_shape(shape, groups, *described))
            ones = min(groups, 70) - 1
            worst = [1] * ones + [70 - ones]
            needed = sum(np.prod(scale_shape((m, shape[1]), *described)) for m in worst)
            assert needed <= room < needed + group_scales(shape[1], *described) * max(1, unit)


# ---- Grouped in files and on pages ----
@pytest.mark.parametrize("recipe", [fp8.CurrentScaling(), *RECIPES[-6:]], ids=str)
def test_saved_and_loaded(recipe, tmp_path):
    x, sizes = cases.values("normal", (90, 72), bfloat16), np.array([40, 0, 33])
    g = fp8.group_quantize(x, sizes, recipe, columnwise=True)
    fp8.save(tmp_path / "groups.npz", g=g, plain=Grouped.wrap(x, sizes))
    loaded = fp8.load(tmp_path / "groups.npz")
    assert (loaded["g"].columnwise is loaded["g"].rowwise) == (g.columnwise is g.rowwise)
    for mine, theirs in ((loaded["g"], g), (loaded["plain"], Grouped.wrap(x, sizes))):
        assert (mine.shape, mine.block, mine.scale_layout, mine.transposed) == (
            theirs.shape, theirs.block, theirs.scale_layout, theirs.transposed)
        for name in ("splits", *PARTS):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert (a is None) == (b is None)
            if a is not None:
                testing.assert_bytes_equal(a, b)


@pytest.mark.parametrize(("field", "message"), [
    ({"shape": (91, 72)}, r"g\.rowwise: expected data of shape \(6552,\)"),
    ({"splits": np.zeros(4, np.int64)}, r"g\.offsets: expected int64"), ({"offsets": np.zeros(4, np.int32)}, r"g\.offsets: expected int64"),
    ({"scale_layout": "gemm_ready"}, r"g\.scale_inv: expected float32"),
    ({"columnwise_scale_inv": None}, r"g: expected columnwise data and scales, or neither"),
    ({"block": None}, r"g\.scale_inv: expected float32 of shape \(3,\)"),
], ids=str)  # fmt: skip
def test_damaged_files_are_refused(field, message, tmp_path):
    x, sizes = cases.values("normal", (90, 72), bfloat16), np.array([40, 0, 33])
    g = fp8.group_quantize(x, sizes, BlockScaling(scale_layout="compact"), columnwise=True)
    fp8.save(tmp_path / "groups.npz", g=Grouped(**{**g.__getstate__(), **field}))
    with pytest.raises(ValueError, match=message):
        fp8.load(tmp_path / "groups.npz")


def test_what_is_shown():
    x, sizes = cases.values("normal", (90, 72), bfloat16), np.array([40, 0, 33])
    g = fp8.group_quantize(x, sizes, BlockScaling(), columnwise=True)
    assert repr(g) == ("Grouped(float8_e4m3fn[90, 72] in 3 groups, block 1×128, gemm_ready scales, "
                       "rowwise + columnwise (stored transposed), numpy)")
    html = g._repr_html_()
    assert html.count("<td>") == html.count("<th>") == 7
    assert f"<td>{g.nbytes:,}</td>" in html
    assert "rowwise" not in repr(Grouped.wrap(x, sizes))


@pytest.mark.gpu
def test_graph_replay_follows_the_sizes():
    cp = backend.cupy()
    x = cases.values("normal", (500, 144), bfloat16)
    for recipe in (BlockScaling(), MXScaling(scale_layout="swizzled")):
        on_gpu, splits = fp8.asarray(x, like="cupy"), cp.asarray([200, 0, 300])
        out = fp8.group_quantize(on_gpu, splits, recipe, columnwise=True)
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture()
            fp8.group_quantize(on_gpu, splits, recipe, columnwise=True, out=out)
            graph = stream.end_capture()
            for sizes in ([100, 17, 300], [0, 0, 500], [499, 0, 0]):
                splits.set(np.array(sizes))
                for name in PARTS:
                    cases.poison(getattr(out, name))
                graph.launch(stream)
                stream.synchronize()
                expect_members(out, x, sizes, recipe, columnwise=True)
