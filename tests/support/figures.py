"""Figures of tests: they need no display, and leave matplotlib's settings alone."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib
import pytest

matplotlib.use("agg")         # pyplot must not choose a backend that needs a display.
from matplotlib import pyplot as plt

__all__ = ["keeps_settings", "plt"]


@pytest.fixture(autouse=True)
def keeps_settings() -> Iterator[None]:
    """Serves every test of a module that imports it."""
    before = dict(plt.rcParams)
    yield
    assert dict(plt.rcParams) == before
