"""Plots of block statistics and logs, and plots of large arrays, read back from the Axes."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import pytest
import stand_in_arithmetic
from figures import keeps_settings, plt  # noqa: F401

import cupy_fp8 as fp8
from cupy_fp8 import Scaled, diagnostics
from cupy_fp8.arrays import bits
from cupy_fp8.plot import block_losses, sample, scale_maps

plot: Any = fp8.plot              # tests use attributes of artists that their types lack

quiet = pytest.mark.filterwarnings("ignore::cupy_fp8.diagnostics.ScaleWarning")
NOT_ONE: Any = np.zeros(3)


def outliers() -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((64, 320)).astype(np.float32)
    x[:, 70] *= 2.0**16
    x[5, 200:] = -1e-30
    x[5, 200] = 1
    return x


def texts(legend: Any) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


# ---- samples of large arrays ----
@pytest.mark.parametrize("size", [sample.MOST + 1, 3 * sample.MOST + 7, 10**9, 2**62])
def test_places_are_spread_evenly_and_always_the_same(size):
    at = sample.places(size)
    assert at.size == sample.MOST
    assert (np.diff(at) > 0).all()
    assert at[0] >= 0
    assert size - 2 * size // sample.MOST - 1 <= at[-1] < size
    np.testing.assert_array_equal(at, sample.places(size))
    stride = size // sample.MOST
    assert stride < 4 or np.ptp(np.diff(at[:100])) > 1                  # no regular pattern


@pytest.mark.parametrize("name", ["mx", "mx columns", "1x128", "128x128", "128x128 columns", "rows", "tensor",
                                  "values"])
def test_a_sample_has_the_values_of_its_places(monkeypatch, name):
    monkeypatch.setattr(sample, "MOST", 500)
    x = np.random.default_rng(3).standard_normal((3, 150, 200)).astype(np.float32)
    q: Any = {"mx": lambda: fp8.quantize_mx(x), "tensor": lambda: fp8.quantize_tensor(x, 3.0),
              "mx columns": lambda: fp8.quantize_mx(x, rowwise=False, columnwise=True,
                                                    scale_layout="swizzled"),
              "1x128": lambda: fp8.quantize_block(x), "values": lambda: fp8.quantize_mx(x).dequantize(),
              "128x128": lambda: fp8.quantize_block(x, block=(128, 128)),
              "128x128 columns": lambda: fp8.quantize_block(x, block=(128, 128), rowwise=False,
                                                            columnwise=True),
              "rows": lambda: fp8.quantize_block(x, block=(1, None), pow2_scale=False)}[name]()
    found, at = sample.sampled(x, q), sample.places(x.size)
    values = q if name == "values" else q.dequantize()
    np.testing.assert_array_equal(found.x, x.reshape(-1)[at])
    np.testing.assert_array_equal(found.v, values.reshape(-1)[at])
    assert found.text == "500 of 90,000 elements (sampled)"
    strided = x[:, ::-2, 3:]
    np.testing.assert_array_equal(sample.sampled(strided).x, strided.reshape(-1)[sample.places(strided.size)])


def test_small_arrays_are_drawn_whole():
    x = outliers()
    found = sample.sampled(x, fp8.quantize_mx(x))
    np.testing.assert_array_equal(found.x, x.reshape(-1))
    assert found.text == "20,480 elements"
    assert plot.histogram(x).get_title() == "Magnitudes of 20,480 elements"


def test_a_thousand_million_elements_take_less_than_a_second():
    """Broadcast arrays have as many elements without the memory. 3 s allow for busy machines."""
    rows, columns = 1000, 1_000_003
    line = np.random.default_rng(0).standard_normal(columns, np.float32)
    part: Any = fp8.quantize_mx(line[None]).rowwise
    x = np.broadcast_to(line, (rows, columns))
    data, scale_inv = np.broadcast_to(part.data, x.shape), np.broadcast_to(part.scale_inv, (rows, 31251))
    q = Scaled._of(data, scale_inv, x.shape, False, (1, 32), "compact")
    for draw in (lambda: plot.histogram(x, q), lambda: plot.error_by_magnitude(x, q),
                 lambda: plot.scale_heat_map(q)):
        start = time.process_time()
        ax = draw()
        assert time.process_time() - start < 3
        assert "(sampled)" in ax.get_title()
    assert plot.histogram(x, q).get_title() == "Magnitudes of 1,048,576 of 1,000,003,000 elements (sampled)"


def test_a_sample_from_a_device_copies_what_is_drawn(monkeypatch):
    x = np.random.default_rng(3).standard_normal((150, 200)).astype(np.float32)
    host: Any = fp8.quantize_mx(x, rowwise=False, columnwise=True).columnwise
    monkeypatch.setattr(sample, "MOST", 500)
    want = sample.sampled(x, host)
    module, copied = stand_in_arithmetic.install(monkeypatch)
    data, scale_inv = (module.asarray(bits(a)).view(a.dtype) for a in host)
    there = Scaled(data, scale_inv, host.shape, host.transposed, host.block, host.scale_layout)
    found = sample.sampled(module.asarray(x), there)
    np.testing.assert_array_equal(found.x, want.x)
    np.testing.assert_array_equal(found.v, want.v)
    assert sum(copied) == 500 * (4 + 1 + 1)


# ---- maps ----
def test_a_large_heat_map_is_sampled(monkeypatch):
    for module in (sample, scale_maps):
        monkeypatch.setattr(module, "MOST_CELLS", 8)
    s = np.float32(2.0) ** np.arange(40).astype(np.float32)[:, None] * np.ones((1, 6), np.float32)
    ax = plot.scale_heat_map(s)
    assert ax.get_title() == "8×6 of 40×6 scales (sampled)"
    assert ax.images[0].get_array()[:, 0].tolist() == [0, 5, 10, 15, 20, 25, 30, 35]
    assert ax.get_ylim() == (39.5, -0.5)                # the axis counts blocks of the matrix


@quiet
def test_a_heat_map_of_scales_in_any_layout():
    x = outliers()
    q = fp8.quantize_block(x, block=(128, 128), columnwise=True)
    want = np.log2(q.to_layout("compact").rowwise.scale_inv)
    for part in (q.rowwise, q.columnwise):  # the matrix is the same, the storage is not
        np.testing.assert_array_equal(plot.scale_heat_map(part).images[0].get_array(), want)
    q = fp8.quantize_mx(x, columnwise=True)
    for drawn in (q.rowwise, q, q.to_layout("swizzled")):
        np.testing.assert_array_equal(plot.scale_heat_map(drawn).images[0].get_array(),
                                      bits(q.rowwise.scale_inv).astype(int) - 127)
    per_tensor = plot.scale_heat_map(fp8.quantize_tensor(np.ones((2, 2), np.float32), 4.0))
    assert per_tensor.images[0].get_array().tolist() == [[-2]]
    for layout in ("compact", "swizzled"):
        with pytest.raises(ValueError, match="at most two dimensions"):
            plot.scale_heat_map(fp8.quantize_mx(np.ones((2, 40, 96), np.float32), scale_layout=layout))
    ax = plot.scale_heat_map(np.array([[0, 1, -1, np.nan, np.inf]], np.float32))
    assert ax.images[0].get_array().tolist() == [[None, 0, None, None, None]]
    assert "grey: 0, negative, NaN or Inf" in ax.get_xlabel()


def test_loss_map_shows_shares():
    x = outliers()
    report = diagnostics.blocks(x, fp8.quantize_mx(x))
    ax = plot.loss_map(report)
    found = ax.images[0].get_array()
    np.testing.assert_array_equal(found, (100 * report.underflowed / 32).astype(np.float32))
    affected = int((report.underflowed > 0).sum())
    assert 64 >= affected > 30
    assert ax.get_title() == f"Underflowed elements in {affected} of 640 blocks"
    assert "pale: no loss" in ax.get_xlabel()
    assert plot.loss_map(report, "saturated").get_title() == "Saturated elements in 0 of 640 blocks"


def test_a_large_loss_map_shows_the_worst_of_several_blocks(monkeypatch):
    monkeypatch.setattr(block_losses, "MOST_CELLS", 4)
    x = outliers()[None].repeat(2, axis=0)              # matrices of a batch are drawn one below the other
    report = diagnostics.blocks(x, fp8.quantize_mx(x))
    ax = plot.loss_map(report)
    share = np.pad((100 * report.underflowed / 32).astype(np.float32).reshape(128, 10), ((0, 0), (0, 2)))
    want = share.reshape(4, 32, 4, 3).max(axis=(1, 3))
    np.testing.assert_array_equal(ax.images[0].get_array(), want)
    assert ax.get_ylim() == (127.5, -0.5)
    assert ax.images[0].colorbar.ax.get_ylabel() == "% of a block, worst of 32×3 blocks"


def pixels(ax):
    """Return the rendered RGB of a map."""
    ax.figure.set_dpi(64)
    ax.figure.canvas.draw()
    left, bottom, right, top = (round(side) for side in ax.get_window_extent().extents)
    drawn = np.asarray(ax.figure.canvas.buffer_rgba())[::-1, :, :3]
    return drawn[bottom + 2:top - 2, left + 2:right - 2].reshape(-1, 3).astype(int)


@pytest.mark.parametrize("block", [(1, 32), (1, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_every_lost_element_is_seen_on_a_loss_map(block, style):
    """One lost element in one of thousands of blocks has a colour different from those of no loss and half a
    block."""
    x = np.ones((5000, 1024) if block[0] == 1 else (512, 1024), np.float32)
    x[300, 200], x[:128, 1020] = 1e-9, 1e6          # the last block of a row loses all elements but one
    q = fp8.quantize_mx(x) if block[1] == 32 else fp8.quantize_block(x, block=block)
    with plt.style.context(style):
        ax = plot.loss_map(diagnostics.blocks(x, q))
        shown = pixels(ax)
    colours, counts = np.unique(shown, axis=0, return_counts=True)
    assert len(colours) == 3                        # no loss, one element, nearly all of a block
    grey = np.ptp(colours, axis=1) < 6
    assert counts[grey].sum() < 0.1 * counts.sum()
    apart = np.abs(colours[:, None] - colours).sum(axis=2)
    assert (apart[~np.eye(3, dtype=bool)] > 100).all()


@quiet
def test_most_of_a_loss_map_is_not_empty_where_losses_are_few():
    """Shares of one element in 128 and of a fifth of a block have different colours."""
    x = np.random.default_rng(0).standard_t(4, (256, 1024)).astype(np.float32)
    x[:, 513] *= 5000
    report = diagnostics.blocks(x, fp8.quantize_block(x))
    ax = plot.loss_map(report)
    picture = ax.images[0]
    one, fifth = (picture.cmap(picture.norm(100 * share)) for share in (1 / 128, 0.2))
    assert np.abs(np.subtract(one, fifth)).sum() > 0.5
    assert not np.ma.is_masked(picture.get_array())


def test_loss_histogram_counts_blocks():
    x = outliers()
    q = fp8.quantize_mx(x)
    report = diagnostics.blocks(x, q)
    ax = plot.loss_histogram(report)
    lost, affected = np.bincount(report.underflowed.ravel()), int((report.underflowed > 0).sum())
    stairs = ax.patches[0].get_data()
    found = dict(zip(stairs.edges[:-1] + 0.5, stairs.values, strict=True))
    assert {int(n): int(count) for n, count in found.items() if count} == {
        n: int(count) for n, count in enumerate(lost) if n and count}
    assert texts(ax.get_legend())[0] == f"underflowed: {affected} blocks"
    assert ax.get_title() == "Losses of 640 blocks of 1×32"
    assert all(tick == int(tick) for tick in ax.get_xticks())


def test_loss_histogram_of_large_blocks_and_of_none():
    x = np.ones((1024, 128), np.float32)
    x[:, :127] = np.where(np.arange(1024) // 128 < 7, 2.0**-9, 1)[:, None]
    for block, lost in enumerate((1, 2, 3, 300, 301, 302, 1000)):       # the eighth block loses nothing
        at = np.arange(lost)
        x[128 * block + at // 127, at % 127] = 1e-9
    report = diagnostics.blocks(x, fp8.quantize_block(x, block=(128, 128)))
    assert report.underflowed.ravel().tolist() == [1, 2, 3, 300, 301, 302, 1000, 0]
    ax = plot.loss_histogram(report)
    assert "(16 to a step)" in ax.get_xlabel()
    stairs = ax.patches[0].get_data()
    found = {(left + 0.5, right - 0.5): count
             for left, right, count in zip(stairs.edges[:-1], stairs.edges[1:], stairs.values, strict=True)}
    assert {ends: count for ends, count in found.items() if count} == {
        (1, 16): 3, (289, 304): 3, (993, 1008): 1}
    ones = np.ones((2, 64), np.float32)
    ax = plot.loss_histogram(diagnostics.blocks(ones, fp8.quantize_mx(ones)))
    assert (ax.get_title(), ax.get_legend()) == ("No losses in 4 blocks of 1×32", None)
    nothing = np.zeros((0, 64), np.float32)
    report = diagnostics.blocks(nothing, fp8.quantize_mx(nothing))
    assert plot.loss_histogram(report).get_title() == "No losses in 0 blocks of 1×32"
    assert plot.loss_map(report).get_title() == "Underflowed elements in 0 of 0 blocks"


@quiet
def test_scale_histogram():
    s = np.array([[0.5, 0.75, 1, 8, 0, np.nan, -1, np.inf]], np.float32)
    q = Scaled(np.zeros((1, 256), fp8.float8_e4m3fn), s, (1, 256), block=(1, 32), scale_layout="compact")
    for given in (q, diagnostics.scales(q)):
        ax = plot.scale_histogram(given)
        found = {bar.get_x() + bar.get_width() / 2: bar.get_height() for bar in ax.patches}
        assert {exponent: count for exponent, count in found.items() if count} == {-1: 2, 0: 1, 3: 1}
        assert ax.get_xlabel() == "exponent of scale_inv      (not shown: 1 are 0, 1 negative, 1 Inf, 1 NaN)"
        assert all(tick == int(tick) for axis in (ax.get_xticks(), ax.get_yticks()) for tick in axis)
    nothing = fp8.quantize_mx(np.zeros((0, 64), np.float32))
    assert plot.scale_histogram(nothing).get_title() == "0 scales"


# ---- logs ----
def test_steps_draws_a_log(tmp_path):
    x, path = outliers(), tmp_path / "log.jsonl"
    q = fp8.quantize_mx(x)
    for step in (0, 10, 20):
        tensors = {"a": (x, q), "b": (x * step, fp8.quantize_tensor(x * step, 1.0))}
        records = diagnostics.log_step(path, step, tensors if step else {"a": (x, q)})
    panels = plot.steps(path, ("sqnr_db", "blocks_underflowed", "underflowed", "scale_log2_mean"))
    a, b = records
    assert [line.get_label() for line in panels[0].lines] == ["a", "b"]
    assert panels[0].lines[0].get_xdata().tolist() == [0, 10, 20]
    assert panels[0].lines[0].get_ydata().tolist() == [a["sqnr_db"]] * 3
    assert panels[1].lines[0].get_ydata()[0] == 100 * a["blocks_underflowed"] / 640
    assert panels[2].lines[1].get_ydata()[2] == 100 * b["underflowed"] / b["elements"]
    assert np.isnan(panels[2].lines[1].get_ydata()[0])              # b was not logged at step 0
    assert np.isnan(panels[1].lines[1].get_ydata()).all()           # it has no blocks either
    assert panels[3].get_xlabel() == "step"
    (alone,) = plot.steps(records, ["saturated"], tensors=["b"])
    assert [line.get_label() for line in alone.lines] == ["b"]


@pytest.mark.parametrize(("call", "kind", "message"), [
    (lambda r: cast(Any, plot).loss_map(r, "lost"), ValueError, "loss: expected one of"),
    (lambda r: plot.loss_map(NOT_ONE), TypeError, "report: expected a BlockReport"),
    (lambda r: plot.loss_map(diagnostics.blocks(None, fp8.quantize_mx(outliers()))), ValueError,
     "underflowed is not known without x"),
    (lambda r: plot.scale_layout((3, 256), "compact", block=(0, 0)), ValueError, "^block: expected"),
    (lambda r: plot.format_ranges([]), ValueError, "^dtypes: expected at least one"),
    (lambda r: plot.format_ranges("e4m3", top=0), ValueError, "^top: expected a finite number above 0"),
    (lambda r: plot.number_line("e4m3", limit=True), TypeError, "^limit: expected a number"),
    (lambda r: plot.bars({"a": {"b": 1}}, form="{:d}"), ValueError, "^form: expected a format"),
    (lambda r: plot.loss_histogram(NOT_ONE), TypeError, "report: expected a BlockReport"),
    (lambda r: plot.scale_histogram(NOT_ONE), TypeError, "q: expected a Scaled or Quantized"),
    (lambda r: plot.error_by_magnitude(outliers(), None), TypeError, "q: expected a Scaled, a Quantized or"),
    (lambda r: plot.steps([{"step": 0, "tensor": "a", "x": 1}], ["y"]), ValueError, "the log has no 'y'"),
    (lambda r: plot.steps([{"step": 0, "tensor": "a", "x": 1}], ["x"], tensors=["b"]), ValueError,
     "tensors: the log has no 'b'"),
    (lambda r: plot.steps([{"step": 0, "tensor": "a", "x": "1"}], ["x"]), TypeError,
     "expected keys of numbers"),
    (lambda r: plot.steps([{"step": 0, "tensor": "a", "x": 1}], ["x"], ax=[]), ValueError,
     "ax: expected 1 Axes"),
])
def test_errors(call, kind, message):
    x = np.ones((2, 64), np.float32)
    with pytest.raises(kind, match=message):
        call(diagnostics.blocks(x, fp8.quantize_mx(x)))


def test_light_and_dark():
    """Thin lines and filled bars are lighter on a dark background."""
    x = outliers()
    colours = {}
    for style in ("default", "dark_background"):
        with plt.style.context(style):
            ax = plot.scale_histogram(fp8.quantize_mx(x))
            colours[style] = ax.patches[0].get_facecolor()
    light, dark = (sum(colours[style][:3]) for style in ("default", "dark_background"))
    assert light < dark


@pytest.mark.gpu
def test_cupy_arrays(monkeypatch):
    x = outliers()
    device = fp8.asarray(x, like="cupy")
    q, there = fp8.quantize_mx(x), fp8.quantize_mx(device)
    here, report = diagnostics.blocks(x, q), diagnostics.blocks(device, there)
    for draw in (plot.loss_map, plot.loss_histogram):
        assert draw(report).get_title() == draw(here).get_title()
    assert plot.scale_histogram(there).get_title() == plot.scale_histogram(q).get_title()
    monkeypatch.setattr(sample, "MOST", 500)
    for module in (sample, scale_maps):
        monkeypatch.setattr(module, "MOST_CELLS", 8)
    np.testing.assert_array_equal(sample.sampled(device, there).v, sample.sampled(x, q).v)
    np.testing.assert_array_equal(plot.scale_heat_map(there).images[0].get_array(),
                                  plot.scale_heat_map(q).images[0].get_array())
