"""A process that forks while a thread works: the child works too, and computes the same bytes."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import cache, testing
from cupy_fp8.hostexec import build
from cupy_fp8.kernels import errors

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
X = np.random.default_rng(0).standard_normal((512, 1024), np.float32)


@contextmanager
def busy(work: Callable[[], Any]) -> Iterator[None]:
    """Run this work in a thread, over and over."""
    stop, started = threading.Event(), threading.Event()

    def loop() -> None:
        while not stop.is_set():
            work()
            started.set()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        assert started.wait(60)
        yield
    finally:
        stop.set()
        thread.join()


def child_does(work: Callable[[], bool], seconds: float = 30, meanwhile: Callable[[], Any] = int) -> bool:
    """Whether a forked process does this correctly in time. meanwhile: what this process does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)         # of forks beside threads
        child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    meanwhile()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


@needs_host
def test_a_child_runs_kernels_while_a_thread_of_its_parent_does():
    """At whichever point of a launch the fork happens."""
    def quantize() -> Any:
        with testing.executor("host"):
            return fp8.quantize_tensor(X, columnwise=True)

    want = fp8.quantize_tensor(X, columnwise=True)
    assert quantize() == want
    with busy(quantize):
        for _ in range(8):
            assert child_does(lambda: quantize() == want)
    assert quantize() == want


def test_a_child_compiles_while_a_thread_of_its_parent_does(tmp_path):
    """Both wait for one file, which is made once."""
    working, end = threading.Event(), threading.Event()
    target = tmp_path / "made"

    def make(scratch: Path) -> Path:
        working.set()
        assert end.wait(60)
        (scratch / "part").write_text("once")
        return scratch / "part"

    def again(_: Path) -> Path:
        raise AssertionError("it was there")

    thread = threading.Thread(target=build._build_into, args=(target, make))
    thread.start()
    try:
        assert working.wait(60)
        assert child_does(lambda: build._build_into(target, again).read_text() == "once", meanwhile=end.set)
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("lock", [cache._LOCK, errors._lock], ids=["cache", "errors"])
def test_a_lock_is_free_in_a_child(lock):
    """Even while other threads hold it."""
    def hold() -> None:
        with lock:
            time.sleep(0.002)

    with busy(hold):
        assert all(child_does(lambda: lock.acquire(timeout=5)) for _ in range(3))
    assert lock.acquire(timeout=5)
    lock.release()
