"""Groups of "k" whose rows do not begin at multiples of 16 bytes: they are copied, if the host cannot rule
them out and the product is large enough (ops/matmul/align_rows.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from places import Place
from product_kernels import HOPPER, PORTABLE, use
from product_operands import integers

import cupy_fp8 as fp8
from cupy_fp8 import Grouped, Scaled, reference, testing
from cupy_fp8.calls import remembered
from cupy_fp8.calls.call import Call
from cupy_fp8.formats import float8_e4m3fn, float32
from cupy_fp8.kernels import errors
from cupy_fp8.ops.matmul import align_rows

COPIES = "align_groups"
M, N = 96, 64                                           # enough for copies to be worth their time
#: The second group begins at a multiple of 16 in rows with a pitch, and has no such pitch of its own.
ODD, EVEN, WHOLE = [32, 37, 0, 16, 75], [32, 48, 0, 16, 64], [128, 0, 128, 40]


@pytest.fixture(autouse=True)
def _on_hopper(device: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    use(HOPPER, device.run, monkeypatch)


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Record the words of scratch memory that calls request."""
    asked: dict[str, int] = {}
    given = Call.scratch

    def noted(call: Call, use: str, words: int) -> Any:
        asked[use] = words
        return given(call, use, words)

    monkeypatch.setattr(Call, "scratch", noted)
    return asked


def matrices(total: int, m: int = M, n: int = N) -> tuple[Scaled, Scaled]:
    return integers((m, total), float8_e4m3fn, 1), integers((n, total), float8_e4m3fn, 2)


def flat(s: Scaled, sizes: Any) -> Grouped:
    """Return a matrix [rows, all columns] as column-wise data of groups."""
    sizes = np.array(sizes)
    data = np.concatenate([part.reshape(-1) for part in np.split(s.data, np.cumsum(sizes), axis=1)])
    offsets = np.concatenate([[0], np.cumsum(sizes)]) * s.shape[0]
    shape = s.shape[1], s.shape[0]
    return Grouped(sizes, offsets, shape, None, data, np.repeat(s.scale_inv, len(sizes)))


def there(s: Any, device: Place, at: int = 0) -> Any:
    """Return an operand on the device, with data that begin this many bytes after a multiple of 16."""
    made, name = device.run.array(s), "columnwise" if isinstance(s, Grouped) else "data"
    data = getattr(s, name)
    memory = device.array(np.full(data.size + 16, 0x7F, np.uint8))      # NaN before and after
    view = memory[at : at + data.size].view(s.dtype).reshape(data.shape)
    view[...] = device.array(data)
    if isinstance(s, Grouped):
        return Grouped(made.splits, made.offsets, s.shape, None, view, made.scale_inv)
    return Scaled(view, made.scale_inv, s.shape)


def expect(got: Any, a: Scaled, b: Scaled, sizes: Any) -> None:
    want = reference.grouped_matmul_nt(a, b, np.array(sizes), group="k", dtype=float32)
    testing.assert_bytes_equal(fp8.asnumpy(got) + np.float32(0), want + np.float32(0))


def product(*operands_and_sizes: Any, **options: Any) -> Any:
    return fp8.grouped_matmul_nt(*operands_and_sizes, group="k", dtype=float32, **options)


# ---- which launches ----
@pytest.mark.parametrize("known", [False, True], ids=["on the device", "known"])
@pytest.mark.parametrize("made", ["flat", "rows"])
@pytest.mark.parametrize("sizes", [ODD, EVEN], ids=["odd", "even"])
def test_one_launch_copies_and_one_multiplies(sizes, made, known, device, launched):
    """With a list of sizes, which the host knows, no launch finds nothing to copy."""
    a, b = matrices(sum(sizes))
    given = [there(flat(s, sizes) if made == "flat" else s, device) for s in (a, b)]
    got = product(*given, sizes if known else device.array(np.array(sizes)))
    assert launched == [HOPPER] if known and sizes is EVEN else [COPIES, HOPPER]
    expect(got, a, b, sizes)


@pytest.mark.parametrize(("total", "at", "copied"), [
    (176, (0, 0), {}), (176, (1, 0), {"a"}), (176, (0, 8), {"b"}), (177, (0, 0), {"a", "b"})])
def test_only_what_needs_it_is_copied(total, at, copied, device, launched, scratch):
    """Rows with a pitch, whose sizes are known. Memory is that of rows, plus 15 bytes for each group."""
    a, b = matrices(total)
    got = product(*(there(s, device, by) for s, by in zip((a, b), at, strict=True)), EVEN)
    rows = {"a": M, "b": N}
    assert scratch == {f"rows of {name}": rows[name] * -(-(total + 15 * 5) // 16) * 4 for name in copied}
    assert launched == ([COPIES] if copied else []) + [HOPPER]
    expect(got, a, b, EVEN)


def in_blocks(s: Scaled, device: Place) -> Scaled:
    """Return the same values with scales of blocks 1×128 of all columns."""
    scales = np.full((s.shape[0], -(-s.shape[1] // 128)), s.scale_inv[0])
    return Scaled(device.array(s.data), device.array(scales), s.shape, False, (1, 128), "compact")


@pytest.mark.parametrize("total", [304, 305])
def test_groups_at_whole_blocks_are_aligned_where_rows_are(total, device, launched):
    a, b = matrices(total)
    got = product(in_blocks(a, device), in_blocks(b, device), device.array(np.array(WHOLE)))
    assert launched == ([COPIES] if total % 16 else []) + [HOPPER]
    expect(got, a, b, WHOLE)


def test_a_last_group_at_whole_blocks(device, launched):
    """It begins at a multiple of 128, but flat data have its size as their pitch."""
    sizes = [128, 0, 128, 37]                           # 11 columns belong to no group
    a, b = matrices(304)
    got = product(in_blocks(a, device), there(flat(b, sizes), device), None)
    assert launched == [COPIES, HOPPER]
    expect(got, a, b, sizes)


def test_few_multiplications_are_not_worth_copies(device, launched, scratch):
    a, b = matrices(sum(ODD), 24, 24)
    for sizes, entries in ((ODD, [HOPPER, PORTABLE]), (EVEN, [HOPPER])):
        launched.clear()
        total = sum(sizes)
        got = product(*(there(s, device) for s in matrices(total, 24, 24)), sizes)
        assert launched == entries
        expect(got, *matrices(total, 24, 24), sizes)
    assert not scratch
    long = [700, 1000]                                  # few tiles would wait for their loads
    a, b = matrices(sum(long), 24, 24)
    launched.clear()
    expect(product(there(a, device), there(b, device), device.array(np.array(long))), a, b, long)
    assert launched == [COPIES, HOPPER]


# ---- what is copied ----
@pytest.mark.parametrize("blocks", [1, 3])
def test_few_blocks_copy_all(blocks, device, monkeypatch):
    """For more groups than a warp has lanes. Each has a pitch of its own, and no unit ends where a row
    does."""
    monkeypatch.setattr(align_rows, "_BLOCKS_OF_PROCESSOR", 1)
    monkeypatch.setattr(align_rows, "multiprocessors", lambda _: blocks)
    sizes = [*range(1, 40), 0, 0, 64, 1]
    for make in (lambda s: s, lambda s: flat(s, sizes)):
        a, b = matrices(sum(sizes), 65, 67)
        splits = device.array(np.array(sizes))
        expect(product(there(make(a), device, 1), there(make(b), device, 3), splits), a, b, sizes)


@pytest.mark.parametrize("sizes", [[2000], [0, 0], [1, 0, 2049], [15, 16, 17]], ids=str)
@pytest.mark.parametrize("at", [0, 1, 15])
def test_ends_of_memory(sizes, at, device):
    """Codes before the first byte and after the last one are NaN."""
    a, b = matrices(sum(sizes))
    for make in (lambda s: s, lambda s: flat(s, sizes)):
        given = [there(make(s), device, at) for s in (a, b)]
        expect(product(*given, device.array(np.array(sizes))), a, b, sizes)


# ---- sizes that are wrong ----
@pytest.mark.parametrize(("sizes", "taken", "fact"), [
    ([32, -5, 37, 0, 43], [32, 0, 37, 0, 43], errors.Fact.SPLIT_NEGATIVE),
    ([32, 37, 70, 50, 1 << 40], [32, 37, 70, 37, 0], errors.Fact.SPLIT_SUM)])
def test_wrong_sizes(sizes, taken, fact, device, launched):
    a, b = matrices(176)
    got = product(there(a, device), there(b, device, 1), device.array(np.array(sizes)))
    assert launched == [COPIES, HOPPER]
    assert fp8.device_errors(clear=True) == (errors.MESSAGES[fact],)
    expect(got, a, b, taken)


def test_a_group_that_begins_within_a_block_of_scales(device, launched):
    total, sizes = 305, [128, 77, 100]
    a, b = (in_blocks(s, device) for s in matrices(total))
    got = fp8.asnumpy(product(a, b, device.array(np.array(sizes))))
    assert launched == [COPIES, HOPPER]
    assert fp8.device_errors(clear=True) == (errors.MESSAGES[errors.Fact.SPLIT_START],)
    assert not got[2].any()
    want = reference.grouped_matmul_nt(*matrices(total), np.array([128, 77, 0]), group="k", dtype=float32)
    np.testing.assert_array_equal(got, want)


# ---- sizes that are promised ----
@pytest.mark.parametrize("align", [16, 32, 128])
@pytest.mark.parametrize("made", ["flat", "rows"])
def test_promised_groups_are_not_copied(made, align, device, launched, scratch):
    sizes = [align, 0, 2 * align, align]
    a, b = matrices(sum(sizes))
    given = [there(flat(s, sizes) if made == "flat" else s, device) for s in (a, b)]
    expect(product(*given, device.array(np.array(sizes)), align=align), a, b, sizes)
    assert (launched, scratch) == ([HOPPER], {})


@pytest.mark.parametrize("made", ["flat", "rows"])
def test_a_broken_promise(made, device, launched):
    """The size, then the beginning, is not a multiple; nothing is read from misaligned addresses."""
    sizes = [32, 37, 11, 64]
    a, b = matrices(sum(sizes))
    given = [there(flat(s, sizes) if made == "flat" else s, device) for s in (a, b)]
    got = product(*given, device.array(np.array(sizes)), align=16)
    assert launched == [HOPPER]
    assert fp8.device_errors(clear=True) == (errors.MESSAGES[errors.Fact.SPLIT_START],)
    want = reference.grouped_matmul_nt(a, b, np.array(sizes), group="k", dtype=float32)
    want[1:3] = 0
    np.testing.assert_array_equal(fp8.asnumpy(got), want)
    with pytest.raises(ValueError, match=r"^splits: expected multiples of align=16, got 37 for group 1$"):
        product(*given, sizes, align=16)
    with pytest.raises(ValueError, match=r"^align: expected a power of two from 1 to 65536, got 24$"):
        product(*given, sizes, align=24)
    with pytest.raises(ValueError, match=r"^align: expected 1 with group='m', whose rows begin anywhere"):
        fp8.grouped_matmul_nt(given[0], given[1], sizes, align=16)


# ---- again ----
@pytest.fixture
def operands(device: Place) -> Any:
    remembered.forget()
    return tuple(there(flat(s, ODD), device) for s in matrices(sum(ODD)))


def test_other_sizes_in_the_same_memory(device, launched):
    """The launches of a remembered call, which find other groups to copy."""
    a, b = matrices(sum(ODD))
    given, splits = (there(a, device), there(b, device)), device.array(np.array(ODD))
    made = [product(*given, splits)]
    known = len(remembered._calls)
    for sizes in (EVEN, [1, 2, 3, 4, 5], ODD):
        splits[...] = device.array(np.array(sizes))
        made.append(product(*given, splits))
        expect(made[-1], a, b, sizes)
    expect(made[0], a, b, ODD)
    assert len(remembered._calls) == known
    assert launched == [COPIES, HOPPER] * 4


def test_operands_elsewhere(device):
    """A call like a remembered one, with operands at other addresses and alignments."""
    for seed, at in enumerate((0, 0, 16, 1, 1)):
        a, b = (Scaled(np.roll(s.data.view(np.uint8), seed, 1).view(s.dtype), s.scale_inv, s.shape)
                for s in matrices(sum(ODD)))
        got = product(there(flat(a, ODD), device, at), there(flat(b, ODD), device), None)
        expect(got, a, b, ODD)


def test_out_in_a_graph(device, operands, launched):
    """The copies are in memory of `out`: nothing is allocated while a graph is captured."""
    others = [Scaled(s.data[::-1].copy(), s.scale_inv, s.shape) for s in matrices(sum(ODD))]
    out = device.array(np.full((len(ODD), M, N), 7, np.float32))
    assert product(*operands, None, out=out) is out
    expect(out, *matrices(sum(ODD)), ODD)
    with device.cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        product(*operands, None, out=out)
        graph = stream.end_capture()
        for s, operand in zip(others, operands, strict=True):
            operand.columnwise[...] = device.run.array(flat(s, ODD)).columnwise
        graph.launch(stream)
        stream.synchronize()
    expect(out, others[0], others[1], ODD)
    assert launched == [COPIES, HOPPER] * 2


def test_results_do_not_depend_on_where_groups_begin(device):
    """The same columns copied and in place: the bytes are those of one product."""
    sizes = [48, 29, 67]
    a, b = matrices(sum(sizes))
    scales = np.random.default_rng(0).uniform(1, 2, (M, 1)).astype(np.float32)
    a = Scaled(a.data, scales, a.shape, False, (1, None), "compact")
    got = fp8.asnumpy(product(device.run.array(a), device.run.array(b), device.array(np.array(sizes))))
    for group, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        own = [np.zeros((s.shape[0], 80), s.dtype) for s in (a, b)]
        for to, s in zip(own, (a, b), strict=True):
            to[:, :size] = s.data[:, end - size:end]
        alone = product(device.run.array(Scaled(own[0], scales, (M, 80), False, (1, None), "compact")),
                        device.run.array(Scaled(own[1], b.scale_inv, (N, 80))), [80])
        testing.assert_bytes_equal(got[group:group + 1], fp8.asnumpy(alone))
