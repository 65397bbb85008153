"""Arrays of scales for tests: E8M0 bytes, their layout by its formula, and memory with guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cupy_fp8 as fp8
from cupy_fp8 import testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import float8_e8m0fnu
from cupy_fp8.layouts import cdiv


def scales(*shape: int, seed: int = 0) -> np.ndarray:
    """No byte is 0, so that padding shows."""
    return np.random.default_rng(seed).integers(1, 256, shape, np.uint8).view(float8_e8m0fnu)


def by_formula(s: np.ndarray) -> np.ndarray:
    """docs/layouts.md, byte by byte: a matrix of scales -> swizzled bytes."""
    lines, blocks = s.shape
    out = np.zeros(cdiv(lines, 128) * cdiv(blocks, 4) * 512, np.uint8)
    written = set()
    for i in range(lines):
        for j in range(blocks):
            at = (i // 128 * cdiv(blocks, 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
            out[at] = bits(s)[i, j]
            written.add(at)
    assert len(written) == s.size
    return out


def raw(a: Any) -> np.ndarray:
    return bits(fp8.asnumpy(a))


def stored_by_blocks(s: np.ndarray, run: testing.Executor) -> Any:
    """The same scales with their lines adjacent, on the executor's device: a view of [blocks, lines]."""
    return run.array(np.ascontiguousarray(s.swapaxes(-1, -2))).swapaxes(-1, -2)


def guarded(run: testing.Executor, shape: tuple[int, ...]) -> tuple[Any, Callable[[], bool]]:
    """(a poisoned array, whether the 512 bytes on either side of it are as they were)."""
    n = int(np.prod(shape))
    buffer = run.array(np.full(n + 1024 + 16, 0xAA, np.uint8))
    at = buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data.ptr
    lead = 512 + -at % 16
    out = buffer[lead : lead + n].view(float8_e8m0fnu).reshape(shape)

    def intact() -> bool:
        outside = np.delete(raw(buffer), np.s_[lead : lead + n])
        return bool((outside == 0xAA).all())

    return out, intact
