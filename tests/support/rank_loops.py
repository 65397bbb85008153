"""Ranks as threads, and kernels of single exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_fp8 import distributed, testing
from cupy_fp8.cli.selftest_ranks import CASES, Case, check

NAMED = {case.name: case for case in CASES}


def of_ranks(size: int, function: Callable[[distributed.World], Any],
             timeout: float | None = 30.0) -> list[Any]:
    return distributed.local(size, timeout=timeout).run(function)


def check_on_cpu(case: Case, size: int, others: testing.ExecutorName | None = None, repeats: int = 2) -> None:
    """Compare every step of the case between ranks on the CPU executor with those of NumPy arrays."""
    with testing.executor("host"):
        # ThreadSanitizer of g++ 12 does not know the calls of locks with a timeout.
        of_ranks(size, lambda world: check(world, case, np, repeats=repeats, others=others), timeout=None)
