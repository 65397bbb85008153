"""Tests marked `gpu` are skipped where there is no GPU."""

from __future__ import annotations

import pytest

from cupy_fp8 import backend


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (problem := backend.gpu_problem()):
        pytest.skip(problem)
