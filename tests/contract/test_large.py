"""More than 2**32 elements: both ends of huge arrays and the surroundings of element 2**31, on the CPU
without the memory, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import product_kernels
import pytest
from far_arrays import BLOCKS, END, FAR, Far, check, check_on_device, lazy_memory, mapped, windows
from far_calls import CALLS, ON_DEVICE, WITHOUT_CALL
from programs import launched_variants
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, hostexec, reference, testing
from cupy_fp8.arrays import address, bits
from cupy_fp8.calls import remembered
from cupy_fp8.calls.group_sizes import Groups
from cupy_fp8.calls.tables import Records
from cupy_fp8.cases.matmul.dense import operand
from cupy_fp8.formats import bfloat16, float8_e4m3fn
from cupy_fp8.kernels import grid_size
from cupy_fp8.layouts import cdiv
from cupy_fp8.ops.matmul import tiles
from cupy_fp8.ops.moe import offsets

every_call = pytest.mark.parametrize("far", CALLS.values(), ids=CALLS)
_MOST_BYTES = 20 << 30              # of x on a GPU: results and scales need as much again


#: ops without a far call, and why
_OTHERS = {
    "cast_transpose": "is quantize_tensor", "multi_cast_transpose": "has the kernels of multi_quantize",
    "norm_quantize": "a GPU alone runs enough of its blocks",
    "permute_transpose": "a GPU alone runs enough of its blocks",
    "matmul_nt": "has no x of one array: test_more_than_two_to_the_31_elements of tests/ops/matmul",
    "splits_to_offsets": "adds up all sizes before a window: test_offsets_of_many_groups",
}


def test_every_op_has_a_far_call():
    called = {name.partition("-")[0] for name in CALLS} - {"scales"}
    lacking = cases.OPS.keys() - called - _OTHERS.keys()
    assert not lacking, f"{sorted(lacking)}: add calls to far_calls.py, or reasons to _OTHERS"
    assert called == cases.OPS.keys() - _OTHERS.keys()


@pytest.fixture(autouse=True)
def no_advice(monkeypatch):
    """Large NumPy arrays are intended here, where the advice is to use a GPU."""
    monkeypatch.setattr(backend, "note_large_numpy", lambda x: None)


@needs_host
@pytest.mark.full
@every_call
def test_both_ends_and_the_middle_equal_the_reference(far):
    check(far)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("far", ON_DEVICE.values(), ids=ON_DEVICE)
def test_on_a_gpu(far):
    if far.nbytes > _MOST_BYTES:
        pytest.skip(f"x has {far.nbytes >> 30} GiB")
    try:
        check_on_device(far)
    finally:
        backend.cupy().get_default_memory_pool().free_all_blocks()


def short(far: Far) -> Far:
    """Return arrays with little between their ends."""
    return replace(far, shape=(*far.shape[:far.axis], 2 * far.end + 256, *far.shape[far.axis + 1:]))


@pytest.mark.full
@pytest.mark.parametrize("far", ON_DEVICE.values(), ids=ON_DEVICE)
def test_short_arrays_on_a_device(far, device):
    """The same comparison, with arrays that fit a stand-in."""
    if short(far).nbytes > 1 << 22:
        pytest.skip("rows are long")
    check_on_device(short(far))


@needs_host
@pytest.mark.full
def test_every_kernel_has_a_far_call(launched):
    for far in CALLS.values():
        with lazy_memory(), hostexec.blocks_of_grid(first=BLOCKS, last=BLOCKS), testing.executor("host"):
            far.call(fp8, mapped(short(far).shape, far.dtype))
    entries = {program.entry for program in launched_variants()}
    assert set(launched) & entries == entries - WITHOUT_CALL.keys()


@pytest.mark.gpu
@pytest.mark.full
def test_amax_wherever_the_largest_is():
    """Around 2**31 and at both ends, in an amax that is raised and in one that is written."""
    rows, columns = (1 << 16) + 1, (1 << 15) + 8
    n = rows * columns
    x = fp8.zeros((rows, columns), bfloat16, like="cupy")
    words, largest = bits(x).reshape(-1), cases.values("normal", (1, 1), bfloat16)
    for at in (0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, n - 2, n - 1):
        words[at] = int(bits(largest)[0, 0])
        amax = fp8.zeros(1, np.float32, like=x)
        fp8.quantize_tensor(x, 1.0, columnwise=True, amax=amax)
        for found in (amax, fp8.compute_amax(x)):
            testing.assert_bytes_equal(found, reference.compute_amax(largest))
        words[at] = 0
    assert not fp8.asnumpy(fp8.compute_amax(x)).any()


@needs_host
@pytest.mark.full
def test_offsets_of_many_groups():
    """Only the launches, since the op checks every size of a NumPy array. Most sizes are 0."""
    n, middle = (1 << 32) + END, 1 << 31
    tiles = cdiv(n, offsets._TILE)
    sizes, totals, found = mapped(n, np.int32), mapped(tiles, np.uint64), mapped(n + 1, np.int64)
    sizes[[0, middle - 1, middle, n - 1]] = 3, 4, 5, 6
    given: dict[str, Any] = {"splits": Groups(n, address(sizes)).members(0), "tiles": tiles,
                             "totals": address(totals)}
    output = Records.of(offsets._Output(1, True, found.dtype).packed(address(found)))
    kernel, around = offsets._KERNEL.variant(), [Fraction(middle, n)]
    with testing.executor("host"), hostexec.blocks_of_grid(first=1, last=1, around=around, each=2):
        kernel.bind(sizes, tiles, **given).run()
        kernel.bind(sizes, tiles, **given, outputs=1, outputs_per_block=1, output=output).run()
    assert found[[0, 1, middle - 1, middle, middle + 1, n - 1, n]].tolist() == [0, 3, 3, 7, 12, 12, 18]


def test_the_windows_have_what_32_bits_cannot_count():
    def spans(shape: tuple[int, ...], axis: int, end: int) -> list[tuple[int, int]]:
        return [(window.start, window.stop) for window in windows(shape, axis, end)]

    tall = spans((FAR, 128), 0, END)
    assert [begin * 128 < place <= end * 128 for begin, end in tall[1:3] for place in (1 << 30, 1 << 31)] == [
        True, False, False, True]
    assert tall[0] == (0, END)
    assert tall[3] == (1 << 25, FAR)
    begin, end = spans((128, FAR), 1, END)[2]
    assert 63 * FAR + begin < 1 << 31 < 63 * FAR + end
    assert spans((1280, 128), 0, END) == [(0, END), (1280 - END, 1280)]


@needs_host
@pytest.mark.parametrize(("chosen", "wanted"), [
    ({"first": 0, "last": 1, "whole": ["convert"]}, "##########"),
    ({"first": 0, "last": 1, "whole": ["transpose"]}, ".........#"),
    ({"first": 2, "last": 3}, "##.....###"), ({"first": 8, "last": 8}, "##########"),
    ({"first": 1, "last": 1, "around": [Fraction(1, 2)], "each": 2}, "#...##...#"),
    ({"first": 0, "last": 0, "around": [Fraction(1), Fraction(2, 5), Fraction(3, 10)], "each": 3},
     "..####...#"),
    ({"first": 3, "last": 0, "around": [Fraction(0), Fraction(1, 4)], "each": 4}, "####......"),
    ({"first": 0, "last": 0}, "..........")], ids=str)
def test_chosen_blocks_of_a_grid_run(chosen, wanted):
    """Blocks of 2048 elements: elsewhere the result is unchanged."""
    x, out = np.arange(10 * 2048, dtype=np.float16), np.zeros(10 * 2048, np.uint8).view(float8_e4m3fn)
    with testing.executor("host"), hostexec.blocks_of_grid(**chosen):
        fp8.astype(x, float8_e4m3fn, out=out)
    want = reference.astype(x, float8_e4m3fn).view(np.uint8).reshape(10, 2048)
    want[[block == "." for block in wanted]] = 0
    assert np.array_equal(out.view(np.uint8).reshape(10, 2048), want)


@pytest.mark.parametrize("chosen", [{"first": -1}, {"last": -1}, {"each": -1}])
def test_negative_numbers_of_blocks_are_refused(chosen):
    with (pytest.raises(ValueError, match="expected numbers of blocks, 0 or more"),
          hostexec.blocks_of_grid(**{"first": 0, "last": 2, **chosen})):
        pass


@pytest.mark.parametrize("place", [Fraction(-1, 2), Fraction(3, 2)])
def test_places_outside_of_a_grid_are_refused(place):
    with (pytest.raises(ValueError, match="expected shares of a grid, 0 to 1"),
          hostexec.blocks_of_grid(first=0, last=0, around=[place], each=1)):
        pass


@needs_host
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


@needs_host
@pytest.mark.full
@pytest.mark.parametrize("path", ["wide", "any"])
def test_biases_of_many_experts(path):
    """Biases of the last expert, with more than 2**32 elements before them."""
    half = (1 << 16) + (0 if path == "wide" else 3)
    experts, rows = (1 << 32) // (2 * half) + 2, 2
    bias: Any = mapped((experts, 2 * half), bfloat16)
    bits(bias)[-1] = bits(cases.values("normal", (2 * half,), np.dtype(bfloat16), 1))
    x = cases.values("normal", (rows, 2 * half), np.dtype(bfloat16), 2)
    splits = np.array([0] * (experts - 1) + [rows])
    recipe = fp8.MXScaling()
    with testing.executor("host"):
        got = fp8.swiglu_quantize(x, recipe, bias=bias, splits=splits)
    want = reference.swiglu_quantize(x, recipe, bias=bias[-1:].copy(), splits=splits[-1:])
    testing.assert_bytes_equal(got, want)


@needs_host
@pytest.mark.parametrize("kernel", product_kernels.KERNELS)
def test_a_group_far_from_the_first(kernel, monkeypatch):
    """D of the second group is more than 2**32 elements behind that of the first. (Groups with so large a D
    have too many tiles for the CPU.)"""
    m, n, far = 16, 9, (1 << 32) + 16
    splits = np.array([16, 32])
    a, b = (operand((rows, 48), np.dtype(float8_e4m3fn), "row", "gemm_ready", np.dtype(np.float32), "normal",
                    rows) for rows in (m, n))
    out = mapped(far + m * n, np.float32)
    own = tiles.own_kernel_launches
    monkeypatch.setattr(tiles, "own_kernel_launches",
                        lambda call, p: own(call, p._replace(out=address(out), out_group=far)))
    with testing.executor("host") as run:
        product_kernels.use(kernel, run, monkeypatch)
        remembered.forget()
        fp8.grouped_matmul_nt(a, b, splits, group="k", dtype=np.float32)
    want = reference.grouped_matmul_nt(a, b, splits, group="k", dtype=np.float32)
    for group, start in enumerate((0, far)):
        np.testing.assert_allclose(out[start:start + m * n].reshape(m, n), want[group], rtol=1e-5, atol=1e-4)
