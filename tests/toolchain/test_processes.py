"""Sessions of several processes: every test runs once, its report comes back, and a death fails one test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
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

def pytest_unconfigure(config):
    processes.stop(config)
"""
#: Three files of a hundred tests. Those of the session's process wait a little, so that others take some.
TESTS = """
import os, time
import pytest

@pytest.mark.parametrize("number", range(100))
def test_any(number):
    other = os.getpid() != int(os.environ["SESSION"])
    if not other:
        time.sleep(0.003)
    with open("ran", "a") as file:
        file.write(f"{__name__} {number} {os.getpid()}\\n")
    BODY
"""
STAYS = """
import os

def test_stays():
    assert os.getpid() == int(os.environ["SESSION"])
"""


def session(folder: Path, body: str, *arguments: str) -> tuple[int, str, list[list[str]]]:
    """The exit code, what was printed, and file, number and process of every test that ran."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name in "abc":
        (folder / f"test_{name}.py").write_text(TESTS.replace("BODY", body))
    (folder / "test_stays.py").write_text(STAYS)
    path = os.pathsep.join([str(Path(processes.__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest",
               "--processes", "2", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PYTHONPATH": path})
    ran = [line.split() for line in (folder / "ran").read_text().splitlines()]
    return done.returncode, done.stdout + done.stderr, ran


def test_every_test_runs_once(tmp_path):
    code, out, ran = session(tmp_path, "")
    assert code == 0, out
    assert "301 passed" in out
    assert {(name, number) for name, number, _ in ran} == {(f"test_{name}", str(n)) for name in "abc"
                                                           for n in range(100)}
    assert len(ran) == 300
    assert len({process for *_, process in ran}) == 2


@pytest.mark.full
@pytest.mark.parametrize("arguments", [("--processes", "1"), ("-s",), ("-k", "7")], ids=str)
def test_one_process(tmp_path, arguments):
    """On demand, where output is shown as it comes, and for few tests."""
    code, out, ran = session(tmp_path, "", *arguments)
    assert code == 0, out
    assert len({process for *_, process in ran}) == 1


def test_failures_and_their_output_come_back(tmp_path):
    code, out, _ = session(tmp_path, "print('the number is', number); assert number != 7", "-v")
    assert code == 1
    assert "3 failed, 298 passed" in out
    assert out.count("the number is 7") == 3
    assert Counter(re.findall(r"^test_\w\.py::test_any\[7\] (\w+)", out, re.MULTILINE)) == {"FAILED": 3}


@pytest.mark.full
def test_the_first_failure_can_end_the_session(tmp_path):
    code, out, ran = session(tmp_path, "assert number != 7", "-x")
    assert code == 1, out
    assert re.search(r"\b1 failed", out)
    assert "stopping after 1 failures" in out
    assert len(ran) < 300


def test_a_death_fails_one_test_and_the_others_run(tmp_path):
    code, out, ran = session(tmp_path, "if other and number == 50: os._exit(3)")
    assert code == 1, out
    assert "1 failed, 300 passed" in out
    assert "a process of tests ended with 3: it died" in out
    assert len({(name, number) for name, number, _ in ran}) == 300


def test_chunks_are_neighbours_of_one_kind():
    assert processes.chunks([1, 1, 2, 1], lambda n: n) == [[1, 1], [2], [1]]
    assert list(map(len, processes.chunks(range(250), lambda n: 0))) == [100, 100, 50]


def test_values_with_the_next_one():
    assert list(processes.with_next("abc")) == [("a", "b"), ("b", "c"), ("c", None)]
    assert list(processes.with_next("")) == []
