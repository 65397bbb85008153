"""Selection of tests: the quick tier (`pytest`) or every test (`pytest --full`), and GPU tests only with a
GPU.

The quick tier leaves out what is marked `full`: a test, a module, or single parameters of a test. A machine
without a GPU leaves out what is marked `gpu`. Parameters that are left out are never generated, and tests
that are left out are deselected. -m and node ids (FILE::TEST) select from all tests: `pytest -m full` runs
what the quick tier leaves out, and `pytest -m gpu` runs every GPU test.

tests/conftest.py takes the hooks from here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest

from cupy_fp8 import backend, testing

ParameterSet = type(pytest.param())
Value = TypeVar("Value")


# ---- marks that modules use ----
_HOST_PROBLEM = testing.executor_problem("host")
#: marks tests of the CPU executor
needs_host = pytest.mark.skipif(_HOST_PROBLEM is not None, reason=str(_HOST_PROBLEM))
#: Tests of launches use the fixture `run` without the reference, which launches nothing.
where_kernels_run = pytest.mark.parametrize("run", ["host", pytest.param("cuda", marks=pytest.mark.gpu)],
                                            indirect=True)


def quick_if(quick: Callable[[Value], bool], values: Iterable[Value]) -> list[Any]:
    """Return the parameters of a test; those that `quick` accepts are in the quick tier."""
    return [value if quick(value) else _full(value) for value in values]


def first_of_each(kind: Callable[[Value], Hashable], values: Iterable[Value]) -> list[Any]:
    """Return the parameters of a test; the first of each kind is in the quick tier."""
    seen: set[Hashable] = set()

    def is_first(value: Value) -> bool:
        new = kind(value) not in seen
        seen.add(kind(value))
        return new

    return quick_if(is_first, values)


def _full(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)


# ---- hooks ----
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every test, also those with the mark `full`")


def is_quick(config: pytest.Config) -> bool:
    """Whether the session runs the quick tier: nobody asked for everything, or selected tests."""
    return not (config.option.full or config.option.markexpr
                or any("::" in argument for argument in config.args))


def left_out(config: pytest.Config) -> set[str]:
    """Return the marks of the tests that this session leaves out."""
    return {mark for mark, absent in (("full", is_quick(config)), ("gpu", backend.gpu_problem() is not None))
            if absent}


def pytest_report_header(config: pytest.Config) -> list[str]:
    tier = "quick (--full runs every test, -m full the rest)" if is_quick(config) else "all tests"
    return [f"tier: {tier}", f"GPU tests: {backend.gpu_problem() or 'yes'}"]


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Filter parameters of marks and fixtures on their way to `metafunc.parametrize`."""
    without = left_out(metafunc.config)
    whole = bool(without & {mark.name for mark in metafunc.definition.iter_markers()})
    parametrize = metafunc.parametrize

    def wanted(value: Any) -> bool:
        return not (isinstance(value, ParameterSet) and without & {mark.name for mark in value.marks})

    def parametrize_wanted(names: Any, values: Iterable[Any], *args: Any, ids: Any = None,
                           **kwargs: Any) -> None:
        values = list(values)
        chosen = [] if whole else [i for i, value in enumerate(values) if wanted(value)]
        chosen = chosen or list(range(len(values)))[:1]         # one is left to be deselected
        if ids is not None and not callable(ids):
            names_of_ids = list(ids)
            ids = [names_of_ids[i] for i in chosen]
        kwargs.pop("_param_mark", None)         # otherwise a mark of several tests keeps the first ids
        parametrize(names, [values[i] for i in chosen], *args, ids=ids, **kwargs)

    metafunc.parametrize = parametrize_wanted           # type: ignore[method-assign, assignment]


def deselect_left_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are left out as a whole."""
    without = left_out(config)
    deselected = [item for item in items if any(mark.name in without for mark in item.iter_markers())]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        gone = set(deselected)
        items[:] = [item for item in items if item not in gone]
