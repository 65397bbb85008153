"""save and load preserve results with a scale per block."""

from __future__ import annotations

import pytest
from block_data import COLUMN, ROW, result
from hypothesis import HealthCheck, given, settings

import cupy_fp8 as fp8
from cupy_fp8 import Quantized, io, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import float32


@pytest.mark.parametrize("block", [ROW, COLUMN], ids=str)
@pytest.mark.parametrize("layout", ["compact", "swizzled"])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_layout(tmp_path, block, layout, transposed):
    saved = {f"d{len(shape)}_{i}": result(shape, block, layout, transposed)
             for i, shape in enumerate([(64, 96), (33, 70), (2, 40, 96), (0, 64), (3, 0, 40)])}
    saved |= {f"{name}_t": s.T for name, s in saved.items()}                # these scales are not contiguous
    io.save(tmp_path / "a.npz", **saved)
    loaded = io.load(tmp_path / "a.npz")
    assert list(loaded) == list(saved)
    testing.assert_bytes_equal(list(loaded.values()), list(saved.values()))


def test_both_directions_and_f32_scales(tmp_path):
    row, column = result((64, 96), ROW), result((64, 96), COLUMN, "swizzled", True)
    square = result((140, 270), (128, 128), transposed=True, scale=float32)
    saved = {"q": Quantized(row, column), "one": row, "square": square,
             "line": result((9, 50), (1, None), scale=float32)}
    io.save(tmp_path / "a.npz", **saved)
    loaded = io.load(tmp_path / "a.npz")
    testing.assert_bytes_equal(list(loaded.values()), list(saved.values()))
    assert loaded["one"].data is loaded["q"].rowwise.data                   # stored once


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(testing.mx_results(max_side=70))
def test_any_result(tmp_path, s):
    io.save(tmp_path / "a.npz", s=s, t=s.T)
    loaded = io.load(tmp_path / "a.npz")
    testing.assert_bytes_equal([loaded["s"], loaded["t"]], [s, s.T])


def test_what_an_op_remembers_is_not_saved(tmp_path):
    s = result((64, 96), ROW)
    s.__dict__["_blocks"] = object()
    io.save(tmp_path / "a.npz", s=s)
    assert "_blocks" not in io.load(tmp_path / "a.npz")["s"].__dict__


@pytest.mark.gpu
def test_to_the_gpu_and_back(tmp_path):
    want = {"s": result((64, 96), COLUMN, "swizzled", True), "t": result((33, 70), ROW).T}
    with testing.executor("cuda") as run:
        io.save(tmp_path / "a.npz", **{name: run.array(s) for name, s in want.items()})
    for like in ("numpy", "cupy"):
        loaded = io.load(tmp_path / "a.npz", like=like)
        for name, s in want.items():
            for mine, theirs in zip(loaded[name], s, strict=True):
                assert fp8.asnumpy(bits(mine)).tobytes() == bits(theirs).tobytes()
            testing.assert_bytes_equal(loaded[name].dequantize(), s.dequantize())
