"""Work in other processes that tests wait for. It starts with the session, while tests that do not need it
run (on one processor); as many jobs at a time as there are processors.

A test module with such work defines ``background_jobs(items, background)``: pairs of a key and a function for
its selected tests, called in a thread. Its tests run last, and get results from the fixture
`background_result` by key. A module with many jobs of a second or so defines ``HAS_SHORT_JOBS = True``; they
start after those of other modules.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any, TypeVar

_NICENESS = 10                              # tests go first
_SPAWN = get_context("spawn")

Child = TypeVar("Child", subprocess.Popen[str], SpawnProcess)


class ProcessDied(RuntimeError):
    """A process died at work: signal (negative) or exit code, and the work."""


class Worker:
    """A process that calls functions one at a time. Started when needed, and again after it died."""

    def __init__(self, begin: Callable[[Callable[[], SpawnProcess]], SpawnProcess]) -> None:
        self._begin = begin
        self._process: SpawnProcess | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self._process = process = self._process or self._begin(self._new_process)
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

    def _new_process(self) -> SpawnProcess:
        self._connection, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()                      # otherwise the end of the other side would not be seen here
        return process


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
    """Runs jobs so that a process killed by the machine fails no test: its work is repeated once. A crash
    that the work itself causes happens again."""

    def __init__(self) -> None:
        processors = os.cpu_count() or 1
        self._threads = ThreadPoolExecutor(processors)
        self._futures: dict[Hashable, Future[Any]] = {}
        self._beginning = threading.Lock()
        self._stopping = False
        self._children: list[subprocess.Popen[str] | SpawnProcess] = []
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(processors):
            self._idle.put(Worker(self._begin))
        #: processes that died and whose work was repeated
        self.deaths: list[str] = []

    def start(self, key: Hashable, job: Callable[[], Any]) -> None:
        self._futures[key] = self._threads.submit(job)

    def result(self, key: Hashable) -> Any:
        return self._futures[key].result()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a reused process and return its result."""
        worker = self._idle.get()
        try:
            return worker.call(function, *args)
        except ProcessDied as death:
            self._record(str(death))
            return worker.call(function, *args)
        finally:
            self._idle.put(worker)

    def run(self, command: Sequence[str], env: Mapping[str, str],
            timeout: float) -> subprocess.CompletedProcess[str]:
        """Like subprocess.run, capturing the child's output."""
        done = self._run(command, env, timeout)
        if done.returncode == -signal.SIGKILL:          # other signals are findings
            self._record(f"killed: {' '.join(command)}")
            done = self._run(command, env, timeout)
        return done

    def _run(self, command: Sequence[str], env: Mapping[str, str],
             timeout: float) -> subprocess.CompletedProcess[str]:
        command = ["nice", "-n", str(_NICENESS), *command]
        with self._begin(partial(subprocess.Popen, command, env=env, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True)) as child:
            try:
                stdout, stderr = child.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                child.kill()
                raise
        return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)

    def _begin(self, make: Callable[[], Child]) -> Child:
        """Start a child that `stop` will end."""
        with self._beginning:
            if self._stopping:
                raise CancelledError
            child = make()
            self._children.append(child)
            return child

    def _record(self, death: str) -> None:
        if not self._stopping:
            self.deaths.append(death)

    def stop(self) -> None:
        """Cancel what has not begun, and end children."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._beginning:
            self._stopping = True
            for child in self._children:
                child.kill()                # no effect on a child that has ended
        self._threads.shutdown()
