"""How quantize_block is called: which kernel runs, out=, noop, BlockScaling, errors; on a GPU captured graphs, more than 2**31 elements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_blocks import assert_same, parts, raw

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, Quantized, Scaled, backend, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16, float32
from cupy_fp8.kernels import Variant

SQUARE = (128, 128)
DIRECTIONS: tuple[dict[str, bool], ...] = ({}, {"rowwise": False, "columnwise": True}, {"columnwise": True},
                                           {"columnwise": True, "transposed": False})


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
        d = dict(self.defines)
        wide = f" {d['FAST']}{d['SLOW']}" + " square" * (d["SQUARE"] == "1") if d.get("ALIGNED") == "1" else ""
        seen.append(self.kernel.entry.removeprefix("quantize_block_") + wide + " divide" * (d.get("DIVIDE") == "1"))

    monkeypatch.setattr(Variant, "launch", launch)
    with testing.executor("host"):
        yield seen


@pytest.mark.parametrize(("shape", "swapped", "options", "kernels"), [
    ((100, 128), False, {}, ["rows"]),
    ((100, 128), False, {"scale_layout": "compact", "profile": "vllm"}, ["rows divide"]),
    ((100, 128), False, {"block": (1, 64)}, ["tile 10"]),
    ((100, 128), False, {"columnwise": True}, ["tile"]),                                  # transposed rows at odd multiples of 4
    ((128, 100), True, {"rowwise": False}, ["rows"]),
    ((100, 128), False, {"block": (128, 1), "rowwise": False, "transposed": False}, ["rows"]),
    ((100, 96), False, {}, ["tile 10"]),
    ((100, 96), False, {"block": (1, 32)}, ["tile 10"]),
    ((100, 96), False, {"profile": "vllm"}, ["tile"]),
    ((100, 96), False, {"profile": "vllm", "pow2_scale": True}, ["tile 10"]),
    ((96, 100), False, {"rowwise": False}, ["tile 02"]),
    ((100, 96), False, {"rowwise": False, "transposed": False}, ["tile"]),
    ((96, 100), False, {"columnwise": True}, ["tile 12"]),
    ((96, 100), False, {"columnwise": True, "transposed": False}, ["tile"]),
    ((96, 100), False, {"columnwise": True, "profile": "vllm"}, ["tile"]),
    ((100, 96), False, {"block": SQUARE}, ["tile 10 square"]),
    ((96, 100), False, {"block": SQUARE, "rowwise": False}, ["tile 02 square"]),
    ((96, 100), False, {"block": SQUARE, "columnwise": True}, ["tile 12 square"]),
    ((96, 100), False, {"block": SQUARE, "columnwise": True, "transposed": False}, ["tile 10 square"]),
    ((96, 100), False, {"block": (128, 1)}, ["tile"]),
    ((96, 100), False, {"block": (128, 1), "columnwise": True}, ["tile"]),                # a way to store that is rare
    ((100, 96), True, {}, ["tile 02"]),
    ((100, 96), True, {"rowwise": False}, ["tile 10"]),
    ((100, 96), True, {"columnwise": True}, ["tile 12"]),
    ((96, 101), False, {"columnwise": True}, ["tile"]),                                   # rows at odd addresses
    ((100, 104), False, {"columnwise": True}, ["tile"]),                                  # transposed rows at odd multiples of 8
    ((96, 100), False, {"block": (1, None)}, ["lines"]),
    ((96, 100), False, {"block": (1, None), "columnwise": True}, ["lines", "lines"]),
], ids=str)
def test_which_kernel(shape, swapped, options, kernels, launched):
    options = {"columnwise": not options.get("rowwise", True), **options}
    x = np.zeros(shape[::-1] if swapped else shape, np.float32)
    fp8.quantize_block(x.T if swapped else x, **options)
    assert launched == kernels


def test_empty_arrays_launch_nothing(launched):
    for shape, block in itertools.product(((0, 5), (5, 0), (0, 0), (3, 0, 4), (0, 2, 2)), ((1, 128), SQUARE, (1, None))):
        fp8.quantize_block(np.zeros(shape, np.float32), block=block, columnwise=True)
    assert launched == []


# ---- out=, noop, recipe ----
@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
@pytest.mark.parametrize("block", [(1, 128), SQUARE, (1, None)], ids=str)
def test_a_result_is_written_in_place(directions, block, run):
    out = fp8.quantize_block(run.array(cases.values("normal", (50, 64), bfloat16)), block=block, **directions)
    before = addresses(out)
    for seed in range(3):
        host = cases.values("bits", (50, 64), bfloat16, seed)
        poison(out)
        assert fp8.quantize_block(run.array(host), block=block, out=out, **directions) is out
        assert addresses(out) == before
        assert_same(out, reference.quantize_block(host, block=block, **directions))


@pytest.mark.parametrize("options", [{}, {"block": (1, 64)}, {"columnwise": True}, {"columnwise": True, "block": SQUARE},
                                     {"block": (1, None)}], ids=str)
def test_noop(options, run):
    host = cases.values("normal", (40, 128), bfloat16)
    x = run.array(host)
    out, flag = fp8.quantize_block(x, **options), run.array(np.ones(1, np.float32))
    for value in (1.0, 0.0, 1.0, float("nan"), 2.0):
        poison(out)
        flag.fill(value)
        assert fp8.quantize_block(x, noop=flag, out=out, **options) is out
        if value == 1.0:
            assert is_poison(out)
        else:
            assert_same(out, reference.quantize_block(host, **options))


@pytest.mark.parametrize("lead", [4, 8, 12])
def test_results_at_any_address(lead, run):
    """Every array of the result starts `lead` bytes into a buffer; what surrounds it stays."""
    for shape, layout in itertools.product([(128, 128), (300, 96), (33, 65)], ("gemm_ready", "compact")):
        host = cases.values("normal", shape, bfloat16)
        want = reference.quantize_block(host, columnwise=True, scale_layout=layout)
        buffers, found = [], {}
        for name, part in (("rowwise", want.rowwise), ("columnwise", want.columnwise)):
            assert part is not None
            pair = []
            for a in part:
                buffer = run.array(np.full(a.nbytes + lead + 16, 0xAA, np.uint8))
                buffers.append((buffer, a.nbytes))
                pair.append(buffer[lead : lead + a.nbytes].view(a.dtype).reshape(a.shape))
            found[name] = Scaled(pair[0], pair[1], part.shape, part.transposed, part.block, part.scale_layout)
        out = Quantized(**found)
        fp8.quantize_block(run.array(host), columnwise=True, scale_layout=layout, out=out)
        assert_same(out, want)
        for buffer, nbytes in buffers:
            assert set(np.delete(raw(buffer), slice(lead, lead + nbytes)).tolist()) == {0xAA}


@pytest.mark.parametrize("recipe", [
    BlockScaling(), BlockScaling(SQUARE, float8_e5m2, 1e-3, False, "deepgemm", "compact"), BlockScaling((1, None), profile="vllm"),
    BlockScaling(block=(128, 1), dtype="float8_e5m2", profile="sglang", scale_layout="deepgemm_sm90"),
], ids=str)
def test_recipe(recipe, run):
    host = cases.values("bits", (2, 40, 70), float16)
    x = run.array(host)
    for row, column in ((True, False), (False, True), (True, True)):
        want = reference.quantize_block(host, block=recipe.block, dtype=recipe.dtype, rowwise=row, columnwise=column, eps=recipe.eps,
                                        pow2_scale=recipe.pow2_scale, profile=recipe.profile, scale_layout=recipe.scale_layout)
        assert_same(recipe.quantize(x, rowwise=row, columnwise=column), want)
        empty = recipe.empty(x.shape, rowwise=row, columnwise=column, like=x)
        assert recipe.quantize(x, rowwise=row, columnwise=column, out=empty) is empty
        assert_same(empty, want)
        pairs = {name: tuple(getattr(empty, name)) for name, on in (("rowwise", row), ("columnwise", column)) if on}
        wrapped = recipe.empty(x.shape, rowwise=row, columnwise=column, buffers=pairs)
        for part, original in zip(parts(wrapped), parts(empty), strict=True):
            assert part.data is original.data
            assert part.scale_inv is original.scale_inv


def test_recipes_are_values():
    assert BlockScaling(dtype="float8_e5m2") == BlockScaling((1, 128), float8_e5m2)
    assert len({BlockScaling(), BlockScaling(), BlockScaling(profile="vllm")}) == 2


# ---- errors ----
X = np.ones((4, 64), np.float32)
BAD: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
    (TypeError, "^x: expected dtype bfloat16, float16, float32, got float64", (np.ones((2, 2)),), {}),
    (TypeError, "^x: expected a numpy.ndarray or cupy.ndarray, got list", ([[1.0]],), {}),
    (ValueError, r"^x: expected an array of two or three dimensions, got shape \(64,\)", (np.ones(64, np.float32),), {}),
    (ValueError, "^x: expected an array of two or three dimensions", (np.ones((2, 2, 2, 2), np.float32),), {}),
    (TypeError, "^dtype: expected one of float8_e4m3fn, float8_e5m2, got float8_e8m0fnu", (X,), {"dtype": float8_e8m0fnu}),
    (ValueError, r"^profile: expected one of \('te', .*'torchao'\), got 'TE'", (X,), {"profile": "TE"}),
    (ValueError, r"^block: expected one of \(\(1, 128\), .*, got \(1, 16\)", (X,), {"block": (1, 16)}),
    (ValueError, "^block: expected one of", (X,), {"block": [1, 128]}),
    (ValueError, "^block: expected one of", (X,), {"block": 128}),
    (ValueError, "^block: expected", (X,), {"block": (1, 128.0)}),
    (ValueError, r"^scale_layout: expected one of .*, got 'swizzled'", (X,), {"scale_layout": "swizzled"}),
    (ValueError, "^scale_layout: 'deepgemm_sm90' belongs to blocks along", (X,), {"scale_layout": "deepgemm_sm90", "block": SQUARE}),
    (ValueError, "^eps: expected a finite float32 of 0 or more, got -1", (X,), {"eps": -1}),
    (ValueError, "^eps: expected a finite float32", (X,), {"eps": float("nan")}),
    (TypeError, "^eps: expected a number", (X,), {"eps": "0"}),
    (TypeError, "^pow2_scale: expected True, False or None", (X,), {"pow2_scale": "yes"}),
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
        fp8.quantize_block(*args, **kwargs)


def results(block: Any = (1, 128), **changes: Any) -> dict[str, Scaled]:
    q = reference.quantize_block(X, columnwise=True, block=block)
    found = {}
    for name, part in (("rowwise", q.rowwise), ("columnwise", q.columnwise)):
        attributes = {k: getattr(part, k) for k in ("data", "scale_inv", "shape", "transposed", "block", "scale_layout")}
        found[name] = Scaled._of(**{**attributes, **changes.get(name, {})})
        for a in found[name]:
            cases.poison(a)
    return found


def bad_results() -> Iterator[tuple[type[Exception], str, Any, dict[str, Any]]]:
    both = {"columnwise": True}
    yield ValueError, "^out: no columnwise part", lambda: {"rowwise": results()["rowwise"]}, both
    yield ValueError, "^out: has a columnwise part", results, {}
    yield ValueError, "^out.rowwise: expected block-scaled data", lambda: results(rowwise={"block": (1, 64)}), both
    yield ValueError, "^out.rowwise: expected block-scaled data", lambda: results(rowwise={"scale_layout": "compact"}), both
    yield ValueError, "^out.columnwise: expected block-scaled data .*, not stored transposed", results, {**both, "transposed": False}
    yield ValueError, "^out.rowwise.scale_inv: expected shape", lambda: results(rowwise={"scale_inv": np.empty((1, 8), np.float32)}), both
    yield TypeError, "^out.rowwise.scale_inv: expected dtype", lambda: results(rowwise={"scale_inv": np.empty((1, 4), np.uint32)}), both
    yield TypeError, "^out.rowwise.data: expected dtype float8_e5m2", results, {**both, "dtype": float8_e5m2}
    square = {**both, "block": SQUARE, "transposed": False}

    def apart() -> dict[str, Scaled]:
        a, b = results(SQUARE)["rowwise"], results(SQUARE)["rowwise"]
        return {"rowwise": a, "columnwise": b}

    yield ValueError, r"^out\.columnwise\.data: expected out\.rowwise\.data itself", apart, square

    def shared() -> dict[str, Scaled]:
        data = np.empty((4, 64), float8_e4m3fn)
        found = results(rowwise={"data": data})
        column = reference.quantize_block(X, rowwise=False, columnwise=True, transposed=False).columnwise
        assert column is not None
        cases.poison(column.scale_inv)
        return {**found, "columnwise": Scaled._of(data, column.scale_inv, (4, 64), False, (128, 1), "gemm_ready")}

    yield ValueError, r"^out\.columnwise\.data: overlaps out\.rowwise\.data", shared, {**both, "transposed": False}


@pytest.mark.parametrize(("error", "message", "make", "kwargs"), [pytest.param(*case, id=str(i)) for i, case in enumerate(bad_results())])
@pytest.mark.parametrize("executor", ["reference", "host"])
def test_refused_results(error, message, make, kwargs, executor):
    if problem := testing.executor_problem(executor):
        pytest.skip(problem)
    out = Quantized(**make())
    with testing.executor(executor), pytest.raises(error, match=message):
        fp8.quantize_block(X, out=out, **kwargs)
    assert is_poison(out)


@pytest.mark.parametrize(("error", "message", "make"), [
    (TypeError, "^dtype: expected one of", lambda: BlockScaling(dtype=float32)),
    (ValueError, "^profile: expected one of", lambda: BlockScaling(profile="")),
    (ValueError, "^block: expected one of", lambda: BlockScaling((2, 128))),
    (ValueError, "^scale_layout: expected one of", lambda: BlockScaling(scale_layout="tiles")),
    (ValueError, "^eps: expected a finite", lambda: BlockScaling(eps=-1.0)),
    (TypeError, "^pow2_scale: expected", lambda: BlockScaling(pow2_scale=2)),                   # type: ignore[arg-type]
    (ValueError, "^scale, amax: belong to per-tensor", lambda: BlockScaling().quantize(X, scale=1.0)),     # type: ignore[arg-type]
    (ValueError, "^rowwise, columnwise: expected at least one", lambda: BlockScaling().empty((4, 64), rowwise=False)),
    (ValueError, "^x: expected an array of two or three dimensions", lambda: BlockScaling().empty((64,))),
])
def test_recipe_refuses(error, message, make):
    with pytest.raises(error, match=message):
        make()


# ---- on a GPU ----
CAPTURED: list[dict[str, Any]] = [
    {}, {"scale_layout": "compact"}, {"profile": "vllm"}, {"rowwise": False, "columnwise": True}, {"columnwise": True},
    {"columnwise": True, "scale_layout": "compact"}, {"columnwise": True, "block": SQUARE}, {"columnwise": True, "block": (1, None)},
]


@pytest.mark.gpu
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("options", CAPTURED, ids=str)
def test_graph_replay(options, swapped):
    cp = backend.cupy()
    shape = (3, 160, 384)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        memory = fp8.asarray(cases.values("normal", shape, bfloat16), like="cupy")
        x = memory.swapaxes(-1, -2) if swapped else memory
        flag, out = cp.zeros(1, cp.float32), fp8.quantize_block(x, **options)
        fp8.quantize_block(x, noop=flag, out=out, **options)
        stream.synchronize()
        stream.begin_capture()
        fp8.quantize_block(x, noop=flag, out=out, **options)
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
                assert_same(out, reference.quantize_block(host.swapaxes(-1, -2) if swapped else host, **options))


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("options", [o for o in CAPTURED if o.get("block") != (1, None)], ids=str)
def test_more_than_two_to_the_31_elements(options):
    """Tiles of 128 x 128 at the ends, around 2**31, and at other places."""
    cp = backend.cupy()
    rows, columns = (1 << 16) + 128, (1 << 15) + 128
    words = cp.empty((rows, columns), np.uint16)
    words[...] = cp.asarray(bits(cases.values("normal", (columns,), bfloat16)))
    words += (cp.arange(rows, dtype=cp.uint32) % 61).astype(cp.uint16)[:, None]
    q = fp8.quantize_block(words.view(bfloat16), **options)
    middle = (1 << 31) // columns // 128 * 128, (1 << 31) % columns // 128 * 128
    for r, c in itertools.product((0, middle[0], middle[0] + 128, rows - 128), (0, 4096, middle[1], columns - 128)):
        tile = fp8.asnumpy(words[r : r + 128, c : c + 128]).view(bfloat16)
        want = reference.quantize_block(tile, **{**options, "scale_layout": "compact"})
        for part, wanted in zip(parts(q), parts(want), strict=True):
            data = bits(part.data)
            found = data[c : c + 128, r : r + 128] if part.transposed else data[r : r + 128, c : c + 128]
            np.testing.assert_array_equal(fp8.asnumpy(found), raw(wanted.data))
            assert part.block is not None
            first = [at // (extent or 1) for at, extent in zip((r, c), part.block, strict=True)]
            flipped = part.transposed if 1 not in part.block else part.block[0] == 1 and part.scale_layout != "compact"
            scales = part.scale_inv.T if flipped else part.scale_inv
            expected = fp8.asnumpy(wanted.scale_inv)
            expected = expected.T if part.transposed and 1 not in part.block else expected
            np.testing.assert_array_equal(
                fp8.asnumpy(scales[first[0] : first[0] + expected.shape[0], first[1] : first[1] + expected.shape[1]]), expected)
