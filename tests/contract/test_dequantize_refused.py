"""Dequantising blocks: what is refused, before anything is written, and what a result remembers of having been found valid."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest
from block_data import COLUMN, MX, ROW, result
from launches import values_of

import cupy_fp8 as fp8
from cupy_fp8 import Quantized, Scaled, cases, testing
from cupy_fp8.calls import validate
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e8m0fnu
from cupy_fp8.kernels import Variant, tiles
from cupy_fp8.ops.convert import dequantize as module

mx_parameter = pytest.mark.parametrize(("block", "layout", "transposed"), MX)


# ---- what is refused ----
GOOD: dict[str, Any] = {"data": np.zeros((64, 96), float8_e4m3fn), "scale_inv": np.zeros((64, 3), float8_e8m0fnu),
                        "shape": (64, 96), "block": ROW, "scale_layout": "compact"}


@pytest.fixture
def launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(self: Variant, *_: Any) -> None:
        raise AssertionError(f"{self.kernel.entry} was launched")

    monkeypatch.setattr(Variant, "launch", launch)


@pytest.mark.usefixtures("launches_nothing")
@pytest.mark.parametrize(("change", "error", "message"), [
    ({"scale_inv": np.zeros((64, 4), float8_e8m0fnu)}, ValueError,
     r"q.scale_inv: expected shape (64, 3) (compact scales of blocks (1, 32) of shape (64, 96)), got (64, 4)"),
    ({"scale_inv": np.zeros((3, 64), float8_e8m0fnu)}, ValueError, r"q.scale_inv: expected shape (64, 3) "),
    ({"scale_inv": np.zeros(192, float8_e8m0fnu)}, ValueError, r"q.scale_inv: expected shape (64, 3) "),
    ({"scale_layout": "swizzled"}, ValueError, r"q.scale_inv: expected shape (128, 4) (swizzled scales of blocks (1, 32) of shape"),
    ({"block": COLUMN}, ValueError, r"q.scale_inv: expected shape (2, 96) "),
    ({"block": COLUMN, "scale_layout": "swizzled"}, ValueError, r"q.scale_inv: expected shape (128, 4) "),
    ({"scale_inv": np.zeros((64, 3), np.uint8)}, TypeError,
     "q.scale_inv: expected dtype float8_e8m0fnu, float32 of compact scales, got uint8"),
    ({"scale_inv": np.zeros((64, 3), bfloat16)}, TypeError, "q.scale_inv: expected dtype float8_e8m0fnu, float32 of compact scales"),
    ({"scale_inv": np.zeros((128, 4), np.float32), "scale_layout": "swizzled"}, TypeError,
     "q.scale_inv: expected dtype float8_e8m0fnu of swizzled scales, got float32"),
    ({"scale_inv": [1.0]}, TypeError, "q.scale_inv: expected a numpy.ndarray or cupy.ndarray, got list"),
    ({"scale_inv": None}, TypeError, "q.scale_inv: expected a numpy.ndarray or cupy.ndarray, got NoneType"),
    ({"scale_layout": None}, ValueError,
     "q.scale_layout: expected one of ('compact', 'swizzled', 'gemm_ready', 'deepgemm_sm90', 'deepgemm_sm100'), got None"),
    ({"scale_layout": "gemm"}, ValueError,
     "q.scale_layout: expected one of ('compact', 'swizzled', 'gemm_ready', 'deepgemm_sm90', 'deepgemm_sm100'), got 'gemm'"),
    ({"block": (1, 48)}, ValueError, "q.block: expected (1, B), (B, 1) or (B, B'), a power of two of 32 or more each"),
    ({"block": (1, 16)}, ValueError, "q.block: expected (1, B)"),
    ({"block": (1, 1)}, ValueError, "q.block: expected (1, B)"),
    ({"block": (None, None)}, ValueError, "q.block: expected (1, B)"),
    ({"block": (None, 32)}, ValueError, "q.block: expected (1, B)"),
    ({"block": (1, -32)}, ValueError, "q.block: expected (1, B)"),
    ({"block": (1, 32.0)}, ValueError, "q.block: expected (1, B)"),
    ({"block": (1, 32, 1)}, ValueError, "q.block: expected (1, B)"),
    ({"block": 32}, ValueError, "q.block: expected (1, B)"),
    ({"block": (128, 128), "scale_layout": "swizzled"}, ValueError, "q.scale_layout: 'swizzled' belongs to blocks along one line"),
    ({"data": np.zeros(96, float8_e4m3fn), "shape": (96,)}, ValueError, "q.block: (1, 32) needs two or more dimensions, got shape (96,)"),
    ({"data": np.zeros((96, 64), float8_e4m3fn)}, ValueError, "q.data: expected shape (64, 96) for the logical shape (64, 96), got"),
    ({"data": np.zeros((64, 96), np.float32)}, TypeError, "q.data: expected dtype float8_e4m3fn, float8_e5m2, got float32"),
], ids=lambda v: None)  # fmt: skip
@pytest.mark.parametrize("executor", ["reference", "host"])
def test_a_malformed_result(executor, change, error, message):
    out = np.empty((64, 96), np.float32)
    cases.poison(out)
    before = out.tobytes()
    with testing.executor(executor):
        for q in (Scaled._of(**{**GOOD, **change}), Quantized(None, Scaled._of(**{**GOOD, **change}))):
            with pytest.raises(error, match="^" + re.escape(message)):
                fp8.dequantize(q, out=out)
            with pytest.raises(error, match="^" + re.escape(message)):
                fp8.dequantize(q)
    assert out.tobytes() == before


@pytest.mark.usefixtures("launches_nothing")
@pytest.mark.parametrize("executor", ["reference", "host"])
def test_out_that_does_not_fit(executor):
    memory = np.full(64 * 96 * 4 + 256, 0xAA, np.uint8)
    start = -memory.ctypes.data % 16
    inside = memory[start + 64 * 96 * 4 - 100:][:192].view(float8_e8m0fnu).reshape(64, 3)
    aside = np.zeros((3, 128), float8_e8m0fnu)[:, ::2].T
    with testing.executor(executor):
        s = Scaled(**{**GOOD, "scale_inv": inside})
        with pytest.raises(ValueError, match=r"^out: overlaps q.scale_inv in memory"):
            fp8.dequantize(s, out=memory[start:start + 64 * 96 * 4].view(np.float32).reshape(64, 96))
        s = Scaled(**{**GOOD, "scale_inv": aside})
        for out, error, message in (
            (np.empty((96, 64), np.float32), ValueError, r"^out: expected shape \(64, 96\), got \(96, 64\)"),
            (np.empty((64, 96), np.float64), TypeError, "^out: expected dtype float32, got float64"),
            (np.empty((64, 192), np.float32)[:, ::2], ValueError, "^out: expected a C-contiguous array"),
            ([1], TypeError, "^out: expected a numpy.ndarray"),
        ):
            with pytest.raises(error, match=message):
                fp8.dequantize(s, out=out)
    assert set(memory.tolist()) == {0xAA}


def test_overlap_with_a_strided_view_of_the_scales():
    """What lies between the first and the last scale of a view, not as many bytes as it has scales."""
    memory = np.zeros(1 << 16, np.uint8)
    scale_inv = memory[:64 * 400].view(float8_e8m0fnu).reshape(64, 400)[:, :3]
    s = Scaled(**{**GOOD, "scale_inv": scale_inv})
    start = (-memory.ctypes.data % 4) + 63 * 400 - 100
    assert memory.ctypes.data + start > scale_inv.ctypes.data + scale_inv.nbytes
    with testing.executor("host"), pytest.raises(ValueError, match=r"^out: overlaps q.scale_inv in memory"):
        fp8.dequantize(s, out=memory[start:start + 64 * 96 * 4].view(np.float32).reshape(64, 96))


# ---- what a result remembers, over made-up addresses ----
class Fake:
    """CuPy arrays over addresses that nobody owns: enough for everything before a launch."""

    def __init__(self) -> None:
        self.cupy, self.next = pytest.importorskip("cupy"), 1 << 30

    def __call__(self, like: np.ndarray) -> Any:
        self.next += 1 << 20
        memory = self.cupy.cuda.memory.UnownedMemory(self.next, like.nbytes, None, device_id=0)
        return self.cupy.ndarray(like.shape, like.dtype, self.cupy.cuda.MemoryPointer(memory, 0), like.strides)

    def result(self, s: Scaled) -> Scaled:
        return Scaled(self(s.data), self(s.scale_inv), s.shape, s.transposed, s.block, s.scale_layout)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Launches that happen in name only: (variant, grid, members of the struct)."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Variant, "launch", lambda self, x, grid, *values, **_: seen.append((self, grid, *values_of(self, x, values))))
    monkeypatch.setattr(tiles, "choose", lambda x, large: large)
    return seen


@mx_parameter
def test_a_result_is_validated_once(block, layout, transposed, launched, monkeypatch):
    fake, host = Fake(), result((160, 288), block, layout, transposed)
    s, outs = fake.result(host), [fake(np.empty(host.shape, bfloat16)) for _ in range(2)]
    fp8.dequantize(s, dtype=bfloat16, out=outs[0])
    with monkeypatch.context() as patch:
        patch.setattr(module, "check_block_scales", None)                       # not asked again
        patch.setattr(validate, "source", None)
        fp8.dequantize(s, dtype=bfloat16, out=outs[0])
    fp8.dequantize(s, dtype=bfloat16, out=outs[1])
    first, again, other = launched
    assert again == first
    assert [value for value in other if value not in first] == [outs[1].data.ptr]
    assert (first[2], first[3], first[4]) == (s.data.data.ptr, outs[0].data.ptr, s.scale_inv.data.ptr)
    with pytest.raises(ValueError, match=r"^out: expected shape"):
        fp8.dequantize(s, dtype=bfloat16, out=fake(np.empty((288, 160), bfloat16)))
    inside = fake.cupy.ndarray(host.shape, bfloat16, fake.cupy.cuda.MemoryPointer(s.scale_inv.data.mem, 16))
    with pytest.raises(ValueError, match=r"^out: overlaps q.scale_inv"):
        fp8.dequantize(s, dtype=bfloat16, out=inside)


def test_what_is_remembered_stays_with_the_object(launched):
    fake = Fake()
    s = fake.result(result((64, 96), ROW))
    fp8.dequantize(s, out=fake(np.empty(s.shape, np.float32)))
    assert "_blocks" in s.__dict__
    assert "_blocks" not in s.T.__dict__
    assert "_blocks" not in copy.copy(s).__dict__
    host = result((64, 96), ROW)
    host.__dict__["_blocks"] = "of this object's memory"
    for again in (copy.copy(host), copy.deepcopy(host), pickle.loads(pickle.dumps(host))):
        assert "_blocks" not in again.__dict__
        assert (again.block, again.scale_layout, again.shape) == (ROW, "compact", (64, 96))
        assert fp8.bytes_equal(again.scale_inv, host.scale_inv)


def test_a_numpy_result_remembers_nothing():
    s = result((64, 96), ROW)
    with testing.executor("host"):
        s.dequantize()
    assert "_blocks" not in s.__dict__
