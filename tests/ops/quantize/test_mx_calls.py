"""How quantize_mx is called: which kernel runs, out=, noop, MXScaling, errors; on a GPU captured graphs and more than 2**31 elements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_mx import SQUARE, assert_same, parts, raw

import cupy_fp8 as fp8
from cupy_fp8 import MXScaling, Quantized, Scaled, backend, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases.quantize.mx import MX_DIRECTIONS
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16, float32
from cupy_fp8.kernels import Variant
from cupy_fp8.recipes import MX_SCALE_LAYOUTS


def poison(q: Quantized) -> None:
    for a in itertools.chain(*parts(q)):
        cases.poison(a)


def is_poison(q: Quantized) -> bool:
    return all((raw(a) == 0xAA).all() for a in itertools.chain(*parts(q)))


def addresses(q: Quantized) -> list[tuple[int, int]]:
    return [(id(a), a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr) for a in itertools.chain(*parts(q))]


# ---- which kernel ----
@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Launches, which happen in name only: the entry, with FAST and SLOW where it is made for wide accesses."""
    seen: list[str] = []

    def launch(self: Variant, *_: Any) -> None:
        defines = dict(self.defines)
        wide = defines.get("ALIGNED") == "1"
        seen.append(self.kernel.entry.removeprefix("quantize_mx_") + (f" {defines['FAST']}{defines['SLOW']}" if wide else ""))

    monkeypatch.setattr(Variant, "launch", launch)
    with testing.executor("host"):
        yield seen


@pytest.mark.parametrize(("shape", "swapped", "options", "kernel"), [
    ((256, 128), False, {}, "rows"),
    ((256, 128), False, {"scale_layout": "swizzled"}, "tile 10"),
    ((100, 96), False, {"scale_layout": "swizzled"}, "tile 10"),                # its scales leave in whole tiles
    ((100, 96), False, {}, "rows"),
    ((100, 100), False, {}, "tile 10"),
    ((100, 96), False, {"block": SQUARE}, "tile 01"),
    ((100, 96), False, {"rowwise": False}, "tile 01"),
    ((96, 100), False, {"rowwise": False, "transposed": True}, "tile 02"),
    ((96, 100), False, {"columnwise": True}, "tile 11"),
    ((96, 100), False, {"columnwise": True, "transposed": True}, "tile 12"),
    ((96, 100), False, {"columnwise": True, "transposed": True, "block": SQUARE}, "tile 12"),
    ((96, 100), False, {"columnwise": True, "block": SQUARE}, "tile 01"),
    ((100, 96), True, {}, "tile 02"),
    ((100, 96), True, {"rowwise": False}, "tile 20"),
    ((100, 96), True, {"rowwise": False, "transposed": True}, "tile 10"),       # scales of neighbouring lines adjoin
    ((96, 96), True, {"rowwise": False, "transposed": True, "scale_layout": "swizzled"}, "tile 10"),
    ((96, 128), True, {"rowwise": False, "transposed": True, "scale_layout": "swizzled"}, "tile 10"),
    ((100, 96), True, {"columnwise": True}, "tile"),
    ((100, 96), True, {"columnwise": True, "transposed": True}, "tile 12"),
    ((100, 96), True, {"columnwise": True, "block": SQUARE}, "tile 02"),
    ((96, 101), False, {"columnwise": True}, "tile"),                           # rows at odd addresses
    ((100, 104), False, {"columnwise": True, "transposed": True}, "tile"),      # transposed rows that are no multiples of 16 bytes
], ids=str)
def test_which_kernel(shape, swapped, options, kernel, launched):
    options = {"columnwise": not options.get("rowwise", True), **options}
    x = np.zeros(shape[::-1] if swapped else shape, np.float32)
    fp8.quantize_mx(x.T if swapped else x, **options)
    assert launched == [kernel]


def test_empty_arrays_launch_nothing(launched):
    for shape in ((0, 5), (5, 0), (0, 0), (3, 0, 4), (0, 2, 2)):
        fp8.quantize_mx(np.zeros(shape, np.float32), columnwise=True, scale_layout="swizzled")
    assert launched == []


# ---- out=, noop, recipe ----
@pytest.mark.parametrize("directions", MX_DIRECTIONS, ids=lambda d: "-".join(k for k, on in d.items() if on))
def test_a_result_is_written_in_place(directions, run):
    for block in ((1, 32), SQUARE):
        out = fp8.quantize_mx(run.array(cases.values("normal", (50, 64), bfloat16)), block=block, **directions)
        before = addresses(out)
        for seed in range(3):
            host = cases.values("bits", (50, 64), bfloat16, seed)
            poison(out)
            assert fp8.quantize_mx(run.array(host), block=block, out=out, **directions) is out
            assert addresses(out) == before
            assert_same(out, reference.quantize_mx(host, block=block, **directions))


def test_noop(run):
    host = cases.values("normal", (40, 64), bfloat16)
    x = run.array(host)
    for options in ({}, {"columnwise": True}, {"columnwise": True, "transposed": True}, {"columnwise": True, "block": SQUARE}):
        out, flag = fp8.quantize_mx(x, **options), run.array(np.ones(1, np.float32))
        for value in (1.0, 0.0, 1.0, float("nan"), 2.0):
            poison(out)
            flag.fill(value)
            assert fp8.quantize_mx(x, noop=flag, out=out, **options) is out
            if value == 1.0:
                assert is_poison(out)
            else:
                assert_same(out, reference.quantize_mx(host, **options))


@pytest.mark.parametrize("lead", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", MX_SCALE_LAYOUTS)
def test_results_at_any_address(layout, lead, run):
    """Every array of the result starts `lead` bytes into a buffer; what surrounds it stays."""
    for shape, transposed in itertools.product([(128, 128), (300, 96), (64, 100), (33, 65)], (False, True)):
        host = cases.values("normal", shape, bfloat16)
        want = reference.quantize_mx(host, columnwise=True, transposed=transposed, scale_layout=layout)
        for names in (("rowwise",), ("columnwise",), ("rowwise", "columnwise")):
            buffers, found = [], {}
            for name in names:
                part = getattr(want, name)
                pair = []
                for a in part:
                    buffer = run.array(np.full(a.nbytes + lead + 16, 0xAA, np.uint8))
                    buffers.append((buffer, a.nbytes))
                    pair.append(buffer[lead : lead + a.nbytes].view(a.dtype).reshape(a.shape))
                found[name] = Scaled(pair[0], pair[1], part.shape, part.transposed, part.block, part.scale_layout)
            out = Quantized(**found)
            fp8.quantize_mx(run.array(host), rowwise="rowwise" in names, columnwise="columnwise" in names, transposed=transposed,
                            scale_layout=layout, out=out)
            assert_same(out, Quantized(**{name: getattr(want, name) for name in names}))
            for buffer, nbytes in buffers:
                edges = np.delete(raw(buffer), slice(lead, lead + nbytes))
                assert set(edges.tolist()) == {0xAA}


@pytest.mark.parametrize("recipe", [MXScaling(), MXScaling(float8_e5m2, "floor", "torchao", SQUARE, "swizzled"),
                                    MXScaling(dtype="float8_e5m2", mode="even", scale_layout="swizzled")], ids=str)
def test_recipe(recipe, run):
    host = cases.values("bits", (2, 40, 70), float16)
    x = run.array(host)
    for row, column in ((True, False), (False, True), (True, True)):
        want = reference.quantize_mx(host, dtype=recipe.dtype, rowwise=row, columnwise=column, mode=recipe.mode, profile=recipe.profile,
                                     block=recipe.block, scale_layout=recipe.scale_layout)
        assert_same(recipe.quantize(x, rowwise=row, columnwise=column), want)
        empty = recipe.empty(x.shape, rowwise=row, columnwise=column, like=x)
        assert recipe.quantize(x, rowwise=row, columnwise=column, out=empty) is empty
        assert_same(empty, want)
        pairs = {name: tuple(getattr(empty, name)) for name, on in (("rowwise", row), ("columnwise", column)) if on}
        wrapped = recipe.empty(x.shape, rowwise=row, columnwise=column, buffers=pairs)
        for part, original in zip(parts(wrapped), parts(empty), strict=True):
            assert part.data is original.data
            assert part.scale_inv is original.scale_inv
        assert recipe.quantize(x, rowwise=row, columnwise=column, out=wrapped) is wrapped


def test_recipes_are_values():
    assert MXScaling("float8_e5m2") == MXScaling(float8_e5m2)
    assert len({MXScaling(), MXScaling(), MXScaling(mode="floor")}) == 2
    with pytest.raises(AttributeError):
        MXScaling().mode = "floor"      # type: ignore[misc]


def test_scales_and_metadata():
    q = fp8.quantize_mx(np.ones((40, 70), np.float32), columnwise=True, scale_layout="swizzled")
    row, column = parts(q)
    assert (row.dtype, row.scale_inv.dtype) == (float8_e4m3fn, float8_e8m0fnu)
    assert (row.shape, row.block, row.scale_layout, row.transposed) == ((40, 70), (1, 32), "swizzled", False)
    assert (column.shape, column.block, column.scale_layout, column.transposed) == ((40, 70), (32, 1), "swizzled", False)
    assert (row.scale_inv.shape, column.scale_inv.shape) == ((128, 4), (128, 4))
    assert q.nbytes == 2 * (40 * 70 + 512)


# ---- errors ----
X = np.ones((4, 64), np.float32)


def results(**changes: Any) -> dict[str, Scaled]:
    q = reference.quantize_mx(X, columnwise=True)
    found = {"rowwise": q.rowwise, "columnwise": q.columnwise}
    for name, attributes in changes.items():
        part = found[name]
        assert part is not None
        names = ("data", "scale_inv", "shape", "transposed", "block", "scale_layout")
        found[name] = Scaled._of(**{**{k: getattr(part, k) for k in names}, **attributes})
    for part in found.values():
        assert part is not None
        for a in part:
            if a.flags.writeable:
                cases.poison(a)
    return found        # type: ignore[return-value]


def read_only(a: np.ndarray) -> np.ndarray:
    cases.poison(a)
    a.flags.writeable = False
    return a


WHOLE = np.zeros(4096, np.uint8)
E8M0 = np.zeros((4, 2), float8_e8m0fnu)
BAD: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
    (TypeError, "^x: expected dtype bfloat16, float16, float32, got float64", (np.ones((2, 2)),), {}),
    (TypeError, "^x: expected a numpy.ndarray or cupy.ndarray, got list", ([[1.0]],), {}),
    (ValueError, r"^x: expected an array of two or three dimensions, got shape \(64,\)", (np.ones(64, np.float32),), {}),
    (ValueError, "^x: expected an array of two or three dimensions", (np.ones((2, 2, 2, 2), np.float32),), {}),
    (ValueError, "^x: expected an array of two or three dimensions", (np.ones((1, 1, 1, 2), np.float32).T,), {}),
    (TypeError, "^dtype: expected one of float8_e4m3fn, float8_e5m2, got float8_e8m0fnu", (X,), {"dtype": float8_e8m0fnu}),
    (ValueError, r"^mode: expected one of \('rceil', 'floor', 'ceil', 'even'\), got 'round'", (X,), {"mode": "round"}),
    (ValueError, "^mode: expected one of", (X,), {"mode": None}),
    (ValueError, r"^profile: expected one of \('te', 'torchao'\), got 'ocp'", (X,), {"profile": "ocp"}),
    (ValueError, r"^block: expected one of \(\(1, 32\), \(32, 32\)\), got \(32, 1\)", (X,), {"block": (32, 1)}),
    (ValueError, "^block: expected one of", (X,), {"block": [1, 32]}),
    (ValueError, "^block: expected one of", (X,), {"block": 32}),
    (ValueError, r"^scale_layout: expected one of \('compact', 'swizzled'\), got 'gemm_ready'", (X,), {"scale_layout": "gemm_ready"}),
    (ValueError, "^rowwise, columnwise: expected at least one", (X,), {"rowwise": False}),
    (ValueError, "^noop: needs out=", (X,), {"noop": np.zeros(1, np.float32)}),
    (TypeError, "^noop: expected dtype float32", (X,), {"noop": np.zeros(1)}),
    (ValueError, "^noop: expected one element", (X,), {"noop": np.zeros(2, np.float32)}),
    (TypeError, "^out: expected a Quantized", (X,), {"out": X}),
]


@pytest.mark.parametrize(("error", "message", "args", "kwargs"), BAD, ids=[f"{i}" for i in range(len(BAD))])
def test_refused(error, message, args, kwargs, run):
    args, kwargs = run.array_arguments(args, kwargs)
    with pytest.raises(error, match=message):
        fp8.quantize_mx(*args, **kwargs)


def bad_results() -> Iterator[tuple[type[Exception], str, Any, dict[str, Any]]]:
    def empty(shape: tuple[int, ...], dtype: Any = float8_e4m3fn) -> np.ndarray:
        return np.empty(shape, dtype)

    both = {"columnwise": True}
    yield ValueError, "^out: no columnwise part", lambda: {"rowwise": results()["rowwise"]}, both
    yield ValueError, "^out: has a columnwise part", results, {}
    yield ValueError, "^out: no rowwise part", lambda: {"columnwise": results()["columnwise"]}, both
    yield ValueError, "^out.rowwise: expected MX data", lambda: results(rowwise={"block": None}), both
    yield ValueError, "^out.rowwise: expected MX data", lambda: results(rowwise={"block": (32, 1)}), both
    swizzled = {**both, "scale_layout": "swizzled"}
    yield ValueError, "^out.rowwise: expected MX data of shape .* scales swizzled; got .* scales compact", results, swizzled
    yield ValueError, "^out.columnwise: expected MX data .*, stored transposed", results, {**both, "transposed": True}
    yield ValueError, "^out.rowwise: expected MX data of shape", lambda: results(rowwise={"shape": (4, 65)}), both
    yield ValueError, "^out.rowwise.data: expected shape", lambda: results(rowwise={"data": empty((4, 63))}), both
    yield TypeError, "^out.rowwise.data: expected dtype float8_e4m3fn", lambda: results(rowwise={"data": empty((4, 64), float8_e5m2)}), both
    yield TypeError, "^out.rowwise.data: expected dtype float8_e5m2", results, {**both, "dtype": float8_e5m2}
    yield ValueError, "^out.rowwise.scale_inv: expected shape", lambda: results(rowwise={"scale_inv": empty((4, 1), float8_e8m0fnu)}), both
    yield TypeError, "^out.rowwise.scale_inv: expected dtype", lambda: results(rowwise={"scale_inv": empty((4, 2), np.uint8)}), both
    yield ValueError, "C-contiguous", lambda: results(rowwise={"data": empty((64, 4)).T}), both
    yield ValueError, "read-only", lambda: results(rowwise={"data": read_only(empty((4, 64)))}), both
    yield ValueError, r"^out\.columnwise\.data: expected out\.rowwise\.data itself", results, {**both, "block": SQUARE}

    def shared() -> dict[str, Scaled]:
        found = results()
        return results(columnwise={"data": found["rowwise"].data}, rowwise={"data": found["rowwise"].data})

    yield ValueError, r"^out\.columnwise\.data: overlaps out\.rowwise\.data", shared, both

    def overlapping() -> dict[str, Scaled]:
        memory = np.empty(512, np.uint8)
        return results(rowwise={"data": memory[:256].view(float8_e4m3fn).reshape(4, 64)},
                       columnwise={"data": memory[255:511].view(float8_e4m3fn).reshape(4, 64)})

    yield ValueError, "^out.columnwise.data: overlaps out.rowwise.data", overlapping, both


@pytest.mark.parametrize(("error", "message", "make", "kwargs"), [pytest.param(*case, id=str(i)) for i, case in enumerate(bad_results())])
@pytest.mark.parametrize("executor", ["reference", "host"])
def test_refused_results(error, message, make, kwargs, executor):
    if problem := testing.executor_problem(executor):
        pytest.skip(problem)
    out = Quantized(**make())
    with testing.executor(executor), pytest.raises(error, match=message):
        fp8.quantize_mx(X, out=out, **kwargs)
    assert is_poison(out)


@pytest.mark.parametrize("executor", ["reference", "host"])
def test_overlaps_with_inputs(executor):
    if problem := testing.executor_problem(executor):
        pytest.skip(problem)
    memory = np.zeros(4096, np.uint8)
    data, scale_inv = memory[1024:1280].view(float8_e4m3fn).reshape(4, 64), np.zeros((4, 2), float8_e8m0fnu)
    out = Quantized(Scaled(data, scale_inv, (4, 64), False, (1, 32), "compact"))
    with testing.executor(executor):
        with pytest.raises(ValueError, match="overlaps x in memory"):
            fp8.quantize_mx(memory[512:1536].view(np.float32).reshape(4, 64), out=out)
        with pytest.raises(ValueError, match="overlaps noop"):
            fp8.quantize_mx(X, noop=memory[1276:1280].view(np.float32), out=out)
    assert not memory.any()


@pytest.mark.parametrize(("error", "message", "make"), [
    (TypeError, "^dtype: expected one of", lambda: MXScaling(float32)),
    (ValueError, "^mode: expected one of", lambda: MXScaling(mode="nearest")),
    (ValueError, "^profile: expected one of", lambda: MXScaling(profile="")),
    (ValueError, "^block: expected one of", lambda: MXScaling(block=(1, 16))),
    (ValueError, "^scale_layout: expected one of", lambda: MXScaling(scale_layout="tiles")),
    (ValueError, "^scale, amax: belong to per-tensor recipes", lambda: MXScaling().quantize(X, scale=1.0)),     # type: ignore[arg-type]
    (ValueError, "^scale, amax: belong to per-tensor recipes", lambda: MXScaling().quantize(X, amax=X[:1, 0])),  # type: ignore[arg-type]
    (ValueError, "^rowwise, columnwise: expected at least one", lambda: MXScaling().empty((4, 64), rowwise=False)),
    (ValueError, "^x: expected an array of two or three dimensions", lambda: MXScaling().empty((64,))),
    (ValueError, "^buffers: expected a .* pair for each of", lambda: MXScaling().empty((4, 64), buffers={})),
    (ValueError, r"^buffers\['rowwise'\]: expected a .* pair", lambda: MXScaling().empty((4, 64), buffers={"rowwise": X})),     # type: ignore[dict-item]
    (TypeError, "data: expected dtype float8_e4m3fn", lambda: MXScaling().empty((4, 64), buffers={"rowwise": (X, E8M0)})),
    (ValueError, "scale_inv: expected a C-contiguous array of shape",
     lambda: MXScaling().empty((4, 65), buffers={"rowwise": (np.zeros((4, 65), float8_e4m3fn), E8M0)})),
    (TypeError, "scale_inv: expected dtype float8_e8m0fnu",
     lambda: MXScaling().empty((4, 64), buffers={"rowwise": (np.zeros((4, 64), float8_e4m3fn), np.ones(1, np.float32))})),
])
def test_recipe_refuses(error, message, make):
    with pytest.raises(error, match=message):
        make()


# ---- on a GPU ----
CAPTURED: list[dict[str, Any]] = [
    {}, {"scale_layout": "swizzled"}, {"rowwise": False, "columnwise": True}, {"rowwise": False, "columnwise": True, "transposed": True},
    {"columnwise": True}, {"columnwise": True, "transposed": True, "scale_layout": "swizzled"}, {"columnwise": True, "block": SQUARE},
]


@pytest.mark.gpu
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("options", CAPTURED, ids=str)
def test_graph_replay(options, swapped):
    cp = backend.cupy()
    shape = (3, 160, 288)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        memory = fp8.asarray(cases.values("normal", shape, bfloat16), like="cupy")
        x = memory.swapaxes(-1, -2) if swapped else memory
        flag, out = cp.zeros(1, cp.float32), fp8.quantize_mx(x, **options)
        fp8.quantize_mx(x, noop=flag, out=out, **options)
        stream.synchronize()
        stream.begin_capture()
        fp8.quantize_mx(x, noop=flag, out=out, **options)
        graph = stream.end_capture()
        for seed, value in ((1, 0.0), (2, 1.0), (3, 0.0)):
            host = cases.values("bits", shape, bfloat16, seed)
            bits(memory).set(bits(host))
            flag.fill(value)
            poison(out)
            graph.launch(stream)
            stream.synchronize()
            if value:
                assert is_poison(out)
            else:
                assert_same(out, reference.quantize_mx(host.swapaxes(-1, -2) if swapped else host, **options))


@pytest.mark.gpu
def test_what_cannot_be_captured():
    cp = backend.cupy()
    x = cp.zeros((32, 64), cp.float32)
    out = fp8.quantize_mx(x)
    half = fp8.quantize_mx(x[:, ::2])
    cp.cuda.get_current_stream().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(ValueError, match=r"^out: needed while a CUDA graph is captured"):
                fp8.quantize_mx(x)
            with pytest.raises(ValueError, match=r"^x: not C-contiguous"):
                fp8.quantize_mx(x[:, ::2], out=half)
        finally:
            stream.end_capture()
    assert fp8.quantize_mx(x, out=out) is out


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("options", CAPTURED, ids=str)
def test_more_than_two_to_the_31_elements(options):
    """Blocks of 32 x 32 at the ends, around 2**31, and at other places."""
    cp = backend.cupy()
    rows, columns = (1 << 16) + 32, (1 << 15) + 32
    words = cp.empty((rows, columns), np.uint16)
    words[...] = cp.asarray(bits(cases.values("normal", (columns,), bfloat16)))
    words += (cp.arange(rows, dtype=cp.uint32) % 61).astype(cp.uint16)[:, None]
    q = fp8.quantize_mx(words.view(bfloat16), **options)
    plain = {**options, "scale_layout": "compact"}
    middle_row, middle_column = ((1 << 31) // columns // 32 * 32, (1 << 31) % columns // 32 * 32)
    some_rows = (0, 32, middle_row, middle_row + 32, rows - 64, rows - 32)
    for r, c in itertools.product(some_rows, (0, 4096, middle_column, columns - 32)):
        want = reference.quantize_mx(fp8.asnumpy(words[r : r + 32, c : c + 32]).view(bfloat16), **plain)
        for part, wanted in zip(parts(q), parts(want), strict=True):
            data = bits(part.data)
            np.testing.assert_array_equal(fp8.asnumpy(data[c : c + 32, r : r + 32] if part.transposed else data[r : r + 32, c : c + 32]),
                                          raw(wanted.data))
            line, block = (c, r // 32) if part.block == (32, 1) else (r, c // 32)
            lines = line + np.arange(32)
            scales = bits(part.scale_inv)
            if part.scale_layout == "swizzled":
                tiles = part.scale_inv.shape[1] // 4
                at = (lines // 128 * tiles + block // 4) * 512 + lines % 32 * 16 + lines % 128 // 32 * 4 + block % 4
                found = scales.reshape(-1)[cp.asarray(at)]
            else:
                found = scales[block, line : line + 32] if part.block == (32, 1) else scales[line : line + 32, block]
            np.testing.assert_array_equal(fp8.asnumpy(found), raw(wanted.scale_inv).reshape(-1))
