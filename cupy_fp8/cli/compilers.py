"""Threads that compile kernels ahead of their first launch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from ..kernels import Variant

_MOST = 16                          # NVRTC and g++ each need 100 to 200 MB
_SECONDS_BETWEEN_LOOKS = 0.2


class Compilers:
    """Compiles each variant once, for one device, or for the CPU (None)."""

    def __init__(self, device: int | None, threads: ThreadPoolExecutor) -> None:
        self._device, self._threads = device, threads
        self._futures: dict[Variant, Future[None]] = {}

    def start(self, variants: Iterable[Variant]) -> list[Future[None]]:
        variants = list(variants)
        for variant in variants:
            if variant not in self._futures:
                self._futures[variant] = self._threads.submit(variant.compile, self._device)
        return [self._futures[variant] for variant in variants]

    def __str__(self) -> str:
        done = sum(future.done() for future in self._futures.values())
        return f"compiled {done} of {len(self._futures)} kernels"

    def wait(self) -> None:
        """Wait a little while, or until another kernel is compiled. A compiler's error is not raised: the
        launch of the kernel raises it again."""
        working = [future for future in self._futures.values() if not future.done()]
        wait(working, timeout=_SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED)


@contextmanager
def compilers(device: int | None) -> Iterator[Compilers]:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = ThreadPoolExecutor(min(_MOST, processors))
    try:
        yield Compilers(device, threads)
    finally:
        threads.shutdown(cancel_futures=True)
