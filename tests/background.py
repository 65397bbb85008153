"""Work in other processes that tests wait for. It starts when the session does, beside the tests that need nothing of it (which use one
processor), as much at a time as there are processors.

A test module that has such work defines ``background_jobs(items, background)``: of its selected tests, pairs of a key and a function, which
is called in a thread. Its tests run last, and ask the fixture `background_result` by key.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

_NICENESS = 10                              # the tests go first


class Background:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(os.cpu_count())
        self._processes = ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), os.nice, (_NICENESS,))      # begun when needed
        self._futures: dict[Hashable, Future[Any]] = {}
        self._children: set[subprocess.Popen[str]] = set()

    def start(self, key: Hashable, job: Callable[[], Any]) -> None:
        self._futures[key] = self._threads.submit(job)

    def result(self, key: Hashable) -> Any:
        return self._futures[key].result()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function, called in a process that is used again."""
        return self._processes.submit(function, *args).result()

    def run(self, command: Sequence[str], env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
        """As subprocess.run, with what the child prints."""
        command = ["nice", "-n", str(_NICENESS), *command]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            self._children.add(child)
            try:
                stdout, stderr = child.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                child.kill()
                raise
            finally:
                self._children.discard(child)
        return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)

    def stop(self) -> None:
        """What has not begun does not begin; children end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in list(self._children):
            child.kill()
        self._processes.shutdown(cancel_futures=True)
        self._threads.shutdown()
