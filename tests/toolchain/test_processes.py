"""Sessions of several processes: every test runs once, its report comes back, a death fails one test, and
nothing is left running."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import processes
import pytest

CONFTEST = """
import os
import processes
from processes import pytest_addoption, pytest_runtestloop

os.environ["SESSION"] = str(os.getpid())

def pytest_collection_finish(session):
    processes.begin(session, stays=lambda item: "stays" in item.name)
    os.environ["ALONE"] = str(processes._PROCESSES not in session.config.stash)

def pytest_unconfigure(config):
    processes.stop(config)
    if os.environ.get("BREAK") and os.getpid() != int(os.environ["SESSION"]):
        raise OSError("broken at the end")
"""
#: Three files of a hundred tests. Those of the session's process wait until others have taken some.
TESTS = """
import os, subprocess, time
import pytest

def others_run():
    with open("ran") as file:
        return any(line.split()[-1] != os.environ["SESSION"] for line in file)

@pytest.mark.parametrize("number", range(100))
def test_any(number):
    other = os.getpid() != int(os.environ["SESSION"])
    with open("ran", "a") as file:
        file.write(f"{__name__} {number} {os.getpid()}\\n")
    deadline = time.monotonic() + 100
    while not other and os.environ["ALONE"] != "True" and not others_run() and time.monotonic() < deadline:
        time.sleep(0.01)
    BODY
"""
STAYS = """
import os

def test_stays():
    assert os.getpid() == int(os.environ["SESSION"])
"""


def start(folder: Path, body: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start a session of two processes with tests of this body."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name in "abc":
        (folder / f"test_{name}.py").write_text(TESTS.replace("BODY", body))
    if "STAYS" in environment:
        (folder / "test_stays.py").write_text(STAYS)
    path = os.pathsep.join([str(Path(processes.__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest",
               "--processes", "2", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=os.environ | {"PYTHONPATH": path, **environment})


def session(folder: Path, body: str, *arguments: str, **environment: str) -> tuple[int, str, list[list[str]]]:
    """Return the exit code, the output, and file, number and process of every test that ran."""
    with start(folder, body, *arguments, **environment) as running:
        out, _ = running.communicate(timeout=300)
    return running.returncode, out, that_ran(folder)


def that_ran(folder: Path) -> list[list[str]]:
    ran = folder / "ran"
    return [line.split() for line in ran.read_text().splitlines()] if ran.exists() else []


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(process: str) -> bool:
    try:
        state = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"                             # a zombie: its parent is gone, and nobody waits for it


def test_every_test_runs_once(tmp_path):
    code, out, ran = session(tmp_path, "")
    assert code == 0, out
    assert "300 passed" in out
    assert {(name, number) for name, number, _ in ran} == {(f"test_{name}", str(n)) for name in "abc"
                                                           for n in range(100)}
    assert len(ran) == 300
    assert len({process for *_, process in ran}) == 2


def test_where_tests_stay_the_others_run_elsewhere(tmp_path):
    """The process in which they run runs no others."""
    with start(tmp_path, "", STAYS="1") as running:
        out, _ = running.communicate(timeout=300)
    assert "301 passed" in out
    ran = that_ran(tmp_path)
    assert len(ran) == 300
    assert str(running.pid) not in {process for *_, process in ran}


@pytest.mark.full
@pytest.mark.parametrize("arguments", [("--processes", "1"), ("-s",), ("-k", "7")], ids=str)
def test_one_process(tmp_path, arguments):
    """One process runs if requested, if output is shown as it comes, and for few tests."""
    code, out, ran = session(tmp_path, "", *arguments)
    assert code == 0, out
    assert len({process for *_, process in ran}) == 1


def test_failures_and_their_output_come_back(tmp_path):
    code, out, _ = session(tmp_path, "print('the number is', number); assert number != 7", "-v")
    assert code == 1
    assert "3 failed, 297 passed" in out
    assert out.count("the number is 7") == 3
    assert Counter(re.findall(r"^test_\w\.py::test_any\[7\] (\w+)", out, re.MULTILINE)) == {"FAILED": 3}


@pytest.mark.full
def test_the_first_failure_can_end_the_session(tmp_path):
    code, out, ran = session(tmp_path, "assert number != 7", "-x")
    assert code == 1, out
    assert re.search(r"\b[123] failed", out)             # at most one of each file fails
    assert "stopping after 1 failures" in out
    assert len(ran) < 300


def test_a_death_fails_one_test_and_the_others_run(tmp_path):
    code, out, ran = session(tmp_path, "if other and number == 50: os._exit(3)")
    assert code == 1, out
    assert "1 failed, 299 passed" in out
    assert "a process of tests ended with 3: it died" in out
    assert len({(name, number) for name, number, _ in ran}) == 300


def test_a_problem_at_the_end_of_a_process_fails_beside_the_tests(tmp_path):
    code, out, ran = session(tmp_path, "", BREAK="1")
    assert code == 1, out
    assert "1 failed, 300 passed" in out
    assert "OSError: broken at the end" in out
    assert len(ran) == 300


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_processes_end_with_a_session_that_is_killed(tmp_path):
    with start(tmp_path, "time.sleep(0.1)") as running:
        wait_until(lambda: len({process for *_, process in that_ran(tmp_path)}) == 2)
        running.kill()
    (other,) = {process for *_, process in that_ran(tmp_path)} - {str(running.pid)}
    wait_until(lambda: has_ended(other))


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_other_processes_started_ends_with_the_session(tmp_path):
    body = """if other:
        with subprocess.Popen(["sleep", "1000"]) as begun:
            with open("partly", "w") as file:
                file.write(str(begun.pid))
            os.replace("partly", "begun")
    while not os.path.exists("begun"):
        time.sleep(0.01)
    assert False"""
    code, out, _ = session(tmp_path, body, "-x")
    assert code == 1, out
    wait_until(lambda: has_ended((tmp_path / "begun").read_text()))


def test_chunks_are_neighbours_of_one_kind():
    assert processes.chunks([1, 1, 2, 1], lambda n: n) == [[1, 1], [2], [1]]
    assert list(map(len, processes.chunks(range(250), lambda n: 0))) == [100, 100, 50]


def test_values_with_the_next_one():
    assert list(processes.with_next("abc")) == [("a", "b"), ("b", "c"), ("c", None)]
    assert list(processes.with_next("")) == []
