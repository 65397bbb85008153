"""The contents of plots of sweeps, ranges, storage, routing and tables, read back from the Axes."""

from typing import Any, cast

import numpy as np
import pytest
from figures import keeps_settings  # noqa: F401

import cupy_fp8 as fp8
from cupy_fp8 import diagnostics
from cupy_fp8.plot.style import BLUE, VERMILION

plot: Any = fp8.plot              # tests use attributes of artists that their types lack


def texts(ax):
    return [t.get_text() for t in ax.texts]


def test_curves_differ_without_colour():
    ax = plot.curves([1, 2], {name: [i, i + 1] for i, name in enumerate("abcdefg")}, xscale="log2", title="t")
    looks = {(line.get_linestyle(), line.get_marker()) for line in ax.lines}
    assert len(looks) == 7
    assert ax.lines[2].get_ydata().tolist() == [2, 3]
    assert ax.get_xscale() == "log"


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: plot.curves([1, 2], {"a": [1]}), ValueError, "series\\['a'\\]: expected 2 numbers"),
    (lambda: cast(Any, plot).curves([1], {}, yscale="log"), ValueError, "yscale: expected one of"),
    (lambda: plot.curves([[1]], {}), ValueError, "x: expected one dimension"),
    (lambda: plot.reports([1], {}, ("snr",)), ValueError, "quantities: expected fields of ErrorReport"),
    (lambda: plot.reports([1], {}, ("nan",), ax=[]), ValueError, "ax: expected 1 Axes"),
    (lambda: plot.table(["a", "b"], [["x"]]), ValueError, "rows: expected 2 cells"),
    (lambda: plot.bars({"a": {"b": -1}}), ValueError, "rows: expected sizes of at least 0"),
    (lambda: plot.cells([1, 2]), ValueError, "values: expected two dimensions"),
    (lambda: plot.cells([[1, 2]], [["a"]]), ValueError, "text: expected the shape of values"),
    (lambda: plot.format_ranges("int8"), TypeError, "dtypes: expected one of"),
    (lambda: plot.rounding([1, -1]), ValueError, "x: expected positive numbers"),
    (lambda: plot.block_ranges(np.ones((2, 64), np.float32), fp8.quantize_tensor(
        np.ones((2, 64), np.float32))), ValueError, "q: expected row-wise blocks"),
    (lambda: plot.block_ranges(np.ones((2, 64), np.float32), fp8.quantize_mx(
        np.ones((3, 64), np.float32))), ValueError, "x: expected two dimensions, and the shape of q"),
    (lambda: plot.block_ranges(np.ones((2, 64), np.float32), fp8.quantize_mx(
        np.ones((2, 64), np.float32)), first=2), ValueError, "first: expected a block below 2"),
    (lambda: plot.amax_history([1], [1, 2]), ValueError, "limit: expected one number for each step"),
    (lambda: plot.amax_history([1], [2], steps=[1, 2]), ValueError, "steps: expected 1 numbers"),
    (lambda: plot.routes(cast(Any, 3)), TypeError, "routing: expected a Routing"),
    (lambda: plot.routes(fp8.route(np.zeros((200, 1), int), num_experts=1)), ValueError, "at most 128 rows"),
    (lambda: plot.scale_layout((1024, 1024), "compact", block=(1, 32)), ValueError, "at most 512 scales"),
])
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_reports_are_shares_of_the_elements():
    x = np.array([1, 2, 3, 1000], np.float32)
    found = [diagnostics.error(x, fp8.quantize_tensor(x, s)) for s in (0.25, 1.0)]
    sqnr, saturated = plot.reports([0.25, 1], {"E4M3": found}, ("sqnr_db", "saturated"), title="sweep")
    assert saturated.lines[0].get_ydata().tolist() == [0, 25]
    assert sqnr.lines[0].get_ydata().tolist() == [r.sqnr_db for r in found]
    assert (sqnr.get_title(), saturated.get_title()) == ("sweep", "")


def test_table_is_text_and_html():
    t = plot.table(["", "<n>"], [["a & b", 1]])
    assert repr(t) == "       <n>\na & b    1"
    assert t._repr_html_() == ("<table><tr><th></th><th>&lt;n&gt;</th></tr>"
                               "<tr><th>a &amp; b</th><td>1</td></tr></table>")


def test_bars_have_one_colour_for_a_part():
    ax = plot.bars({"twice": [("read", 1), ("write", 2), ("read", 1)], "once": {"read": 1}})
    assert [p.get_width() for p in ax.patches] == [1, 2, 1, 1]
    colours = [p.get_facecolor() for p in ax.patches]
    assert colours[0] == colours[2] == colours[3] != colours[1]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["read", "write"]
    assert texts(ax) == ["4", "1"]


def test_cells_leave_nan_empty():
    ax = plot.cells([[1, np.nan]], columns=["one", "none"])
    assert texts(ax) == ["1", ""]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["one", "none"]


def test_format_ranges_end_at_top():
    ax = plot.format_ranges(["float8_e4m3fn", "float8_e5m2"], top=2.0)
    ends = {p.get_x() + p.get_width() for p in ax.patches if p.get_y() < 0}
    assert max(ends) == 2
    assert min(p.get_x() for p in ax.patches) == 2.0**-16 * 2 / 57344


def test_rounding_shows_what_is_exact():
    ax = plot.rounding([1.0, 1.01, 2.0**-11])
    shown = [line for line in ax.lines if line.get_marker() in ("o", "x")]
    assert [(line.get_marker(), line.get_color()) for line in shown] == [
        ("o", BLUE), ("o", VERMILION), ("x", VERMILION)]


def test_block_ranges_follow_the_scales():
    x = np.ones((2, 96), np.float32)
    x[1, 40] = 64
    ax = plot.block_ranges(x, fp8.quantize_mx(x), row=1, blocks=9)
    limits = [c.get_segments()[0] for c in ax.collections if hasattr(c, "get_segments")]
    heights = [start[1] for start, _ in limits]
    assert heights == [448 * 2.0**e for e in (-8, -2, -8)]


def test_amax_history_marks_what_saturates():
    ax = plot.amax_history([2 * 464 / 448, 5, 5], [2, 2, 6], steps=range(10, 13))
    marks = ax.collections[0].get_segments()
    assert [segment.tolist() for segment in marks] == [[[11, 2], [11, 5]]]


@pytest.mark.parametrize(("layout", "block", "dtype"), [
    ("compact", (1, 128), "float32"), ("gemm_ready", (1, 128), "float32"),
    ("gemm_ready", (128, 128), "float32"),
    pytest.param("swizzled", (1, 32), "float8_e8m0fnu", marks=pytest.mark.full)])
def test_scale_layout_shows_every_scale_once(layout, block, dtype):
    shape = (10, 512) if block[0] == 1 else (384, 512)
    shown = [t for t in texts(plot.scale_layout(shape, layout, block=block, dtype=dtype)) if t]
    lines, blocks = -(-shape[0] // block[0]), 512 // block[1]
    assert sorted(shown) == sorted(f"{i}, {j}" for i in range(lines) for j in range(blocks))


def test_swizzled_places_are_those_of_the_definition():
    shown = texts(plot.scale_layout((128, 128), "swizzled", block=(1, 32), dtype="float8_e8m0fnu"))
    for line, block in ((0, 0), (33, 2), (127, 3)):
        assert shown[line % 32 * 16 + line // 32 * 4 + block] == f"{line}, {block}"


def test_routes_lead_to_rows():
    r = fp8.route(np.array([[1, 0], [1, -1]]), num_experts=2, align=2)
    ax = plot.routes(r)
    ends = sorted(int(line.get_xdata()[1]) for line in ax.lines)
    assert ends == sorted(int(row) for row in r.row_map.ravel() if row >= 0)
    assert texts(ax)[:4] == ["1", "0", "1", "–"]
