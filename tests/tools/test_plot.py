"""The contents of plots, read back from the Axes."""

import sys
from typing import Any, cast

import numpy as np
import pytest
from figures import keeps_settings, plt  # noqa: F401

import cupy_fp8 as fp8

plot: Any = fp8.plot              # tests use attributes of artists that their types lack


def sample():
    rng = np.random.default_rng(0)
    return (rng.standard_normal((64, 64)) * np.exp(rng.standard_normal((64, 64)))).astype(np.float32)


def ticks(ax):
    """Return the x of every vertical line that vlines drew, in order."""
    return [np.array([segment[0][0] for segment in c.get_segments()]) for c in ax.collections]


@pytest.mark.parametrize(("dtype", "count"),
                         [(fp8.float8_e4m3fn, 126), (fp8.float8_e5m2, 123), (fp8.float8_e8m0fnu, 255)])
def test_number_line_shows_every_positive_value(dtype, count):
    normal, subnormal = ticks(plot.number_line(dtype))
    f = fp8.finfo(dtype)
    assert len(normal) + len(subnormal) == count
    assert len(subnormal) == (2**f.mantissa_bits - 1 if f.signed else 0)
    assert normal.min() == f.smallest_normal
    assert normal.max() == f.max


def test_linear_number_line_is_symmetric_and_limited():
    ax = plot.number_line([fp8.float8_e4m3fn, "float8_e5m2"], axis="linear", limit=2)
    normal, subnormal, *_ = ticks(ax)
    both = np.sort(np.concatenate([normal, subnormal]))
    assert both.tolist() == (-both[::-1]).tolist()
    assert both.max() == 2
    assert (normal == 0).sum() == 1
    assert (subnormal == 0).sum() == 0
    assert [t.get_text() for t in ax.get_yticklabels()] == ["float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (([],), ValueError, "at least one"), ((np.float64,), TypeError, "dtypes: expected one of"),
    ((np.float32,), TypeError, "dtypes: expected one of")])
def test_number_line_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        plot.number_line(*arguments)
    with pytest.raises(ValueError, match="axis: expected"):
        cast(Any, plot).number_line(fp8.float8_e5m2, axis="both")


def test_histogram_counts_every_finite_nonzero_element():
    x = sample()
    x[0, :5] = [0, 0, np.nan, np.inf, -np.inf]
    x[1, 0] = 1e-6
    q = fp8.quantize_tensor(x, 16.0)
    ax = plot.histogram(x, q)
    bars = sum(p.get_height() for p in ax.containers[0])
    assert bars == np.isfinite(x).sum() - 2
    labels = [t.get_text() for t in ax.get_legend().get_texts()]
    v = q.dequantize()
    assert labels[:2] == ["x (2 zeros)", f"quantised ({int((v == 0).sum())} zeros)"]
    # lines at the smallest subnormal and the maximum, in units of x
    assert [line.get_xdata()[0] for line in ax.lines] == [2.0**-9 / 16, 448 / 16]


def test_histogram_of_nothing_but_zeros():
    ax = plot.histogram(np.zeros((3, 3), np.float32), fp8.quantize_tensor(np.zeros((3, 3), np.float32), 1.0))
    assert ax.get_legend().get_texts()[0].get_text() == "x (9 zeros)"


def test_error_by_magnitude_against_a_count():
    """Points are a quarter of a binade apart; each covers the binade around it, if that has 32 elements and
    some beside the point. Elements that no point covers are dots."""
    x = sample()
    q = fp8.quantize_tensor(x, 16.0)
    ax = plot.error_by_magnitude(x, q)
    top, middle = ax.lines[0], ax.lines[1]
    relative = np.abs(q.dequantize().astype(np.float64) - x) / np.abs(x.astype(np.float64))
    at = 4 * np.log2(np.abs(x.astype(np.float64)))
    points, largest, rms, left = top.get_xdata(), top.get_ydata(), middle.get_ydata(), np.ones(x.shape, bool)
    np.testing.assert_allclose(np.diff(np.log2(points)), 0.25)
    for point, most, mean in zip(points, largest, rms, strict=True):
        e = round(4 * np.log2(point))
        inside, beside = (at >= e - 2) & (at < e + 2), (at >= e - 1) & (at < e + 1)
        if inside.sum() < 32 or not beside.any():
            assert np.isnan([most, mean]).all()
            continue
        assert most == relative[inside].max()
        np.testing.assert_allclose(mean, np.sqrt((relative[inside] ** 2).mean()))
        left &= ~inside
    assert ax.lines[2].get_ydata()[0] == 1 / 16
    dots = ax.collections[0].get_offsets()
    assert 0 < left.sum() < 100
    np.testing.assert_array_equal(dots, np.stack([np.abs(x[left]), relative[left]], axis=1))


def activations():
    """Return heavy-tailed values with outlier channels and tokens of varying size."""
    rng = np.random.default_rng(0)
    x = (rng.standard_t(4, (512, 1024)) * np.exp(0.5 * rng.standard_normal(1024))
         * np.exp(0.6 * rng.standard_normal((512, 1))))
    x[:, [100, 301, 700]] *= 200
    x[:, 513] *= 5000
    return x.astype(np.float32)


@pytest.mark.parametrize("recipe", [fp8.CurrentScaling(), fp8.BlockScaling(), fp8.BlockScaling((128, 128)),
                                    fp8.MXScaling()], ids=["tensor", "1x128", "128x128", "mx"])
def test_error_by_magnitude_is_smooth(recipe):
    """The total variation is hardly more than the distance from the largest error to the smallest, on log2
    axes. Bins narrower than the steps of the format, few elements, and a median of lost and kept ones would
    zigzag."""
    x = activations()
    ax = plot.error_by_magnitude(x, recipe.quantize(x))
    for line in ax.lines[:2]:
        y = np.log2(line.get_ydata()[np.isfinite(line.get_ydata())])
        assert y.size > 80
        assert np.abs(np.diff(y)).sum() < np.ptp(y) + 5
        assert np.abs(np.diff(y, 2)).mean() < 0.1


def test_few_elements_are_drawn_one_by_one():
    x = np.array([0.001, 1.1, 300, 1e6, -1e6, 0, np.nan], np.float32)
    ax = plot.error_by_magnitude(x, fp8.quantize_tensor(x, 1.0))
    assert np.isnan(ax.lines[0].get_ydata()).all()
    assert ax.collections[0].get_offsets()[:, 0].tolist() == np.abs(x[:5]).astype(float).tolist()
    assert [t.get_text() for t in ax.get_legend().get_texts()][2] == "single elements"


def test_scale_heat_map():
    e = np.array([[127, 130, 255], [0, 254, 126]], np.uint8).view(fp8.float8_e8m0fnu)
    picture = plot.scale_heat_map(e).images[0].get_array()
    assert picture.tolist() == [[0, 3, None], [-127, 127, -1]]
    assert plot.scale_heat_map(np.array([4.0], np.float32)).images[0].get_array().tolist() == [[2]]
    with pytest.raises(ValueError, match="at most two dimensions"):
        plot.scale_heat_map(np.ones((2, 2, 2), np.float32))
    with pytest.raises(TypeError, match="scale_inv"):
        plot.scale_heat_map(np.ones((2, 2)))


def test_draws_into_the_axes_given():
    x = sample()
    q = fp8.quantize_tensor(x, 16.0)
    figure, axes = plt.subplots(4)
    drawn = [plot.number_line(fp8.float8_e5m2, ax=axes[0]), plot.histogram(x, ax=axes[1]),
             plot.error_by_magnitude(x, q.dequantize(), ax=axes[2]),
             plot.scale_heat_map(np.abs(x), ax=axes[3])]
    assert drawn == list(axes)
    assert plt.get_fignums() == [figure.number]
    figure.canvas.draw()


def test_shapes_and_types_are_checked():
    x = sample()
    with pytest.raises(ValueError, match="q: expected the shape of x"):
        plot.histogram(x, x[1:])
    with pytest.raises(TypeError, match="x: expected dtype"):
        plot.error_by_magnitude(x.astype(np.float64), x)


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'cupy_fp8\[plot\]'"):
        plot.number_line(fp8.float8_e5m2)


@pytest.mark.gpu
def test_cupy_arrays():
    x = fp8.asarray(sample(), like="cupy")
    q = fp8.quantize_tensor(x, 16.0)
    ax = plot.histogram(x, q)
    assert sum(p.get_height() for p in ax.containers[0]) == x.size
    assert plot.error_by_magnitude(x, q).lines[2].get_ydata()[0] == 1 / 16
    assert plot.scale_heat_map(q.scale_inv).images[0].get_array().tolist() == [[-4]]
