"""How quantize_block and quantize_mx are called: which kernel runs, out=, noop, recipes, and what they
refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, MXScaling, Quantized, Scaled, cases, reference, testing
from cupy_fp8.arrays import address
from cupy_fp8.cases.base import DIRECTIONS
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16, float32
from cupy_fp8.kernels import Variant


class Quantiser(NamedTuple):
    function: Callable[..., Quantized]
    definition: Callable[..., Quantized]
    recipe: type[Any]


BLOCK = Quantiser(fp8.quantize_block, reference.quantize_block, BlockScaling)
MX = Quantiser(fp8.quantize_mx, reference.quantize_mx, MXScaling)
of_either = pytest.mark.parametrize("op", [BLOCK, MX], ids=["block", "mx"])
SQUARES, SQUARES_32 = {"block": (128, 128)}, {"block": (32, 32)}
COLUMN, BOTH, T, NOT_T = {"rowwise": False}, {"columnwise": True}, {"transposed": True}, {"transposed": False}


def arrays(q: Quantized) -> list[Any]:
    return [a for _, part in q._parts() for a in part]


def raw(a: Any) -> np.ndarray:
    return fp8.asnumpy(a).view(np.uint8)


def poison(q: Quantized) -> None:
    for a in arrays(q):
        if not isinstance(a, np.ndarray) or a.flags.writeable:
            cases.poison(a)


def is_poison(q: Quantized) -> bool:
    return all((raw(a) == 0xAA).all() for a in arrays(q))


# ---- which kernel ----
@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Launches, which happen in name only: the entry, with ALONG_ROWS and ALONG_COLUMNS where it is made for
    wide accesses."""
    seen: list[str] = []

    def launch(self: Variant, *_: Any) -> None:
        d = dict(self.defines)
        square, divide = " square" * (d.get("SQUARE") == "1"), " divide" * (d.get("DIVIDE") == "1")
        wide = f" {d['ALONG_ROWS']}{d['ALONG_COLUMNS']}{square}" if d.get("ALIGNED") == "1" else ""
        seen.append(self.kernel.entry.rpartition("_")[2] + wide + divide)

    monkeypatch.setattr(Variant, "launch", launch)
    with testing.executor("host"):
        yield seen


@pytest.mark.parametrize(("op", "shape", "swapped", "options", "kernels"), [
    (BLOCK, (100, 128), False, {}, "rows"),
    (BLOCK, (100, 128), False, {"scale_layout": "compact", "profile": "vllm"}, "rows divide"),
    (BLOCK, (100, 128), False, {"block": (1, 64)}, "tile 10"),
    # transposed rows at odd multiples of 4
    (BLOCK, (100, 128), False, BOTH, "tile"),
    (BLOCK, (128, 100), True, COLUMN, "rows"),
    (BLOCK, (100, 128), False, {"block": (128, 1), **COLUMN, **NOT_T}, "rows"),
    (BLOCK, (100, 96), False, {}, "tile 10"),
    (BLOCK, (100, 96), False, {"block": (1, 32)}, "tile 10"),
    (BLOCK, (100, 96), False, {"profile": "vllm"}, "tile"),
    (BLOCK, (100, 96), False, {"profile": "vllm", "pow2_scale": True}, "tile 10"),
    (BLOCK, (96, 100), False, COLUMN, "tile 02"),
    # ways to store that are rare
    (BLOCK, (100, 96), False, {**COLUMN, **NOT_T}, "tile"),
    (BLOCK, (96, 100), False, BOTH, "tile 12"),
    (BLOCK, (96, 100), False, {**BOTH, **NOT_T}, "tile"),
    (BLOCK, (96, 100), False, {**BOTH, "profile": "vllm"}, "tile"),
    (BLOCK, (100, 96), False, SQUARES, "tile 10 square"),
    (BLOCK, (96, 100), False, {**SQUARES, **COLUMN}, "tile 02 square"),
    (BLOCK, (96, 100), False, {**SQUARES, **BOTH}, "tile 12 square"),
    (BLOCK, (96, 100), False, {**SQUARES, **BOTH, **NOT_T}, "tile 10 square"),
    (BLOCK, (96, 100), False, {"block": (128, 1)}, "tile"),
    (BLOCK, (96, 100), False, {"block": (128, 1), **BOTH}, "tile"),
    (BLOCK, (100, 96), True, {}, "tile 02"),
    (BLOCK, (100, 96), True, COLUMN, "tile 10"),
    (BLOCK, (100, 96), True, BOTH, "tile 12"),
    (BLOCK, (96, 101), False, BOTH, "tile"),                                        # rows at odd addresses
    # transposed rows at odd multiples of 8
    (BLOCK, (100, 104), False, BOTH, "tile"),
    (BLOCK, (96, 100), False, {"block": (1, None)}, "lines"),
    (BLOCK, (96, 100), False, {"block": (1, None), **BOTH}, "lines, lines"),
    (MX, (256, 128), False, {}, "rows"),
    (MX, (256, 128), False, {"scale_layout": "swizzled"}, "tile 10"),
    # its scales leave in whole tiles
    (MX, (100, 96), False, {"scale_layout": "swizzled"}, "tile 10"),
    (MX, (100, 96), False, {}, "rows"),
    (MX, (100, 100), False, {}, "tile 10"),
    (MX, (100, 96), False, SQUARES_32, "tile 01"),
    (MX, (100, 96), False, COLUMN, "tile 01"),
    (MX, (96, 100), False, {**COLUMN, **T}, "tile 02"),
    (MX, (96, 100), False, BOTH, "tile 11"),
    (MX, (96, 100), False, {**BOTH, **T}, "tile 12"),
    (MX, (96, 100), False, {**BOTH, **T, **SQUARES_32}, "tile 12"),
    (MX, (96, 100), False, {**BOTH, **SQUARES_32}, "tile 01"),
    (MX, (100, 96), True, {}, "tile 02"),
    (MX, (100, 96), True, COLUMN, "tile 20"),
    # scales of neighbouring rows adjoin
    (MX, (100, 96), True, {**COLUMN, **T}, "tile 10"),
    (MX, (96, 96), True, {**COLUMN, **T, "scale_layout": "swizzled"}, "tile 10"),
    (MX, (96, 128), True, {**COLUMN, **T, "scale_layout": "swizzled"}, "tile 10"),
    (MX, (100, 96), True, BOTH, "tile"),                                            # both stored transposed
    (MX, (100, 96), True, {**BOTH, **T}, "tile 12"),
    (MX, (100, 96), True, {**BOTH, **SQUARES_32}, "tile 02"),
    (MX, (96, 101), False, BOTH, "tile"),                                           # rows at odd addresses
    # transposed rows at odd multiples of 8
    (MX, (100, 104), False, {**BOTH, **T}, "tile"),
], ids=lambda v: v.function.__name__ if isinstance(v, Quantiser) else str(v))
def test_which_kernel(op, shape, swapped, options, kernels, launched):
    options = {"columnwise": not options.get("rowwise", True), **options}
    x = np.zeros(shape[::-1] if swapped else shape, np.float32)
    op.function(x.T if swapped else x, **options)
    assert ", ".join(launched) == kernels


def test_empty_arrays_launch_nothing(launched):
    for shape in ((0, 5), (5, 0), (0, 0), (3, 0, 4), (0, 2, 2)):
        x = np.zeros(shape, np.float32)
        for block in ((1, 128), (128, 128), (1, None)):
            fp8.quantize_block(x, block=block, columnwise=True)
        fp8.quantize_mx(x, columnwise=True, scale_layout="swizzled")
    assert launched == []


# ---- out=, noop, recipes ----
@pytest.mark.parametrize(("op", "block"), [(BLOCK, (1, 128)), (BLOCK, (128, 128)), (BLOCK, (1, None)),
                                           (MX, (1, 32)), (MX, (32, 32))])
def test_a_result_is_written_in_place(op, block, run):
    for directions, transposed in itertools.product(DIRECTIONS[:3], (False, True)):
        options = {**directions, "transposed": transposed, "block": block}
        out = op.function(run.array(cases.values("normal", (50, 64), bfloat16)), **options)
        before = [(id(a), address(a)) for a in arrays(out)]
        for seed in range(3):
            host = cases.values("bits", (50, 64), bfloat16, seed)
            poison(out)
            assert op.function(run.array(host), out=out, **options) is out
            assert [(id(a), address(a)) for a in arrays(out)] == before
            testing.assert_bytes_equal(out, op.definition(host, **options))


@pytest.mark.parametrize(("op", "options"), [
    (BLOCK, {}), (BLOCK, {"block": (1, 64)}), (BLOCK, BOTH), (BLOCK, {**BOTH, **SQUARES}),
    (BLOCK, {"block": (1, None)}),
    (MX, {}), (MX, BOTH), (MX, {**BOTH, **T}), (MX, {**BOTH, **SQUARES_32})])
def test_noop(op, options, run):
    host = cases.values("normal", (40, 128), bfloat16)
    x = run.array(host)
    out, flag = op.function(x, **options), run.array(np.ones(1, np.float32))
    for value in (1.0, 0.0, 1.0, float("nan"), 2.0):
        poison(out)
        flag.fill(value)
        assert op.function(x, noop=flag, out=out, **options) is out
        if value == 1.0:
            assert is_poison(out)
        else:
            testing.assert_bytes_equal(out, op.definition(host, **options))


@pytest.mark.parametrize(("op", "layout", "lead"), [
    *itertools.product([BLOCK], ("gemm_ready", "compact"), (4, 8, 12)),
    *itertools.product([MX], ("compact", "swizzled"), (1, 2, 4, 8))])
def test_results_at_any_address(op, layout, lead, run):
    """Every array of the result starts `lead` bytes into a buffer; what surrounds it stays."""
    directions = DIRECTIONS[:3] if op is MX else DIRECTIONS[2:3]
    for shape, transposed, d in itertools.product([(128, 128), (300, 96), (64, 100), (33, 65)], (False, True),
                                                  directions):
        host, options = cases.values("normal", shape, bfloat16), {**d, "transposed": transposed,
                                                                  "scale_layout": layout}
        want = op.definition(host, **options)
        buffers, found = [], {}
        for name, part in want._parts():
            pair = []
            for a in part:
                buffers.append((run.array(np.full(a.nbytes + lead + 16, 0xAA, np.uint8)), a.nbytes))
                pair.append(buffers[-1][0][lead : lead + a.nbytes].view(a.dtype).reshape(a.shape))
            found[name] = Scaled(pair[0], pair[1], part.shape, part.transposed, part.block, part.scale_layout)
        out = Quantized(**found)
        op.function(run.array(host), out=out, **options)
        testing.assert_bytes_equal(out, want)
        for buffer, nbytes in buffers:
            assert set(np.delete(raw(buffer), slice(lead, lead + nbytes)).tolist()) == {0xAA}


@pytest.mark.parametrize(("op", "recipe"), [
    (BLOCK, BlockScaling()),
    (BLOCK, BlockScaling((128, 128), float8_e5m2, 1e-3, False, "deepgemm", "compact")),
    (BLOCK, BlockScaling((1, None), profile="vllm")),
    (BLOCK, BlockScaling(block=(128, 1), dtype="float8_e5m2", profile="sglang",
                         scale_layout="deepgemm_sm90")),
    (MX, MXScaling()), (MX, MXScaling(float8_e5m2, "floor", "torchao", (32, 32), "swizzled")),
    (MX, MXScaling(dtype="float8_e5m2", mode="even", scale_layout="swizzled"))], ids=str)
def test_recipe(op, recipe, run):
    host = cases.values("bits", (2, 40, 70), float16)
    x, options = run.array(host), {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    for directions in DIRECTIONS[:3]:
        want = op.definition(host, **directions, **options)
        testing.assert_bytes_equal(recipe.quantize(x, **directions), want)
        empty = recipe.empty(x.shape, like=x, **directions)
        assert recipe.quantize(x, out=empty, **directions) is empty
        testing.assert_bytes_equal(empty, want)
        pairs = {name: tuple(part) for name, part in empty._parts()}
        wrapped = recipe.empty(x.shape, buffers=pairs, **directions)
        assert [id(a) for a in arrays(wrapped)] == [id(a) for a in arrays(empty)]
        assert recipe.quantize(x, out=wrapped, **directions) is wrapped


def test_recipes_are_values():
    assert BlockScaling(dtype="float8_e5m2") == BlockScaling((1, 128), float8_e5m2)
    assert MXScaling("float8_e5m2") == MXScaling(float8_e5m2)
    assert len({BlockScaling(), BlockScaling(), BlockScaling(profile="vllm")}) == 2
    assert len({MXScaling(), MXScaling(), MXScaling(mode="floor")}) == 2
    with pytest.raises(AttributeError):
        MXScaling().mode = "floor"      # type: ignore[misc]


def test_scales_and_metadata():
    q = fp8.quantize_mx(np.ones((40, 70), np.float32), columnwise=True, scale_layout="swizzled")
    facts = [(part.shape, part.block, part.scale_layout, part.transposed, part.dtype, part.scale_inv.dtype,
              part.scale_inv.shape)
             for _, part in q._parts()]
    assert facts == [((40, 70), block, "swizzled", False, float8_e4m3fn, float8_e8m0fnu, (128, 4))
                     for block in ((1, 32), (32, 1))]
    assert q.nbytes == 2 * (40 * 70 + 512)


# ---- what is refused ----
X = np.ones((4, 64), np.float32)
E8M0 = np.zeros((4, 2), float8_e8m0fnu)


@of_either
@pytest.mark.parametrize("shape", [(64,), (2, 2, 2, 2), (1, 1, 1, 2)], ids=str)
def test_x_has_two_or_three_dimensions(op, shape):
    for x in (np.ones(shape, np.float32), np.ones(shape, np.float32).T):
        with pytest.raises(ValueError, match=r"^x: expected an array of two or three dimensions, got shape"):
            op.function(x)


@pytest.mark.parametrize(("op", "error", "message", "options"), [
    (BLOCK, TypeError, "^dtype: expected one of float8_e4m3fn, float8_e5m2, got float8_e8m0fnu",
     {"dtype": float8_e8m0fnu}),
    (BLOCK, ValueError, r"^profile: expected one of \('te', .*'torchao'\), got 'TE'", {"profile": "TE"}),
    (BLOCK, ValueError, r"^block: expected one of \(\(1, 128\), .*, got \(1, 16\)", {"block": (1, 16)}),
    (BLOCK, ValueError, "^block: expected one of", {"block": [1, 128]}),
    (BLOCK, ValueError, "^block: expected one of", {"block": 128}),
    (BLOCK, ValueError, "^block: expected", {"block": (1, 128.0)}),
    (BLOCK, ValueError, r"^scale_layout: expected one of .*, got 'swizzled'", {"scale_layout": "swizzled"}),
    (BLOCK, ValueError, "^scale_layout: 'deepgemm_sm90' belongs to blocks along",
     {"scale_layout": "deepgemm_sm90", **SQUARES}),
    (BLOCK, ValueError, "^eps: expected a finite float32 of 0 or more, got -1", {"eps": -1}),
    (BLOCK, ValueError, "^eps: expected a finite float32", {"eps": float("nan")}),
    (BLOCK, TypeError, "^eps: expected a number", {"eps": "0"}),
    (BLOCK, TypeError, "^pow2_scale: expected True, False or None", {"pow2_scale": "yes"}),
    (BLOCK, ValueError, "^rowwise, columnwise: expected at least one", COLUMN),
    (MX, TypeError, "^dtype: expected one of float8_e4m3fn, float8_e5m2, got float8_e8m0fnu",
     {"dtype": float8_e8m0fnu}),
    (MX, ValueError, r"^mode: expected one of \('rceil', 'floor', 'ceil', 'even'\), got 'round'",
     {"mode": "round"}),
    (MX, ValueError, "^mode: expected one of", {"mode": None}),
    (MX, ValueError, r"^profile: expected one of \('te', 'torchao'\), got 'ocp'", {"profile": "ocp"}),
    (MX, ValueError, r"^block: expected one of \(\(1, 32\), \(32, 32\)\), got \(32, 1\)", {"block": (32, 1)}),
    (MX, ValueError, "^block: expected one of", {"block": [1, 32]}),
    (MX, ValueError, "^block: expected one of", {"block": 32}),
    (MX, ValueError, r"^scale_layout: expected one of \('compact', 'swizzled'\), got 'gemm_ready'",
     {"scale_layout": "gemm_ready"}),
    (MX, ValueError, "^rowwise, columnwise: expected at least one", COLUMN),
])
def test_options_are_refused(op, error, message, options):
    with pytest.raises(error, match=message):
        op.function(X, **options)


def result(op: Quantiser, options: dict[str, Any] | None = None,
           **changes: dict[str, Any]) -> dict[str, Scaled]:
    """Both directions of a result of X, with some attributes changed by direction."""
    q = op.definition(X, columnwise=True, **options or {})
    names = ("data", "scale_inv", "shape", "transposed", "block", "scale_layout")
    return {name: Scaled._of(**{**{k: getattr(part, k) for k in names}, **changes.get(name, {})})
            for name, part in q._parts()}


def bad_results() -> Iterator[tuple[Quantiser, type[Exception], str, dict[str, Scaled], dict[str, Any]]]:
    for op in (BLOCK, MX):
        both = result(op)
        yield op, ValueError, "^out: no columnwise part", {"rowwise": both["rowwise"]}, BOTH
        yield op, ValueError, "^out: has a columnwise part", both, {}
        yield op, ValueError, "^out: no rowwise part", {"columnwise": both["columnwise"]}, BOTH
        yield op, TypeError, "^out.rowwise.data: expected dtype float8_e5m2", both, {**BOTH,
                                                                                     "dtype": float8_e5m2}
        data = np.empty((4, 64), float8_e4m3fn)
        shared = result(op, NOT_T, rowwise={"data": data}, columnwise={"data": data})
        yield op, ValueError, r"^out\.columnwise\.data: overlaps out\.rowwise\.data", shared, {**BOTH,
            **NOT_T}
    of_block, of_mx = "^out.rowwise: expected block-scaled data", "^out.rowwise: expected MX data of shape"
    yield BLOCK, ValueError, of_block, result(BLOCK, rowwise={"block": (1, 64)}), BOTH
    yield BLOCK, ValueError, of_block, result(BLOCK, rowwise={"scale_layout": "compact"}), BOTH
    not_stored = "^out.columnwise: expected block-scaled data .*, not stored transposed"
    yield BLOCK, ValueError, not_stored, result(BLOCK), {**BOTH, **NOT_T}
    itself = r"^out\.columnwise\.data: expected out\.rowwise\.data itself"
    apart = [result(BLOCK, {**SQUARES, **NOT_T})["rowwise"] for _ in range(2)]
    yield BLOCK, ValueError, itself, dict(zip(("rowwise", "columnwise"), apart, strict=True)), {**BOTH,
        **SQUARES, **NOT_T}
    yield MX, ValueError, of_mx, result(MX, rowwise={"block": None}), BOTH
    yield MX, ValueError, of_mx, result(MX, rowwise={"block": (32, 1)}), BOTH
    yield MX, ValueError, of_mx, result(MX, rowwise={"shape": (4, 65)}), BOTH
    other_layout = "^out.rowwise: expected MX data of shape .* scales swizzled; got .* scales compact"
    yield MX, ValueError, other_layout, result(MX), {**BOTH, "scale_layout": "swizzled"}
    yield MX, ValueError, "^out.columnwise: expected MX data .*, stored transposed", result(MX), {**BOTH, **T}
    yield MX, ValueError, itself, result(MX), {**BOTH, **SQUARES_32}
    memory = np.empty(512, np.uint8).view(float8_e4m3fn)
    near = result(MX, rowwise={"data": memory[:256].reshape(4, 64)},
                  columnwise={"data": memory[255:511].reshape(4, 64)})
    yield MX, ValueError, "^out.columnwise.data: overlaps out.rowwise.data", near, BOTH


@pytest.mark.parametrize(("op", "error", "message", "made", "options"), list(bad_results()))
@pytest.mark.parametrize("executor", ["reference", "host"])
def test_results_are_refused(op, error, message, made, options, executor):
    if problem := testing.executor_problem(executor):
        pytest.skip(problem)
    out = Quantized(**made)
    poison(out)
    with testing.executor(executor), pytest.raises(error, match=message):
        op.function(X, out=out, **options)
    assert is_poison(out)


@pytest.mark.parametrize(("error", "message", "make"), [
    (TypeError, "^dtype: expected one of", lambda block, mx: block(dtype=float32)),
    (ValueError, "^profile: expected one of", lambda block, mx: block(profile="")),
    (ValueError, "^block: expected one of", lambda block, mx: block((2, 128))),
    (ValueError, "^scale_layout: expected one of", lambda block, mx: block(scale_layout="tiles")),
    (ValueError, "^eps: expected a finite", lambda block, mx: block(eps=-1.0)),
    (TypeError, "^pow2_scale: expected", lambda block, mx: block(pow2_scale=2)),
    (ValueError, "^scale, amax: belong to per-tensor", lambda block, mx: block().quantize(X, scale=1.0)),
    (ValueError, "^rowwise, columnwise: expected at least one",
     lambda block, mx: block().empty((4, 64), rowwise=False)),
    (ValueError, "^x: expected an array of two or three dimensions", lambda block, mx: block().empty((64,))),
    (TypeError, "^dtype: expected one of", lambda block, mx: mx(float32)),
    (ValueError, "^mode: expected one of", lambda block, mx: mx(mode="nearest")),
    (ValueError, "^profile: expected one of", lambda block, mx: mx(profile="")),
    (ValueError, "^block: expected one of", lambda block, mx: mx(block=(1, 16))),
    (ValueError, "^scale_layout: expected one of", lambda block, mx: mx(scale_layout="tiles")),
    (ValueError, "^scale, amax: belong to per-tensor", lambda block, mx: mx().quantize(X, scale=1.0)),
    (ValueError, "^scale, amax: belong to per-tensor", lambda block, mx: mx().quantize(X, amax=X[:1, 0])),
    (ValueError, "^rowwise, columnwise: expected at least one",
     lambda block, mx: mx().empty((4, 64), rowwise=False)),
    (ValueError, "^x: expected an array of two or three dimensions", lambda block, mx: mx().empty((64,))),
    (ValueError, "^buffers: expected a .* pair for each of",
     lambda block, mx: mx().empty((4, 64), buffers={})),
    (ValueError, r"^buffers\['rowwise'\]: expected a .* pair",
     lambda block, mx: mx().empty((4, 64), buffers={"rowwise": X})),
    (TypeError, "data: expected dtype float8_e4m3fn",
     lambda block, mx: mx().empty((4, 64), buffers={"rowwise": (X, E8M0)})),
    (ValueError, "scale_inv: expected a C-contiguous array of shape",
     lambda block, mx: mx().empty((4, 65), buffers={"rowwise": (np.zeros((4, 65), float8_e4m3fn), E8M0)})),
    (TypeError, "scale_inv: expected dtype float8_e8m0fnu",
     lambda block, mx: mx().empty((4, 64),
                               buffers={"rowwise": (np.zeros((4, 64), float8_e4m3fn),
                                                    np.ones(1, np.float32))})),
])
def test_recipes_refuse(error, message, make):
    with pytest.raises(error, match=message):
        make(BlockScaling, MXScaling)
