"""Runs the tests of a session in several processes, one per processor.

The session's process forks the others after collection, so that tests are collected once. All take chunks of
tests, consecutive in one file, from the same pipe until it is empty. Reports return to the session's process,
which passes them to its plugins, chunk by chunk. If tests have to stay with it, it runs only these: threads
work for them meanwhile, and must not see what other tests change (environment variables, functions).

tests/conftest.py takes the hooks from here.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, NoReturn, TypeVar

import pytest

_MOST = 4                       # most processes, unless given on the command line
_FEWEST_TESTS = 200             # fewer run in one process, with output test by test
_CHUNK = 100                    # tests
_TOKEN = 4                      # bytes of a chunk's number in the pipe

Value = TypeVar("Value")
_PROCESSES = pytest.StashKey["Processes"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, metavar="N", default=min(os.cpu_count() or 1, _MOST),
                     help="how many processes run tests (default: one for each processor, "
                          f"{_MOST} at most; 1 with -s or --pdb, and for few tests)")


def begin(session: pytest.Session, stays: Callable[[pytest.Item], bool]) -> None:
    """Start the other processes, which begin at once. Tests that `stays` accepts are not for them. Threads of
    this process must start later."""
    option = session.config.option
    alone = option.collectonly or option.usepdb or option.capture == "no" or session.testsfailed
    if not alone and option.processes > 1 and len(session.items) >= _FEWEST_TESTS:
        session.config.stash[_PROCESSES] = Processes(session, stays)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Return None to leave the tests to pytest's own loop."""
    processes = session.config.stash.get(_PROCESSES, None)
    if processes is None:
        return None
    processes.run()
    return True


def stop(config: pytest.Config) -> None:
    """End the other processes that still run."""
    if processes := config.stash.get(_PROCESSES, None):
        processes.stop()


class Message(NamedTuple):
    """Event of another process: it began a test, ended it (reports), or ended itself. problem: why."""

    child: int
    test: int | None
    reports: list[Any] | None = None
    problem: str = ""


class Processes:
    def __init__(self, session: pytest.Session, stays: Callable[[pytest.Item], bool]) -> None:
        self._session, self._hook = session, session.config.hook
        self._items = session.items
        self._own = [i for i, item in enumerate(self._items) if stays(item)]
        own = set(self._own)
        self._chunks = chunks([i for i in range(len(self._items)) if i not in own],
                              lambda i: self._items[i].path)
        #: Reports of other processes' tests that no plugin has received yet.
        self._reports: dict[int, list[Any]] = {}
        self._waiting = {n: set(chunk) for n, chunk in enumerate(self._chunks)}
        self._chunk_of = {i: n for n, chunk in enumerate(self._chunks) for i in chunk}
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._children: dict[int, int | None] = {}  # process id → test it runs
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all processes
        self._tokens, end = os.pipe()
        os.write(end, b"".join(n.to_bytes(_TOKEN, "little") for n in range(len(self._chunks))))
        os.close(end)
        others = session.config.option.processes - (not self._own)
        connections = [self._fork() for _ in range(others)]
        for child, connection in zip(self._children, connections, strict=True):
            threading.Thread(target=self._receive, args=(child, connection), daemon=True).start()

    # ---- the other processes ----
    def _fork(self) -> Connection:
        ours, theirs = Pipe(duplex=False)
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)     # NumPy's threads end before a fork
            child = os.fork()
        # Each has its own process group, which ends with whatever its tests have started.
        with suppress(OSError):
            os.setpgid(child, child)
        if child == 0:
            ours.close()                # otherwise the end of the session's process would not be seen here
            self._serve(theirs)
        theirs.close()                  # otherwise the end of the child would not be seen here
        self._children[child] = None
        return ours

    def _serve(self, connection: Connection) -> NoReturn:
        problem = ""
        try:
            sender = _Sender(self._session.config)
            for i, following in with_next(self._taken()):
                connection.send(Message(0, i))
                self._run_test(i, following)
                connection.send(Message(0, i, sender.take()))
            self._session.config._ensure_unconfigure()      # raises what pytest finds at the end
        except BaseException:
            problem = traceback.format_exc()
        finally:
            with suppress(OSError):                         # the session's process is gone
                connection.send(Message(0, None, problem=problem))
            os._exit(bool(problem))

    def _taken(self) -> Iterator[int]:
        """Yield tests of chunks that no other process has taken."""
        while token := os.read(self._tokens, _TOKEN):
            yield from self._chunks[int.from_bytes(token, "little")]

    def _run_test(self, i: int, following: int | None) -> None:
        nextitem = None if following is None else self._items[following]
        self._hook.pytest_runtest_protocol(item=self._items[i], nextitem=nextitem)

    # ---- the session's process ----
    def _receive(self, child: int, connection: Connection) -> None:
        """Run in a thread. A child that dies sends no last message."""
        try:
            while (message := connection.recv()).test is not None:
                self._messages.put(message._replace(child=child))
            self._messages.put(message._replace(child=child))
        except (EOFError, OSError):
            self._messages.put(Message(child, None, problem="it died"))

    def run(self) -> None:
        """Run the tests of this process, or some of all if it has none, and wait for all others."""
        try:
            for i, following in with_next(self._own or self._taken()):
                self._run_test(i, following)
                self._count(i)
                self._heed()
                self._report_what_came(wait=False)
            while self._children:
                self._report_what_came(wait=True)
                self._heed()
            lost = sorted(itertools.chain.from_iterable(self._waiting.values()))
            for i, following in with_next(lost):        # their processes died
                self._run_test(i, following)
                self._count(i)
                self._heed()
        finally:
            for i in sorted(self._reports):             # left by an interrupted session
                self._report(i)

    def _heed(self) -> None:
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _report_what_came(self, wait: bool) -> None:
        while True:
            try:
                message = self._messages.get(block=wait)
            except Empty:
                return
            wait = False
            if message.test is None:
                self._ended(message)
            elif message.reports is None:
                self._children[message.child] = message.test
            else:
                self._children[message.child] = None
                self._reports[message.test] = message.reports
                self._count(message.test)

    def _count(self, i: int) -> None:
        """Note that a test has run. The reports of a chunk are passed on together."""
        n = self._chunk_of.get(i)
        if n is None:
            return
        self._waiting[n].discard(i)
        if not self._waiting[n]:
            for test in self._chunks[n]:
                if test in self._reports:
                    self._report(test)
                    self._heed()

    def _report(self, i: int) -> None:
        where = {"nodeid": self._items[i].nodeid, "location": self._items[i].location}
        self._hook.pytest_runtest_logstart(**where)
        for data in self._reports.pop(i):
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=data)
            self._hook.pytest_runtest_logreport(report=report)
        self._hook.pytest_runtest_logfinish(**where)

    def _ended(self, message: Message) -> None:
        running = self._children.pop(message.child)
        _, status = os.waitpid(message.child, 0)
        if not message.problem:
            return
        problem = f"a process of tests ended with {os.waitstatus_to_exitcode(status)}: {message.problem}"
        if running is None:                             # fails outside of a test
            name = "a process of tests"
            self._hook.pytest_runtest_logreport(
                report=pytest.TestReport(name, (name, None, ""), {}, "failed", problem, "call"))
            return
        item = self._items[running]
        failed = pytest.TestReport(item.nodeid, item.location, {}, "failed", problem, "call")
        self._reports[running] = [self._hook.pytest_report_to_serializable(config=self._session.config,
                                                                           report=failed)]
        self._count(running)

    def stop(self) -> None:
        for child in self._children:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self._children.clear()


class _Sender:
    """In a process other than the session's: keep the reports of a test instead of showing them."""

    def __init__(self, config: pytest.Config) -> None:
        manager = config.pluginmanager
        manager.unregister(name="terminalreporter")
        manager.register(self)
        # Output files are created anew, since a position in a file survives a fork and is shared.
        capture: Any = manager.getplugin("capturemanager")
        self._old_files, capture._global_capturing = capture._global_capturing, None
        capture.start_global_capturing()
        capture.suspend_global_capture()
        self._config = config
        self._reports: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(self._config.hook.pytest_report_to_serializable(config=self._config,
                                                                             report=report))

    def take(self) -> list[Any]:
        reports, self._reports = self._reports, []
        return reports


def chunks(values: Sequence[Value], kind: Callable[[Value], Any]) -> list[list[Value]]:
    """Divide tests into chunks of consecutive ones of one kind, at most _CHUNK each."""
    return [group[start:start + _CHUNK]
            for group in (list(found) for _, found in itertools.groupby(values, key=kind))
            for start in range(0, len(group), _CHUNK)]


def with_next(values: Iterable[Value]) -> Iterator[tuple[Value, Value | None]]:
    """Yield each value with the next one, None after the last."""
    ahead = iter(values)
    for value in itertools.islice(ahead, 1):
        for following in ahead:
            yield value, following
            value = following
        yield value, None
