"""Work in other processes that tests wait for. It starts when the session does, beside the tests that need nothing of it (which use one
processor), as much at a time as there are processors.

A test module that has such work defines ``background_jobs(items, background)``: of its selected tests, pairs of a key and a function, which
is called in a thread. Its tests run last, and ask the fixture `background_result` by key.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any

_NICENESS = 10                              # the tests go first
_SPAWN = get_context("spawn")


class ProcessDied(RuntimeError):
    """A process ended while it worked: by which signal (negative) or exit code, and on what."""


class Worker:
    """A process that calls functions, one at a time. It begins when it is needed, and again after it died."""

    def __init__(self) -> None:
        self._process: SpawnProcess | None = None
        self._beginning = threading.Lock()
        self.killed = False

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._beginning:
            if self.killed:
                raise ProcessDied("killed before it began")
            self._process = process = self._process or self._begin()
        try:
            self._connection.send((function, args))
            result, problem = self._connection.recv()
        except (EOFError, OSError):
            process.join()
            self._process = None
            raise ProcessDied(f"exit code {process.exitcode} in {function.__name__}{args}") from None
        if problem is not None:
            raise problem
        return result

    def _begin(self) -> SpawnProcess:
        self._connection, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()                      # or the end of theirs would not be seen here
        return process

    def kill(self) -> None:
        """For good."""
        with self._beginning:
            self.killed = True
            if self._process is not None:
                self._process.kill()


def _serve(connection: Connection) -> None:
    os.nice(_NICENESS)
    while True:
        function, args = connection.recv()
        result = problem = None
        try:
            result = function(*args)
        except Exception as e:
            problem = e
        connection.send((result, problem))


class Background:
    def __init__(self) -> None:
        processors = os.cpu_count() or 1
        self._threads = ThreadPoolExecutor(processors)
        self._futures: dict[Hashable, Future[Any]] = {}
        self._children: set[subprocess.Popen[str]] = set()
        self._workers = [Worker() for _ in range(processors)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        #: Of processes, that others made up for.
        self.deaths: list[str] = []

    def start(self, key: Hashable, job: Callable[[], Any]) -> None:
        self._futures[key] = self._threads.submit(job)

    def result(self, key: Hashable) -> Any:
        return self._futures[key].result()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function, called in a process that is used again. If that one dies, another tries once more: what the machine
        did to it does not fail a test, what the function does fails every time."""
        worker = self._idle.get()
        try:
            return worker.call(function, *args)
        except ProcessDied as death:
            if worker.killed:
                raise
            self.deaths.append(str(death))
            return worker.call(function, *args)
        finally:
            self._idle.put(worker)

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
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown()
