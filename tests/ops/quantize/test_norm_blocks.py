"""How norms deal rows and tiles to blocks of threads changes no byte. Large arrays have several rows for a
block; small ones have them here."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from test_norm import arrays, every_kind
from test_swiglu import BLOCKS, DELAYED, MX, normal
from tiers import where_kernels_run

import cupy_fp8 as fp8
from cupy_fp8 import reference
from cupy_fp8.calls import remembered
from cupy_fp8.formats import bfloat16
from cupy_fp8.kernels import Launch
from cupy_fp8.ops.quantize import norm_launches
from cupy_fp8.testing import assert_bytes_equal

#: Row-wise results whose scales end with the last row, or with padding.
ROW_WISE: list[Any] = [
    pytest.param((DELAYED, {"scale": 0.5}), id="delayed"), pytest.param((BLOCKS, {}), id="blocks"),
    pytest.param((MX, {}), id="mx"),
    pytest.param((fp8.BlockScaling((1, 32), scale_layout="compact"), {}), id="small blocks"),
    pytest.param((fp8.MXScaling(scale_layout="swizzled"), {}), id="swizzled")]


@pytest.fixture(params=[4, *(pytest.param(rows, marks=pytest.mark.full) for rows in (2, 16, 64))])
def rows_of_a_block(request, monkeypatch):
    small = norm_launches._Gpu.of(None)._replace(multiprocessors=1, enough_blocks=1)
    monkeypatch.setattr(norm_launches._Gpu, "of", lambda device: small)
    monkeypatch.setattr(norm_launches, "_MOST_ROWS", request.param)
    monkeypatch.setattr(norm_launches, "_ROWS_OF_Y", (request.param, request.param))
    remembered.forget()
    yield
    remembered.forget()


@where_kernels_run
@pytest.mark.usefixtures("rows_of_a_block")
@every_kind
@pytest.mark.parametrize("rows", [1, 67, *(pytest.param(rows, marks=pytest.mark.full) for rows in (5, 130))])
@pytest.mark.parametrize("recipe", ROW_WISE)
def test_rows_one_below_the_other(run, launched, recipe, kind, rows):
    how, options = recipe
    for columns in (264, 1032):
        grad, x, residual, weight, bias = arrays(run, (rows, columns), bfloat16)
        g, z, r, w, b = map(run.numpy, (grad, x, residual, weight, bias))
        for more in ({}, {"residual": r, "return_residual": True, "return_normed": True}, {"bias": b}):
            if "bias" in more and kind == "rms":
                continue
            given = {"kind": kind, "return_rstd": True, **options}
            compare(run, fp8.norm_quantize(x, weight, how, **given, **run.array_arguments((), more)[1]),
                    reference.norm_quantize(z, w, how, **given, **more))
        given = {"kind": kind, **options}
        compare(run, fp8.norm_backward_quantize(grad, x, weight, how, residual_grad=residual, **given),
                reference.norm_backward_quantize(g, z, w, how, residual_grad=r, **given))
    assert set(launched) <= {"rows", None}


@where_kernels_run
@pytest.mark.usefixtures("rows_of_a_block")
@every_kind
@pytest.mark.parametrize("rows", [1, 5, 67, 130])
def test_gradients_that_are_not_quantised(run, kind, rows):
    grad, x, residual, weight, _ = arrays(run, (rows, 264), bfloat16)
    g, z, r, w = map(run.numpy, (grad, x, residual, weight))
    rstd = normal((rows,), seed=9)
    compare(run, fp8.norm_backward_quantize(grad, x, weight, None, kind=kind, rstd=run.array(rstd)),
            reference.norm_backward_quantize(g, z, w, None, kind=kind, rstd=rstd))
    compare(run, fp8.norm_backward_quantize(grad, x, weight, None, kind=kind, residual_grad=residual),
            reference.norm_backward_quantize(g, z, w, None, kind=kind, residual_grad=r))


def compare(run: Any, found: Any, want: Any) -> None:
    for a, b in zip(found, want, strict=True):
        assert_bytes_equal(run.numpy(a), b)


@pytest.fixture
def launched(monkeypatch):
    """The path of each launch."""
    paths, start = [], Launch.start

    def noted(launch: Launch, *given: Any) -> None:
        paths.append(dict(launch.variant.defines).get("PATH"))
        start(launch, *given)

    monkeypatch.setattr(Launch, "start", noted)
    return paths


@where_kernels_run
@every_kind
@pytest.mark.parametrize("order", ["desc", "random"])
def test_a_block_that_waits_in_vain_finds_statistics(run, monkeypatch, launched, kind, order):
    """It looks once. Of two bands, and in a call after another one, whose statistics are those of before."""
    monkeypatch.setenv("CUPY_FP8_HOST_ORDER", order)
    monkeypatch.setattr(norm_launches, "_PATIENCE", 0)
    recipes: tuple[Any, ...] = (BLOCKS, MX)
    for seed, how in product((0, 1), recipes):
        grad, x = normal((150, 272), bfloat16, seed), normal((150, 272), bfloat16, seed + 2)
        weight, given = normal((272,), seed=seed + 4), {"kind": kind, "columnwise": True}
        g, there, w = map(run.array, (grad, x, weight))
        assert_bytes_equal(fp8.norm_quantize(there, w, how, **given),
                           reference.norm_quantize(x, weight, how, **given))
        for a, b in zip(fp8.norm_backward_quantize(g, there, w, how, **given),
                        reference.norm_backward_quantize(grad, x, weight, how, **given), strict=True):
            assert_bytes_equal(a, b)
    assert "plain" in launched
    assert "any" not in launched
