"""plot.comparison, read back from the Axes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from figures import keeps_settings, plt  # noqa: F401

import cupy_fp8 as fp8
from cupy_fp8 import diagnostics

plot: Any = fp8.plot              # tests use attributes of artists that their types lack


def found(seed: int = 0) -> diagnostics.Comparison:
    x = np.random.default_rng(seed).standard_normal((4, 256))
    return diagnostics.compare((x * np.geomspace(1, 1e6, 256)).astype(np.float32))


def test_one_tensor():
    one = found()
    left, right = plot.comparison(one)
    recipes = [row.name for row in one.distinct]
    assert [label.get_text() for label in left.get_yticklabels()] == recipes
    assert left.lines[0].get_xdata().tolist() == [one[name].error.sqnr_db for name in recipes]
    assert right.lines[0].get_xdata().tolist() == [100 * one[name].lost for name in recipes]
    assert right.get_xlim()[1] > max(right.lines[0].get_xdata()) > 10
    assert left.get_title(loc="left") == "What each recipe does to 4×256 float32"
    assert left.get_ylim() == (len(recipes) - 0.5, -0.5)                # recipes are in the table's order
    assert right.get_legend() is None
    left.figure.canvas.draw()


@pytest.mark.parametrize("tensors", [3, 6])
def test_several_tensors(tensors):
    """A few have markers and names of their own; of many each is a point, and the median a line."""
    all_of_them = {f"{seed}" + 60 * "x": found(seed) for seed in range(tensors)}
    left, right = plot.comparison(all_of_them)
    points = [line for line in left.lines if line.get_linestyle() == "None"]
    recipes = [label.get_text() for label in left.get_yticklabels()]
    assert [line.get_xdata().tolist() for line in points] == [
        [one[name].error.sqnr_db for name in recipes] for one in all_of_them.values()]
    if tensors == 3:
        assert len({line.get_marker() for line in points}) == 3
        assert [len(text.get_text()) for text in right.get_legend().get_texts()] == [40] * 3
    else:
        medians = [line for line in left.lines if line not in points]
        values = sorted(one[recipes[0]].error.sqnr_db for one in all_of_them.values())
        assert medians[0].get_xdata()[0] == values[3]
        assert right.get_legend() is None


def test_exact_values_are_said():
    exact, other = diagnostics.compare(np.array([[1, 2, 4, 448]], np.float32)), found()
    left, _ = plot.comparison({"a": exact, "b": other})
    assert {text.get_text() for text in left.texts} == {"1 exact"}
    assert math.isnan(left.lines[0].get_xdata()[0])
    (text, *_), = [plot.comparison(exact)[0].texts]
    assert text.get_text() == "exact"


def test_axes_of_the_caller_and_errors():
    one = found()
    _, axes = plt.subplots(2)
    assert plot.comparison(one, ax=axes) == list(axes)
    with pytest.raises(ValueError, match="expected two Axes, got 1"):
        plot.comparison(one, ax=axes[:1])
    with pytest.raises(ValueError, match="of the same recipes"):
        plot.comparison({"a": one, "b": diagnostics.compare(np.ones((2, 2), np.float32), [fp8.MXScaling()])})
    with pytest.raises(TypeError, match=r"what diagnostics\.compare returns as 'a', got 1"):
        plot.comparison({"a": 1})
    with pytest.raises(ValueError, match="got none"):
        plot.comparison({})
