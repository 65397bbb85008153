"""Tests marked `gpu` are skipped where there is no GPU; the executors that tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cupy_fp8 import backend, testing


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (problem := backend.gpu_problem()):
        pytest.skip(problem)


@pytest.fixture(params=["reference", "host", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Iterator[testing.Executor]:
    """Every executor that this machine has."""
    if problem := testing.executor_problem(request.param):
        pytest.skip(problem)
    with testing.executor(request.param) as executor:
        yield executor
