"""Calls of quantize_block and quantize_mx: the choice of kernels, results at any address, recipes, and
refused options."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import pytest
from scale_arrays import guarded_like
from trees import leaves

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, MXScaling, Quantized, cases, reference, testing
from cupy_fp8.cases.base import DIRECTIONS
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16
from cupy_fp8.kernels import Launch


class Quantiser(NamedTuple):
    function: Callable[..., Quantized]
    definition: Callable[..., Quantized]
    recipe: type[Any]

    def __str__(self) -> str:
        return self.function.__name__


BLOCK = Quantiser(fp8.quantize_block, reference.quantize_block, BlockScaling)
MX = Quantiser(fp8.quantize_mx, reference.quantize_mx, MXScaling)
SQUARES, SQUARES_32 = {"block": (128, 128)}, {"block": (32, 32)}
COLUMN, BOTH, T, NOT_T = {"rowwise": False}, {"columnwise": True}, {"transposed": True}, {"transposed": False}


# ---- which kernel ----
@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record launches instead of running them: the entry, with ALONG_ROWS and ALONG_COLUMNS if it is made for
    wide accesses."""
    seen: list[str] = []

    def start(launch: Launch, *_: Any) -> None:
        d = dict(launch.variant.defines)
        square, divide = " square" * (d.get("SQUARE") == "1"), " divide" * (d.get("DIVIDE") == "1")
        wide = f" {d['ALONG_ROWS']}{d['ALONG_COLUMNS']}{square}" if d.get("ALIGNED") == "1" else ""
        seen.append(launch.variant.kernel.entry.rpartition("_")[2] + wide + divide)

    monkeypatch.setattr(Launch, "start", start)
    with testing.executor("host"):
        yield seen


@pytest.mark.parametrize(("op", "shape", "swapped", "options", "kernels"), [
    (BLOCK, (100, 128), False, {}, "rows"),
    (BLOCK, (100, 128), False, {"scale_layout": "compact", "profile": "vllm"}, "rows divide"),
    (BLOCK, (100, 128), False, {"block": (1, 64)}, "tile 10"),
    # transposed rows begin at odd multiples of 4
    (BLOCK, (100, 128), False, BOTH, "tile"),
    (BLOCK, (128, 100), True, COLUMN, "rows"),
    (BLOCK, (100, 128), False, {"block": (128, 1), **COLUMN, **NOT_T}, "rows"),
    (BLOCK, (100, 96), False, {}, "tile 10"),
    (BLOCK, (100, 96), False, {"block": (1, 32)}, "tile 10"),
    (BLOCK, (100, 96), False, {"profile": "vllm"}, "tile"),
    (BLOCK, (100, 96), False, {"profile": "vllm", "pow2_scale": True}, "tile 10"),
    (BLOCK, (96, 100), False, COLUMN, "tile 02"),
    # rare ways of storage
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
    (BLOCK, (96, 101), False, BOTH, "tile"),  # rows begin at odd addresses
    # transposed rows begin at odd multiples of 8
    (BLOCK, (100, 104), False, BOTH, "tile"),
    (BLOCK, (96, 100), False, {"block": (1, None)}, "vectors"),
    (BLOCK, (96, 100), False, {"block": (1, None), **BOTH}, "vectors, vectors"),
    (MX, (256, 128), False, {}, "rows"),
    (MX, (256, 128), False, {"scale_layout": "swizzled"}, "tile 10"),
    # its scales are stored in whole tiles
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
    # scales of neighbouring rows are adjacent
    (MX, (100, 96), True, {**COLUMN, **T}, "tile 10"),
    (MX, (96, 96), True, {**COLUMN, **T, "scale_layout": "swizzled"}, "tile 10"),
    (MX, (96, 128), True, {**COLUMN, **T, "scale_layout": "swizzled"}, "tile 10"),
    (MX, (100, 96), True, BOTH, "tile"),  # both are stored transposed
    (MX, (100, 96), True, {**BOTH, **T}, "tile 12"),
    (MX, (100, 96), True, {**BOTH, **SQUARES_32}, "tile 02"),
    (MX, (96, 101), False, BOTH, "tile"),  # rows begin at odd addresses
    # transposed rows begin at odd multiples of 8
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


# ---- results and recipes ----
@pytest.mark.parametrize(("op", "layout", "lead"), [
    *itertools.product([BLOCK], ("gemm_ready", "compact"), (4, 8, 12)),
    *itertools.product([MX], ("compact", "swizzled"), (1, 2, 4, 8))])
def test_results_at_any_address(op, layout, lead, run):
    """Every array of the result starts `lead` bytes into a buffer; the bytes around it are unchanged."""
    directions = DIRECTIONS[:3] if op is MX else DIRECTIONS[2:3]
    for shape, transposed, d in itertools.product([(128, 128), (300, 96), (64, 100), (33, 65)], (False, True),
                                                  directions):
        host, options = cases.values("normal", shape, bfloat16), {**d, "transposed": transposed,
                                                                  "scale_layout": layout}
        want = op.definition(host, **options)
        out, intact = guarded_like(run, want, lead)
        op.function(run.array(host), out=out, **options)
        testing.assert_bytes_equal(out, want)
        assert intact()


@pytest.mark.parametrize(("op", "recipe"), [
    (BLOCK, BlockScaling()),
    (BLOCK, BlockScaling((128, 128), float8_e5m2, eps=1e-3, pow2_scale=False, profile="deepgemm",
                         scale_layout="compact")),
    (BLOCK, BlockScaling((1, None), profile="vllm")),
    (BLOCK, BlockScaling(block=(128, 1), dtype="float8_e5m2", profile="sglang",
                         scale_layout="deepgemm_sm90")),
    (MX, MXScaling()),
    (MX, MXScaling(float8_e5m2, mode="floor", profile="torchao", block=(32, 32), scale_layout="swizzled")),
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
        pairs = {name: tuple(part) for name, part in empty.parts.items()}
        wrapped = recipe.empty(x.shape, buffers=pairs, **directions)
        assert list(map(id, leaves(wrapped))) == list(map(id, leaves(empty)))
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
             for part in q.parts.values()]
    assert facts == [((40, 70), block, "swizzled", False, float8_e4m3fn, float8_e8m0fnu, (128, 4))
                     for block in ((1, 32), (32, 1))]
    assert q.nbytes == 2 * (40 * 70 + 512)
