"""python -m cupy_fp8 launch: processes that find each other, and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import cupy_fp8 as fp8

ROOT = Path(fp8.__file__).resolve().parent.parent
HEAD = "import os, sys, time, numpy as np, cupy_fp8 as fp8\nworld = fp8.distributed.init(timeout=20)\n"


def start(folder: Path, text: str, *options: str, **how: Any) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(HEAD + text, encoding="utf-8")
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, "-m", "cupy_fp8", "launch", *options, str(script), "word"],
                            env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


def ended(folder: Path, text: str, *options: str) -> tuple[int, list[str], str]:
    done = start(folder, text, *options)
    out, err = done.communicate(timeout=60)
    return done.returncode, sorted(out.splitlines()), err


def test_ranks_exchange_rows(tmp_path):
    text = """
with fp8.distributed.ExpertParallel(world, num_experts=4, max_tokens=2, hidden=128, topk=1, like=np) as ep:
    routing = ep.route(np.array([[3], [world.rank]]))
    rows, _ = ep.dispatch(np.full((2, 128), 1 + world.rank, np.float32), routing)
    y = ep.combine(rows.dequantize("bfloat16"), routing)
    told = world.rank, routing.splits.tolist(), y[:, 0].astype(int).tolist(), sys.argv[1]
    sys.stdout.write("{} {} {} {}\\n".format(*told))
"""
    code, lines, err = ended(tmp_path, text, "-n", "2")
    assert (code, lines) == (0, ["0 [128, 128] [1, 1] word", "1 [0, 128] [2, 2] word"]), err


def test_one_that_fails_ends_all(tmp_path):
    start_time = time.monotonic()
    code, _, err = ended(tmp_path, "sys.exit(3) if world.rank == 1 else time.sleep(60)", "-n", "3")
    assert code == 3
    assert "launch: rank 1 ended with exit code 3; the others are told to end" in err
    assert time.monotonic() - start_time < 30


def test_one_that_is_killed(tmp_path):
    code, _, err = ended(tmp_path, "os.kill(os.getpid(), 9) if world.rank == 0 else time.sleep(60)", "-n",
                         "2")
    assert code == 128 + signal.SIGKILL
    assert "launch: rank 0 ended with SIGKILL" in err


def test_signals_are_passed_on(tmp_path):
    text = """
import signal
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"%d told\\n" % world.rank), os._exit(0)))
world.barrier()
os.write(1, b"ready\\n")
time.sleep(60)
"""
    process = start(tmp_path, text, "-n", "2")
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "ready\n"
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert sorted(out.splitlines()) == ["0 told", "1 told"]
    assert process.returncode == 0


@pytest.mark.parametrize("options", [("-n", "0"), ("-n", "x"), ()])
def test_wrong_numbers_of_ranks(tmp_path, options):
    code, _, err = ended(tmp_path, "", *options)
    assert code == 2
    assert "-n" in err
