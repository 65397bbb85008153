"""Functions in other processes: their results, their exceptions, and their deaths."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from background import Background, ProcessDied


@pytest.fixture
def background() -> Iterator[Background]:
    b = Background()
    yield b
    b.stop()


def die_once(marker: Path) -> int:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_results_and_exceptions_come_back(background):
    pids = {background.call(os.getpid) for _ in range(2 * (os.cpu_count() or 1))}
    assert os.getpid() not in pids
    assert len(pids) == os.cpu_count(), "processes are used again"
    with pytest.raises(ZeroDivisionError):
        background.call(divmod, 1, 0)
    assert background.call(divmod, 7, 2) == (3, 1)
    assert background.deaths == []


def test_work_of_a_process_that_died_is_done_again(background, tmp_path):
    marker = tmp_path / "died"
    assert background.call(die_once, marker) != os.getpid()
    (death,) = background.deaths
    assert death.startswith("exit code -9 in die_once")
    assert str(marker) in death


def test_a_child_that_is_killed_runs_again(background, tmp_path):
    command = ["sh", "-c", f"test -e {tmp_path}/died || {{ touch {tmp_path}/died; kill -9 $$; }}; echo alive"]
    assert background.run(command, os.environ, timeout=60).stdout == "alive\n"
    (death,) = background.deaths
    assert death == f"killed: {' '.join(command)}"
    assert background.run(["sh", "-c", "kill -9 $$"], os.environ, timeout=60).returncode == -signal.SIGKILL
    assert background.run(["sh", "-c", "kill -11 $$"], os.environ, timeout=60).returncode == -signal.SIGSEGV
    assert len(background.deaths) == 2, "only what is killed runs again"


def test_what_kills_every_process_fails_alone(background):
    with pytest.raises(ProcessDied, match=r"exit code 3 in _exit\(3,\)"):
        background.call(os._exit, 3)
    assert background.call(divmod, 7, 2) == (3, 1)
    assert len(background.deaths) == 1


@pytest.mark.parametrize("delay", [0, 0.01, 0.3, 2], ids=str)
def test_stopping_is_not_a_death(delay):
    background = Background()
    background.start("pausing", lambda: background.call(signal.pause))
    background.start("running", lambda: background.run(["sleep", "600"], os.environ, timeout=900))
    for key in range(4):
        background.start(key, lambda: background.call(signal.pause))
    time.sleep(delay)
    background.stop()
    assert background.deaths == []
