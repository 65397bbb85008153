"""Indices beyond 2**32, without a GPU and without the memory: both ends of huge lazily mapped arrays, by the first and last blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from far_arrays import CALLS, check, lazy_memory, mapped

import cupy_fp8 as fp8
from cupy_fp8 import backend, hostexec, testing
from cupy_fp8.formats import float8_e4m3fn
from cupy_fp8.kernels import grid_size

pytestmark = pytest.mark.skipif(hostexec.available() is not None, reason=str(hostexec.available()))


@pytest.fixture(autouse=True)
def no_advice(monkeypatch):
    """Large NumPy arrays are meant here, where a GPU would do too."""
    monkeypatch.setattr(backend, "note_large_numpy", lambda x: None)


@pytest.mark.full
@pytest.mark.parametrize("far", [pytest.param(far, id=name) for name, far in CALLS.items()])
def test_both_ends_equal_the_reference(far):
    check(far)


def test_only_the_ends_of_a_grid_run():
    """Blocks of 2048 elements: the middle of the result keeps what it had."""
    x, out = np.ones(10 * 2048, np.float16), np.zeros(10 * 2048, np.uint8).view(float8_e4m3fn)
    with testing.executor("host"), hostexec.blocks_of_grid(first=2, last=3):
        fp8.astype(x, float8_e4m3fn, out=out)
    ran = [bool(block.any()) for block in out.view(np.uint8).reshape(10, 2048)]
    assert ran == [True] * 2 + [False] * 5 + [True] * 3
    with testing.executor("host"), hostexec.blocks_of_grid(first=8, last=8):
        fp8.astype(x, float8_e4m3fn, out=out)
    assert out.view(np.uint8).all(), "blocks of both ends run once"


@pytest.mark.parametrize("ends", [{"first": -1, "last": 2}, {"first": 0, "last": -1}])
def test_negative_numbers_of_blocks_are_refused(ends):
    with pytest.raises(ValueError, match="expected numbers of blocks, 0 or more"), hostexec.blocks_of_grid(**ends):
        pass


@pytest.mark.full
def test_the_largest_grid_that_there_is():
    """2**31 - 1 blocks are launched, and the last one works; one more is refused."""
    blocks = (1 << 31) - 1
    assert grid_size(blocks, ()) == blocks
    x: Any = mapped(blocks * 2048, np.float16)
    x[-2048:] = 3
    with testing.executor("host"), lazy_memory(), hostexec.blocks_of_grid(first=0, last=1):
        out = fp8.astype(x, float8_e4m3fn)
        assert (out[-2048:].astype(np.float32) == 3).all()
        assert not out[-4096:-2048].view(np.uint8).any()
    with pytest.raises(ValueError, match=r"needs 2147483648 blocks"):
        grid_size(blocks + 1, ())
