"""pytest's output if a test with the strategies and comparisons of cupy_fp8.testing fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cupy_fp8 as fp8

ROOT = Path(fp8.__file__).resolve().parent.parent
FAILING = '''
import numpy as np
from cupy_fp8 import testing
from hypothesis import given, settings


@settings(database=None, deadline=None, derandomize=True)
@given(testing.arrays(np.float32, max_dims=2), testing.scales())
def test_arrays(x, scale):
    testing.assert_bytes_equal(x, x[::-1] if x.ndim else x)


@settings(database=None, deadline=None, derandomize=True)
@given(testing.mx_results(max_side=40))
def test_results(s):
    testing.assert_bytes_equal(s, s.dequantize())
'''


def test_the_input_is_shown_and_no_frame_of_the_package(tmp_path):
    pytest.importorskip("hypothesis")
    (tmp_path / "test_failing.py").write_text(FAILING)
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_failing.py"],
                         cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
                         text=True)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert re.search(r"x=array\(\[.*\], dtype=float32\)", ran.stdout, re.DOTALL)
    assert re.search(r"s=Scaled\(\s*E?\s*array\(\[.*dtype='?float8_e4m3fn.*"
                     r"array\(\[.*dtype='?float8_e8m0fnu.*'compact'", ran.stdout, re.DOTALL)
    assert "_random_bits" not in ran.stdout
    assert not re.findall(r"cupy_fp8/\S+\.py:\d+: ", ran.stdout)
    assert len(re.findall(r"^> +testing\.assert_bytes_equal", ran.stdout, re.MULTILINE)) == 2
