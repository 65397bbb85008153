"""The scripts of examples/ run, on two ranks of NumPy arrays here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_fp8 import backend

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(backend.gpu_problem() is None, reason="on GPUs it wants one for each rank")
def test_experts_over_gpus():
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-m", "cupy_fp8", "launch", "-n", "2",
                           str(ROOT / "examples/experts_over_gpus.py")],
                          capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, *steps, last = done.stdout.splitlines()
    assert first.startswith("ExpertParallel(rank 0 of 2, 8 experts, 128 tokens x 256, messages)")
    losses = [float(line.rpartition(" ")[2]) for line in steps]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert last == "weights of 2 ranks after 2 steps: the bytes of one rank"
