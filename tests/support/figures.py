"""Figures of tests: no display, and matplotlib's settings unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib
import pytest

matplotlib.use("agg")         # pyplot must not choose a backend that needs a display
from matplotlib import pyplot as plt

__all__ = ["keeps_settings", "plt"]


@pytest.fixture(autouse=True)
def keeps_settings() -> Iterator[None]:
    """Fixture of every test in a module that imports it."""
    before = dict(plt.rcParams)
    yield
    assert dict(plt.rcParams) == before
