"""The sticky word, in which kernels note facts that only the device knows and that are wrong, and sizes of
swizzled scales."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from scale_arrays import by_formula, guarded, scales, stored_by_blocks

import cupy_fp8 as fp8
from cupy_fp8 import backend, kernels, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.kernels import errors, sources
from cupy_fp8.ops.scales import swizzle

#: What sizes of groups can be.
WRONG_SIZES = (errors.MESSAGES[errors.Fact.SPLIT_NEGATIVE], errors.MESSAGES[errors.Fact.SPLIT_SUM])


# ---- sizes on the device that are wrong ----
@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch, run: testing.Executor) -> testing.Executor:
    """NumPy arrays are looked at as little as those on a device."""
    monkeypatch.setattr(swizzle, "_check_sizes", lambda *_: None)
    return run


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("splits", "found"), [
    ([299, 50, 50, 1], WRONG_SIZES[1:]), ([300] + [0] * 500 + [-5], WRONG_SIZES[:1]),
    ([2**63 - 1, 2**62, 2**62 + 5, -(2**63), 1 << 40], WRONG_SIZES)], ids=lambda value: str(value)[:20])
def test_wrong_sizes_of_column_views(splits, found, axis, unchecked):
    """Which tests/contract/test_device_facts.py does not have."""
    run, s = unchecked, scales(300, 7) if axis == 0 else scales(140, 300)
    host = np.array([max(size, 32 * size - 7) if axis and size < 2**31 else size for size in splits])
    want = reference.swizzle_scales(s, splits=host, axis=axis)
    there = run.array(host)
    out, intact = guarded(run, want.shape)
    fp8.swizzle_scales(stored_by_blocks(s, run), splits=there, axis=axis, out=out)
    testing.assert_bytes_equal(out, want)
    assert intact()
    back, intact = guarded(run, s.shape[::-1])
    fp8.unswizzle_scales(out, shape=s.shape, splits=there, axis=axis, out=back.T)
    again = reference.unswizzle_scales(want, shape=s.shape, splits=host, axis=axis)
    testing.assert_bytes_equal(back.T, again)
    assert intact()
    assert fp8.device_errors(clear=True) == (found if run.name != "reference" else ())


@pytest.mark.parametrize("axis", [0, 1])
def test_what_no_group_covers_may_need_a_tile_of_its_own(axis, unchecked):
    """Eight groups that fill a block of threads with a tile each, and one scale more: past the tiles of the
    swizzled array."""
    run, sized = unchecked, [32] * 8 if axis == 1 else [1] * 8
    s = scales(9, 4) if axis == 0 else scales(4, 9)
    splits = np.array(sized)
    w = reference.swizzle_scales(s, splits=splits, axis=axis)
    want = reference.unswizzle_scales(w, shape=s.shape, splits=splits, axis=axis)
    assert np.count_nonzero(bits(want) == 0) == 4
    back, intact = guarded(run, s.shape)
    fp8.unswizzle_scales(run.array(w), shape=s.shape, splits=run.array(splits), axis=axis, out=back)
    testing.assert_bytes_equal(back, want)
    assert intact()


def test_what_no_group_covers():
    """By hand: left out of the swizzled scales, 0 in the compact ones; a group past the end is cut."""
    s = scales(10, 4)
    short = reference.swizzle_scales(s, splits=[3, 4])
    np.testing.assert_array_equal(bits(short[:128]).reshape(-1), by_formula(s[:3]))
    np.testing.assert_array_equal(bits(short[128:256]).reshape(-1), by_formula(s[3:7]))
    back = reference.unswizzle_scales(short, shape=(10, 4), splits=[3, 4])
    testing.assert_bytes_equal(back[:7], s[:7])
    assert not bits(back[7:]).any()
    testing.assert_bytes_equal(reference.swizzle_scales(s, splits=[3, 40]),
                               reference.swizzle_scales(s, splits=[3, 7]))
    testing.assert_bytes_equal(reference.swizzle_scales(s, splits=[-2, 10]),
                               reference.swizzle_scales(s, splits=[0, 10]))


@pytest.mark.parametrize("axis", [0, 1])
def test_empty_scales_with_sizes(axis, unchecked):
    run = unchecked
    s = run.array(scales(0, 4) if axis == 0 else scales(4, 0))
    for splits, found in (([0, 0], 0), ([0, 3], 1)):
        w = fp8.swizzle_scales(s, splits=run.array(np.array(splits)), axis=axis)
        assert w.size == 0
        assert (fp8.unswizzle_scales(w, shape=s.shape, splits=run.array(np.array(splits)),
                                     axis=axis).shape == s.shape)
        assert len(fp8.device_errors(clear=True)) == (found if run.name != "reference" else 0)


# ---- the word ----
def wrong_once(run: testing.Executor, splits: list[int]) -> None:
    """A launch that notes an error, whatever the kind of array."""
    total = 9
    fp8.swizzle_scales(run.array(scales(total, 4)), splits=run.array(np.array(splits)))


def test_the_word_is_sticky(unchecked):
    run = unchecked
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


def test_the_words_of_the_cpu_and_of_nobody(unchecked):
    """NumPy arrays note errors only where kernels run on the CPU, and only there they are seen."""
    if unchecked.name != "host":
        pytest.skip("of the CPU's word")
    wrong_once(unchecked, [4, 6])
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
