"""Compact scales 1×128, which the Hopper kernel's copy engine cannot read: large products convert them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from places import Place
from product_kernels import HOPPER, PORTABLE, use
from product_operands import scaled

import cupy_fp8 as fp8
from cupy_fp8 import Scaled, testing
from cupy_fp8.calls import remembered
from cupy_fp8.formats import float32
from cupy_fp8.ops.matmul import cublaslt, tiles, wgmma

CONVERTS = "convert_scales"
ROWS, K, N = 150, 272, 40
SPLITS = np.array([64, 0, 80])
COLUMNS = np.array([128, 0, 144])                       # groups begin at blocks of 128


@pytest.fixture(autouse=True)
def _every_product_is_large(device: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    use(HOPPER, device.run, monkeypatch)
    monkeypatch.setattr(cublaslt, "refusal", lambda *_: "not in this test")
    monkeypatch.setattr(tiles, "_FOR_A_CONVERSION", 1)
    monkeypatch.setattr(tiles, "_FOR_A_SCALE", 0)
    remembered.forget()


def grouped(device: Place, layout: Any) -> fp8.Grouped:
    x = device.array(np.random.default_rng(5).standard_normal((ROWS, K)).astype(float32))
    recipe = fp8.BlockScaling(scale_layout=layout)
    return fp8.group_quantize(x, device.array(SPLITS), recipe)


def permuted(device: Place, layout: Any) -> Scaled:
    """Return rows in the order of experts, with compact scales."""
    q = scaled((ROWS, K), "vector", 1).to_layout("compact")
    routing = fp8.route(device.array(np.arange(ROWS, dtype=np.int32)[:, None] % 3), num_experts=3)
    found = fp8.permute(device.run.array(q), routing, scale_layout="compact")
    assert found.scale_layout == "compact"
    return found.to_layout(layout)


def product(kind: str, layout: Any, device: Place, **options: Any) -> Any:
    def operand(shape: tuple[int, ...], scaling: str, seed: int) -> Any:
        return device.run.array(scaled(shape, scaling, seed).to_layout(layout))

    if kind.startswith("dense"):
        batch = (2,) if "batch" in kind else ()
        b = operand((*batch, N, K), "block" if "block" in kind else "vector", 2)
        return fp8.matmul_nt(operand((*batch, ROWS, K), "vector", 1), b, dtype=float32, **options)
    if kind.startswith("k"):
        pair = ("vector", "block") if "block" in kind else ("vector", "vector")
        return fp8.grouped_matmul_nt(operand((ROWS, K), pair[0], 1), operand((N, K), pair[1], 2),
                                     device.array(COLUMNS), group="k", dtype=float32, **options)
    a = {"Grouped": grouped, "permute": permuted}.get(
        kind, lambda device, layout: operand((ROWS, K), "vector", 1))(device, layout)
    b = operand((3, N, K), "vector" if kind == "m, vectors" else "block", 2)
    return fp8.grouped_matmul_nt(a, b, device.array(SPLITS), dtype=float32, **options)


def entries(launched: list[str]) -> list[str]:
    """Return what a product launches, without the launches that make operands."""
    return [entry for entry in launched if entry in (CONVERTS, HOPPER, PORTABLE)]


@pytest.mark.parametrize(("kind", "converted"), [
    ("m", 1), ("m, vectors", 2), ("permute", 1), ("Grouped", 1), ("dense", 2), ("dense, block", 1),
    ("dense, batch", 2), ("k", 2), ("k, block", 0)])
def test_bytes_are_those_of_gemm_ready_scales(kind, converted, device, launched):
    """Scales of 128×128 are unchanged; beside them in "k" the engine copies none."""
    want = device.run.numpy(product(kind, "gemm_ready", device))
    launched.clear()
    got = [device.run.numpy(product(kind, "compact", device)) for _ in range(2)]    # again: remembered
    assert entries(launched) == [*[CONVERTS] * converted, HOPPER] * 2
    for each in got:
        testing.assert_bytes_equal(each, want)


@pytest.mark.parametrize("kind", ["m", "Grouped", "dense"])
def test_out_in_a_graph(kind, device, launched):
    """Converted scales are in memory of `out`."""
    want = device.run.numpy(product(kind, "gemm_ready", device))
    a: Any = (grouped(device, "compact") if kind == "Grouped"
              else device.run.array(scaled((ROWS, K), "vector", 1).to_layout("compact")))
    shape, scaling = ((N, K), "vector") if kind == "dense" else ((3, N, K), "block")
    b, splits = device.run.array(scaled(shape, scaling, 2)), device.array(SPLITS)
    out = device.array(np.full(want.shape, 7, float32))
    device.cupy.cuda.Device(0).synchronize()                # the stream does not wait for the one before it
    with device.cupy.cuda.Stream(non_blocking=True) as stream:
        def call() -> Any:
            return (fp8.matmul_nt(a, b, dtype=float32, out=out) if kind == "dense"
                    else fp8.grouped_matmul_nt(a, b, splits, dtype=float32, out=out))
        call()
        launched.clear()
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        out.fill(7)
        graph.launch(stream)
        stream.synchronize()
    assert launched == [CONVERTS, HOPPER]
    testing.assert_bytes_equal(device.run.numpy(out), want)


@pytest.mark.parametrize(("less", "converted"), [(0, True), (1, False)])
def test_small_products_do_not_convert(less, converted, device, launched, monkeypatch):
    """From a number of multiplications per launch, and per scale, on."""
    monkeypatch.setattr(tiles, "_FOR_A_SCALE", 7)
    monkeypatch.setattr(tiles, "_FOR_A_CONVERSION", ROWS * N * K - 7 * ROWS * 3 + less)
    product("m", "compact", device)
    assert entries(launched) == [CONVERTS, HOPPER][not converted:]


def test_scales_that_can_be_copied_as_they_are(device, launched):
    """Compact ones with adjacent columns, such as those of transposed data."""
    a, b = (scaled(shape, scaling, seed) for shape, scaling, seed in (
        ((152, K), "vector", 1), ((3, N, K), "block", 2)))
    scales = device.array(np.ascontiguousarray(a.to_layout("compact").scale_inv.T)).T
    data = device.array(a.data)
    compact = Scaled(data, scales, a.shape, False, (1, 128), "compact")
    got = fp8.grouped_matmul_nt(compact, device.run.array(b), device.array(SPLITS))
    assert launched == [HOPPER]
    want = fp8.grouped_matmul_nt(device.run.array(a), device.run.array(b), device.array(SPLITS))
    testing.assert_bytes_equal(device.run.numpy(got), device.run.numpy(want))


def test_other_kernels_read_compact_scales(device, launched, monkeypatch):
    monkeypatch.setattr(wgmma, "runs", lambda _: False)
    product("m", "compact", device)
    assert entries(launched) == [PORTABLE]
