"""The tiers of tests (tiers.py); the executors that tests run on; the processes that run them (processes.py);
work in the background."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import blas  # noqa: F401  (before what imports NumPy)
import places
import processes
import pytest
import tiers
from background import Background
from processes import pytest_runtestloop
from tiers import deselect_left_out, pytest_generate_tests, pytest_report_header

from cupy_fp8 import backend, device_errors, testing
from cupy_fp8.calls import remembered
from cupy_fp8.kernels import Launch

__all__ = ["pytest_generate_tests", "pytest_report_header", "pytest_runtestloop"]

_BACKGROUND = pytest.StashKey[Background]()


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.pytest_addoption(parser)
    processes.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_ClosesFigures())


class _ClosesFigures:
    """Closes the figures of each test. (Hooks of this file do not see examples in docstrings.)"""

    def pytest_runtest_teardown(self) -> None:
        if pyplot := sys.modules.get("matplotlib.pyplot"):
            pyplot.close("all")


def _module(item: pytest.Item) -> Any:
    """A test's module where that has work for the background, else None."""
    module = getattr(item, "module", None)
    return module if hasattr(module, "background_jobs") else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect_left_out(config, items)
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[bool, bool]:
    """Tests that wait for the background come last, and its short jobs behind the long ones, since these
    leave no processor idle at the end."""
    module = _module(item)
    return module is not None, getattr(module, "HAS_SHORT_JOBS", False)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()                 # Otherwise tests that collect garbage look through all tests each time.
    if backend.gpu_problem():               # Otherwise processes would share a GPU, and a fork ends CUDA.
        processes.begin(session, stays=lambda item: "background_result" in getattr(item, "fixturenames", ()))
    if session.config.option.collectonly or not any(map(_module, session.items)):
        return
    background = session.config.stash[_BACKGROUND] = Background()
    for module, items in itertools.groupby(session.items, key=_module):
        if module is not None:
            for key, job in module.background_jobs(list(items), background):
                background.start((module.__name__, key), job)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (background := config.stash.get(_BACKGROUND, None)) and background.deaths:
        terminalreporter.section("processes that died, and whose work was done again")
        for death in background.deaths:
            terminalreporter.write_line(death)


def pytest_unconfigure(config: pytest.Config) -> None:
    if background := config.stash.get(_BACKGROUND, None):
        background.stop()
    processes.stop(config)


@pytest.fixture(autouse=True)
def _no_remembered_calls() -> None:
    """Every test makes its calls anew, since tests change what ops launch."""
    remembered.forget()


@pytest.fixture(scope="module")
def background_result(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """The result of the module's job of a key, once it is there."""
    background = request.config.stash[_BACKGROUND]
    return lambda key: background.result((request.module.__name__, key))


@pytest.hookimpl(wrapper=True)
def pytest_assertrepr_compare() -> Iterator[None]:
    """Under continuous integration pytest would show all differences, which takes minutes for a megabyte.
    Elsewhere it names the first one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CI", "BUILD_NUMBER"):
            patch.delenv(name, raising=False)
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        device_errors(clear=True)           # They are sticky: a test is to see only its own.


_KEPT_ON_GPU = 1 << 30           # bytes


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After a test of large arrays CuPy's pool gives their memory back, since other processes may run tests
    on the same GPU."""
    if item.get_closest_marker("gpu") and backend.gpu_problem() is None:
        pool = backend.cupy().get_default_memory_pool()
        if pool.total_bytes() > _KEPT_ON_GPU:
            pool.free_all_blocks()


@pytest.fixture(params=["reference", "host", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Iterator[testing.Executor]:
    """Every executor that this machine has."""
    if problem := testing.executor_problem(request.param):
        pytest.skip(problem)
    with testing.executor(request.param) as executor:
        device_errors(clear=True)
        yield executor


@pytest.fixture(params=places.EVERYWHERE)
def place(request: pytest.FixtureRequest) -> Iterator[places.Place]:
    """Every kind of array that calls can have, or a stand-in for it."""
    with places.place(request.param) as found:
        yield found


@pytest.fixture(params=places.DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[places.Place]:
    """A GPU, or a stand-in for it."""
    with places.place(request.param) as found:
        yield found


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entry point of every launch, which still happens."""
    seen: list[str] = []
    start = Launch.start

    def noted(launch: Launch, *values: Any) -> None:
        seen.append(launch.variant.kernel.entry)
        start(launch, *values)

    monkeypatch.setattr(Launch, "start", noted)
    return seen
