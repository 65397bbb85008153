"""Calls of cuBLASLt, recorded by a fake library: attributes, layouts, pointers, in every mode."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fake_cublaslt
import numpy as np
import pytest
from product_machine import K, M, Machine, N, machine

import cupy_fp8 as fp8
from cupy_fp8 import DeviceError, Scaled, reference
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16, float32
from cupy_fp8.ops.matmul import cublaslt, library
from cupy_fp8.reference.matmul.dense import magnitudes
from cupy_fp8.reference.matmul.tolerance import assert_within

#: cublasLtMatmulMatrixScale_t of each kind of scaling
MODES = {"tensor": 0, "row": 3, "vector": 4, "block": 5}
PAIRS = (("tensor", "tensor"), ("row", "row"), ("vector", "block"), ("block", "vector"), ("vector", "vector"))
TYPES: dict[Any, int] = {float32: 0, float16: 2, bfloat16: 14, float8_e4m3fn: 28, float8_e5m2: 29}


@pytest.fixture
def gpu_stand_in() -> Iterator[Machine]:
    with machine() as found:
        yield found


# ---- what the library is told ----
@pytest.mark.parametrize("to", [bfloat16, float16, float32], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_attribute(pair, to, gpu_stand_in):
    """D [M, N] = a · bᵀ is the library's D [N, M] = Aᵀ · B with A = b and B = a."""
    a, b = gpu_stand_in.both(pair, types=(float8_e4m3fn, float8_e5m2))
    out = gpu_stand_in.array(np.zeros((M, N), to))
    assert gpu_stand_in.checked(a, b, dtype=to, out=out) is out
    trial, product = gpu_stand_in.fake.products
    assert product._replace(stream=0) == trial._replace(stream=0)
    modes = {} if pair[0] == "tensor" else {31: MODES[pair[1]], 32: MODES[pair[0]]}
    assert product.description == {
        3: 1, 4: 0, 17: b.scale_inv.data.ptr, 18: a.scale_inv.data.ptr, **modes}
    assert product.a == (TYPES[float8_e5m2], K, N, K, 1, 0)
    assert product.b == (TYPES[float8_e4m3fn], K, M, K, 1, 0)
    assert product.c == product.d == (TYPES[to], N, M, N, 1, 0)
    assert product.pointers == {"A": b.data.data.ptr, "B": a.data.data.ptr, "C": out.data.ptr,
                                "D": out.data.ptr, "workspace": 0}
    assert (product.alpha, product.beta, product.algorithm, product.workspace_bytes) == (1, 0, 1, 0)
    assert gpu_stand_in.fake.preferences == [{1: 8 << 20, 5: 256, 6: 256, 7: 256, 8: 256}]


def test_descriptions_are_those_of_the_header():
    """Numbers, sizes of attributes, and the size of a result of the heuristic."""
    assert ctypes.sizeof(library.Heuristic) == 96
    assert library.Heuristic.workspace_bytes.offset == 64
    assert {number: ctypes.sizeof(kind) for number, kind in library.DESC.values()} == {
        number: fake_cublaslt.DESC_BYTES[number] for number, _ in library.DESC.values()}
    assert {number: ctypes.sizeof(kind) for number, kind in library.LAYOUT.values()} == (
        fake_cublaslt.LAYOUT_BYTES)
    assert {number: ctypes.sizeof(kind) for number, kind in library.PREFERENCE.values()} == (
        fake_cublaslt.PREFERENCE_BYTES)


@pytest.mark.parametrize(("to", "bias"), [(bfloat16, bfloat16), (float16, float16), (float32, bfloat16)],
                         ids=str)
def test_bias(to, bias, gpu_stand_in):
    a, b = gpu_stand_in.both(("tensor", "tensor"))
    given = gpu_stand_in.array(np.arange(N, dtype=np.float32).astype(bias))
    gpu_stand_in.checked(a, b, dtype=to, bias=given)
    description = gpu_stand_in.fake.products[-1].description
    assert (description[7], description[8], description[26]) == (4, given.data.ptr, TYPES[bias])
    gpu_stand_in.checked(a, b, dtype=to)  # the same call without a bias
    assert not {7, 8, 26} & gpu_stand_in.fake.products[-1].description.keys()


def test_fast_accumulation(gpu_stand_in):
    a, b = gpu_stand_in.both(("row", "row"))
    for fast in (True, False):
        gpu_stand_in.checked(a, b, fast_accum=fast)
        assert gpu_stand_in.fake.products[-1].description.get(25, 0) == fast


def test_accumulate(gpu_stand_in):
    """The trial of a new plan does not change the accumulated array."""
    a, b = gpu_stand_in.both(("vector", "vector"))
    into = gpu_stand_in.array(np.arange(M * N, dtype=np.float32).reshape(M, N))
    for _ in range(3):
        assert gpu_stand_in.checked(a, b, accumulate=into) is into
    trial, *calls = gpu_stand_in.fake.products
    assert trial.pointers["C"] == into.data.ptr
    assert trial.pointers["D"] != into.data.ptr
    assert [(p.beta, p.pointers["C"], p.pointers["D"]) for p in calls] == [
        (1, into.data.ptr, into.data.ptr)] * 3
    assert fp8.matmul_nt(a, b, accumulate=into, out=into) is into


def test_a_batch_with_one_scale_is_one_call(gpu_stand_in):
    a, b = gpu_stand_in.both(("tensor", "tensor"), batch=(3,))
    gpu_stand_in.checked(a, b)
    product = gpu_stand_in.fake.products[-1]
    assert (product.a.batch, product.b.batch, product.d.batch) == (3, 3, 3)
    assert (product.a.stride, product.b.stride, product.d.stride) == (N * K, M * K, M * N)
    assert len(gpu_stand_in.fake.products) == 2


@pytest.mark.parametrize("pair", PAIRS[1:], ids="-".join)
def test_a_batch_of_scales_is_a_call_for_each_matrix(pair, gpu_stand_in):
    a, b = gpu_stand_in.both(pair, batch=(3,))
    for _ in range(3):                                                  # also remembered calls
        gpu_stand_in.fake.products.clear()
        out = gpu_stand_in.checked(a, b)
        products = gpu_stand_in.fake.products[-3:]
        assert [p.pointers["A"] - b.data.data.ptr for p in products] == [0, N * K, 2 * N * K]
        assert [p.pointers["B"] - a.data.data.ptr for p in products] == [0, M * K, 2 * M * K]
        assert [p.pointers["D"] - out.data.ptr for p in products] == [0, 2 * M * N, 4 * M * N]
        for attribute, s in ((17, b), (18, a)):
            assert [p.description[attribute] - s.scale_inv.data.ptr for p in products] == [
                i * s.scale_inv.nbytes // 3 for i in range(3)]


# ---- what is brought to the library's layout ----
@pytest.mark.parametrize(("layout", "scale"), [
    ("compact", float32), ("deepgemm_sm90", float32), ("gemm_ready", float32), ("compact", float8_e8m0fnu)])
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_scales_of_other_layouts(layout, scale, batch, gpu_stand_in):
    """They are converted by a launch of the call, also during a capture."""
    a, b = gpu_stand_in.both(("vector", "vector"), layout=layout, scale=scale, batch=batch)
    out = gpu_stand_in.array(np.zeros((*batch, M, N), bfloat16))
    for _ in range(3):
        gpu_stand_in.checked(a, b)
    for _ in range(3):
        gpu_stand_in.checked(a, b, out=out)
    gpu_stand_in.checked(a.T.T, b)
    here = [gpu_stand_in.place.run.numpy(s) for s in (a, b)]
    with gpu_stand_in.place.cupy.cuda.Stream() as stream:
        stream.begin_capture()
        fp8.matmul_nt(a, b, out=out)
        graph = stream.end_capture()
    out.fill(0)
    a.data.view(np.uint8).fill(0x38)
    here[0].data.view(np.uint8).fill(0x38)
    graph.launch()
    assert_within(out, reference.matmul_nt(*here), magnitudes(*here))


def test_scales_of_columns_are_read_through_their_strides(gpu_stand_in):
    """The gradient of the weights, from compact scales, of which .T is only a view."""
    rng = np.random.default_rng(0)
    grad, x = (fp8.quantize_block(rng.standard_normal((144, columns)).astype(np.float32), columnwise=True,
                                  rowwise=False, scale_layout="compact").T for columns in (64, 80))
    assert not grad.scale_inv.flags.c_contiguous
    gpu_stand_in.checked(gpu_stand_in.on_gpu(grad._any), gpu_stand_in.on_gpu(x._any), dtype=float32)


def test_scales_at_any_address(gpu_stand_in):
    a, b = gpu_stand_in.both(("row", "row"))
    shifted = gpu_stand_in.array(np.zeros(a.scale_inv.size + 1, np.float32))[1:].reshape(*a.scale_inv.shape)
    shifted[...] = a.scale_inv
    gpu_stand_in.checked(Scaled(a.data, shifted, a.shape, False, a.block, a.scale_layout), b)


def test_mx_on_later_gpus():
    for layout in ("compact", "swizzled"):
        for batch in ((), (2,)):
            with machine(100) as gpu_stand_in:
                x, w = (fp8.quantize_mx(np.random.default_rng(i).standard_normal((*batch, n, K)).astype(
                    np.float32), scale_layout=layout)._any for i, n in enumerate((M, N)))
                for _ in range(2):
                    gpu_stand_in.checked(gpu_stand_in.on_gpu(x), gpu_stand_in.on_gpu(w))
                description = gpu_stand_in.fake.products[-1].description
                assert (description[31], description[32]) == (2, 2)


# ---- what the library does not take ----
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "K": (("tensor", "tensor"), {"k": 264}, "K in multiples of 16 and N of 8, got K = 264"),
    "N": (("tensor", "tensor"), {"n": 68}, "got K = 272, N = 68"),
    "M": (("vector", "block"), {"m": 66}, "M in multiples of 4 for 1×128 blocks of a, got M = 66"),
    "e5m2": (("row", "row"), {"types": (float8_e5m2, float8_e5m2)}, "float8_e5m2 × float8_e5m2"),
    "blocks": (("block", "block"), {}, "no product of scales per block and per block"),
    "mixed": (("tensor", "vector"), {}, "no product of scales per tensor and per vector")}


def refusal(gpu_stand_in: Machine, a: Scaled, b: Scaled, **options: Any) -> str | None:
    """Return why the library is not asked."""
    seen: list[str | None] = []
    refuses = cublaslt.refusal

    def noted(*call: Any) -> str | None:
        seen.append(refuses(*call))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublaslt, "refusal", noted)
        patch.setattr("cupy_fp8.ops.matmul.tiles.own_kernel_launches", lambda *call: [])
        fp8.matmul_nt(a, b, **options)
    assert (gpu_stand_in.fake.products == []) == (seen[0] is not None)
    return seen[0]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, gpu_stand_in):
    pair, options, message = REFUSED[name]
    assert message in str(refusal(gpu_stand_in, *gpu_stand_in.both(pair, **options)))


def test_refused_bias_and_addresses(gpu_stand_in):
    a, b = gpu_stand_in.both(("tensor", "tensor"))
    for to, bias in ((bfloat16, float32), (float16, bfloat16), (float32, float32)):
        found = refusal(gpu_stand_in, a, b, dtype=to, bias=gpu_stand_in.array(np.zeros(N, bias)))
        assert f"bias for a {to} result, got {bias}" in str(found)
    memory = gpu_stand_in.array(np.zeros(M * K + 1, np.uint8)).view(float8_e4m3fn)
    shifted = Scaled(memory[1:].reshape(M, K), a.scale_inv, a.shape)
    assert "addresses in multiples of 16, a.data is at" in str(refusal(gpu_stand_in, shifted, b))
    out = gpu_stand_in.array(np.zeros(M * N + 1, bfloat16))[1:].reshape(M, N)
    assert "the result is at" in str(refusal(gpu_stand_in, a, b, out=out))
    scale = gpu_stand_in.array(np.ones(2, np.float32))[1:]
    assert "b.scale_inv is at" in str(refusal(gpu_stand_in, a, Scaled(b.data, scale, b.shape)))


@pytest.mark.parametrize(("capability", "version", "pair", "message"), [
    (89, 130101, PAIRS[0], None), (80, 130101, PAIRS[0], "compute capability 8.9 or later, the GPU has 8.0"),
    (120, 130101, PAIRS[0], None), (100, 130101, PAIRS[2], "compute capability 9.0, the GPU has 10.0"),
    (89, 130101, PAIRS[1], "compute capability 9.0, the GPU has 8.9"), (90, 120901, PAIRS[1], None),
    (90, 120804, PAIRS[1], "needs cuBLASLt 12.9, a fake is 12.8"), (90, 120804, PAIRS[0], None)])
def test_refused_by_gpu_and_version(capability, version, pair, message):
    with machine(capability, version=version) as gpu_stand_in:
        found = refusal(gpu_stand_in, *gpu_stand_in.both(pair))
        assert found is message is None or message in str(found)


def test_without_the_library(gpu_stand_in, monkeypatch):
    monkeypatch.setattr(library, "found", lambda: "cuBLASLt is not installed: …")
    assert refusal(gpu_stand_in, *gpu_stand_in.both(PAIRS[0])) == "cuBLASLt is not installed: …"


def test_without_an_algorithm(gpu_stand_in):
    """The other back end is used, also during a capture, and the library is asked only once."""
    gpu_stand_in.fake.refuses = {1, 2, 3}
    a, b = gpu_stand_in.both(PAIRS[0])
    out = gpu_stand_in.array(np.zeros((M, N), bfloat16))
    own = mock.Mock(return_value=[])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupy_fp8.ops.matmul.tiles.own_kernel_launches", own)
        fp8.matmul_nt(a, b)
        fp8.matmul_nt(a, b)
        with gpu_stand_in.place.cupy.cuda.Stream() as stream:
            stream.begin_capture()
            fp8.matmul_nt(a, b, out=out)
            stream.end_capture()
    assert [p.algorithm for p in gpu_stand_in.fake.products] == [1, 2, 3]
    assert own.call_count >= 2


def test_mx_below_blackwell(gpu_stand_in):
    x = gpu_stand_in.on_gpu(fp8.quantize_mx(np.ones((16, 64), np.float32))._any)
    with pytest.raises(DeviceError, match=r"compute capability 10\.0 or later.*to_block\(\(1, 128\)"):
        fp8.matmul_nt(x, x)
    assert gpu_stand_in.fake.products == []


def test_a_failure_names_the_product(gpu_stand_in):
    a, b = gpu_stand_in.both(PAIRS[0])
    out = gpu_stand_in.array(np.zeros((M, N), bfloat16))
    fp8.matmul_nt(a, b, out=out)
    gpu_stand_in.fake.refuses = {1}
    with pytest.raises(DeviceError, match=r"cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED for .*m=68, n=72"):
        fp8.matmul_nt(a, b, out=out)
