"""The sticky error word, in which kernels note wrong facts that only the device knows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from scale_arrays import scales

import cupy_fp8 as fp8
from cupy_fp8 import backend, kernels, testing
from cupy_fp8.kernels import errors, sources
from cupy_fp8.ops.scales import swizzle

#: the ways in which sizes of groups can be wrong
WRONG_SIZES = (errors.MESSAGES[errors.Fact.SPLIT_NEGATIVE], errors.MESSAGES[errors.Fact.SPLIT_SUM])


def wrong_once(run: testing.Executor, splits: list[int]) -> None:
    """Make a launch that notes an error, with any kind of array: values of NumPy arrays are not checked here
    either."""
    with mock.patch.object(swizzle, "_check_sizes"):
        fp8.swizzle_scales(run.array(scales(9, 4)), splits=run.array(np.array(splits)))


def test_the_word_is_sticky(run):
    if run.name == "reference":
        pytest.skip("launches nothing")
    assert fp8.device_errors() == ()
    wrong_once(run, [4, 6])
    wrong_once(run, [4, 5])
    (found,) = fp8.device_errors()
    assert found == errors.MESSAGES[errors.Fact.SPLIT_SUM]
    assert fp8.device_errors() == (found,)
    wrong_once(run, [-1, 9])
    assert fp8.device_errors() == WRONG_SIZES
    assert fp8.device_errors(clear=True) == WRONG_SIZES
    assert fp8.device_errors(clear=True) == ()
    assert fp8.device_errors() == ()


def test_the_words_of_the_cpu_and_of_nobody(run):
    """NumPy arrays note errors only if kernels run on the CPU, and these are seen only there."""
    if run.name != "host":
        pytest.skip("of the CPU's word")
    wrong_once(run, [4, 6])
    assert len(fp8.device_errors()) == 1
    with kernels.forced_executor("reference"):
        assert fp8.device_errors() == ()
    assert len(fp8.device_errors(clear=True)) == 1


def test_bits_are_the_kernels():
    declared = re.search(r"constexpr u32 (k.*?);",
                         (sources.root() / "include" / "memory" / "errors.cuh").read_text(), re.DOTALL)
    assert declared
    kernels = {name: int(bit) for name, bit in re.findall(r"k(\w+) = 1u << (\d+)", declared[1])}
    assert {fact.name.replace("_", ""): fact.value for fact in errors.Fact if fact.name} == {
        name.upper(): 1 << bit for name, bit in kernels.items()}
    assert list(errors.MESSAGES) == list(errors.Fact)


def test_numpy_sizes_are_never_noted(run):
    before = fp8.device_errors()
    with pytest.raises(ValueError, match=r"^splits: expected sizes that add up"):
        fp8.swizzle_scales(scales(9, 4), splits=np.array([4, 6]))
    assert fp8.device_errors() == before


# ---- on a GPU ----
@pytest.fixture
def on_gpu() -> Iterator[testing.Executor]:
    with testing.executor("cuda") as run:
        yield run


@pytest.mark.gpu
def test_errors_of_every_stream_are_seen(on_gpu):
    cp = backend.cupy()
    s, splits = on_gpu.array(scales(9, 4)), cp.asarray([4, 6])
    cp.cuda.get_current_stream().synchronize()
    with cp.cuda.Stream(non_blocking=True):
        fp8.swizzle_scales(s, splits=splits)
    assert len(fp8.device_errors(clear=True)) == 1


@pytest.mark.gpu
def test_errors_of_a_replayed_graph_are_seen(on_gpu):
    cp = backend.cupy()
    s, splits = on_gpu.array(scales(9, 4)), cp.asarray([4, 5])
    out = fp8.swizzle_scales(s, splits=splits)
    cp.cuda.get_current_stream().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        fp8.swizzle_scales(s, splits=splits, out=out)
        with pytest.raises(ValueError, match=r"^device_errors: waits for the device"):
            fp8.device_errors()
        graph = stream.end_capture()
        graph.launch(stream)
        assert fp8.device_errors() == ()
        splits[...] = cp.asarray([10, -5])
        graph.launch(stream)
        assert fp8.device_errors(clear=True) == WRONG_SIZES
        splits[...] = cp.asarray([4, 5])
        graph.launch(stream)
        assert fp8.device_errors() == ()


@pytest.mark.gpu
def test_the_word_is_not_made_during_a_capture(on_gpu, monkeypatch):
    cp = backend.cupy()
    s, splits = on_gpu.array(scales(9, 4)), cp.asarray([4, 5])
    out = fp8.swizzle_scales(s, splits=splits)
    cp.cuda.get_current_stream().synchronize()
    monkeypatch.setattr(errors, "_words", {})
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(ValueError, match="call once before the capture"):
                fp8.swizzle_scales(s, splits=splits, out=out)
        finally:
            stream.end_capture()


@pytest.mark.gpu
def test_every_device_has_its_own_word(on_gpu):
    cp = backend.cupy()
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cp.cuda.Device(1):
        fp8.device_errors(clear=True)
        s, splits = on_gpu.array(scales(9, 4)), cp.asarray([4, 6])
        cp.cuda.Device(1).synchronize()
    fp8.swizzle_scales(s, splits=splits)  # runs where its array is, whatever device is current
    assert fp8.device_errors() == ()
    with cp.cuda.Device(1):
        assert len(fp8.device_errors(clear=True)) == 1
