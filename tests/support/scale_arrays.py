"""Arrays of scales for tests: E8M0 bytes, layouts by their formulas, and memory with guards."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from trees import map_arrays

import cupy_fp8 as fp8
from cupy_fp8 import testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import float8_e8m0fnu, float32, int32
from cupy_fp8.layouts import cdiv, round_up, scale_shape

#: views of a matrix [60, 200]
VIEWS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda a: a[:50:2, :],
    "columns": lambda a: a[:, 3:160],
    "stepped": lambda a: a[:, ::3],
    "backwards": lambda a: a[::-1, ::-1],
    "transposed and cut": lambda a: a.T[5:180],
    "one column": lambda a: a[:, 7:8],
    "one column, transposed": lambda a: a[:, 7:8].T,
    "a batch, cut": lambda a: a.reshape(3, 20, 200)[:, 2:, 4:],
    "a batch, transposed and cut": lambda a: a.reshape(3, 20, 200).swapaxes(1, 2)[:, 7:, :],
    "a batch, its axes rolled": lambda a: a.reshape(3, 20, 200).transpose(2, 0, 1),
}


def scales(*shape: int, seed: int = 0) -> np.ndarray:
    """Return an array without zero bytes, so that padding shows."""
    return np.random.default_rng(seed).integers(1, 256, shape, np.uint8).view(float8_e8m0fnu)


def by_formula(s: np.ndarray) -> np.ndarray:
    """Swizzle a matrix of scales by docs/layouts.md, byte by byte."""
    lines, blocks = s.shape
    out = np.zeros(round_up(lines, 128) * round_up(blocks, 4), np.uint8)
    found = addresses("swizzled", (lines, 32 * blocks), (1, 32))
    assert len({at for (at,) in found.values()}) == s.size
    for place, at in found.items():
        out[at] = bits(s)[place]
    return out


def raw(a: Any) -> np.ndarray:
    return bits(fp8.asnumpy(a))


def stored_by_blocks(s: np.ndarray, run: testing.Executor) -> Any:
    """Return the same scales with adjacent lines, on the executor's device: a view of [blocks, lines]."""
    return run.array(np.ascontiguousarray(s.swapaxes(-1, -2))).swapaxes(-1, -2)


def guarded(run: testing.Executor, shape: tuple[int, ...], dtype: np.dtype[Any] = float8_e8m0fnu,
            lead: int = 0) -> tuple[Any, Callable[[], bool]]:
    """Return (a poisoned array that starts `lead` bytes past a multiple of 16, a check that the 512 bytes on
    either side of it are unchanged)."""
    n = int(np.prod(shape)) * dtype.itemsize
    buffer = run.array(np.full(n + 1024 + 32, 0xAA, np.uint8))
    at = buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data.ptr
    first = 512 + -at % 16 + lead
    out = buffer[first : first + n].view(dtype).reshape(shape)

    def intact() -> bool:
        outside = np.delete(raw(buffer), np.s_[first : first + n])
        return bool((outside == 0xAA).all())

    return out, intact


def guarded_like(run: testing.Executor, tree: Any, lead: int = 0,
                 kept: tuple[Any, ...] = ()) -> tuple[Any, Callable[[], bool]]:
    """Return (the same tree of poisoned arrays, except those that are kept, a check that the memory around
    them is unchanged). They start `lead` bytes past a multiple of 16, rounded down to their element size."""
    checks = []

    def make(a: Any) -> Any:
        if any(a is one for one in kept):
            return a
        made, intact = guarded(run, a.shape, a.dtype, lead // a.itemsize * a.itemsize)
        checks.append(intact)
        return made

    return map_arrays(tree, make), lambda: all(intact() for intact in checks)


def addresses(layout: str, shape: tuple[int, int], block: tuple[int | None, int | None]) -> dict[tuple[int,
    int], list[int]]:
    """Return the places of a matrix's scales, by line and block (2-D: by row and column of blocks):
    docs/layouts.md, scale by scale. In elements; in bytes if a scale is a byte."""
    down, across = (cdiv(n, b or max(n, 1)) for n, b in zip(shape, block, strict=True))
    lines, blocks = (across, down) if block[1] == 1 else (down, across)
    found: dict[tuple[int, int], list[int]] = {}
    for i, j in product(range(lines), range(blocks)):
        if layout == "compact":
            at = [j * lines + i if block[1] == 1 else i * blocks + j]
        elif layout == "swizzled":
            at = [(i // 128 * cdiv(blocks, 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4]
        elif layout == "deepgemm_sm100":
            pitch = round_up(lines if 1 in block else shape[0], 4)
            repeats = [i] if 1 in block else range(i * int(block[0] or 0),
                                                   min((i + 1) * int(block[0] or 0), shape[0]))
            at = [4 * (j // 4 * pitch + line) + j % 4 for line in repeats]
        elif 1 in block:
            at = [j * round_up(lines, 4) + i]
        else:
            at = [i * round_up(blocks, 4) + j]
        found[i, j] = at
    return found


def flat(a: Any) -> np.ndarray:
    """Return scales one by one: f32 bits, or bytes (of words: little-endian)."""
    a = fp8.asnumpy(a)
    return (a.astype("<i4").view(np.uint8) if a.dtype == int32 else bits(a)).reshape(-1)


def filled(layout: str, shape: tuple[int, int], block: Any, dtype: np.dtype[Any],
           values: dict[tuple[int, int], int]) -> np.ndarray:
    """Return scales of these bits or bytes in a layout; the padding holds values that must not be read."""
    out = np.full(scale_shape(shape, block, layout), 0xAAAAAAAA if dtype != float8_e8m0fnu else 0xAA,
                  f"u{dtype.itemsize}")
    cells = out.reshape(-1) if dtype == float32 else out.view(np.uint8).reshape(-1)
    for place, at in addresses(layout, shape, block).items():
        cells[at] = values[place]
    return out.astype("<u4").view(int32) if dtype == int32 else out.view(dtype)


def powers(shape: tuple[int, int], block: Any, seed: int = 0) -> dict[tuple[int, int], int]:
    """Return E8M0 bytes by line and block, none 0, so that padding shows."""
    rng = np.random.default_rng(seed)
    return {place: int(rng.integers(1, 256)) for place in addresses("compact", shape, block)}


def as_held(byte: int, dtype: np.dtype[Any]) -> int:
    return byte if dtype != float32 else 0x7FC00000 if byte == 255 else byte << 23
