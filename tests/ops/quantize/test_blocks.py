"""Results of quantize_block: every profile against an oracle of exact fractions on the edges, all bfloat16
values in a block; squares, batches, memory orders."""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import oracle
import pytest
from block_data import parts

import cupy_fp8 as fp8
from cupy_fp8 import cases, reference, testing
from cupy_fp8.formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float16, float32
from cupy_fp8.options import BLOCK_PROFILES, MX_MODES, MX_PROFILES
from cupy_fp8.reference.quantize.blocks import scales_from_amax

FORMAT = {float8_e4m3fn: oracle.E4M3FN, float8_e5m2: oracle.E5M2}
MAXIMUM = {float8_e4m3fn: 448.0, float8_e5m2: 57344.0}
LARGEST = {float32: float(np.finfo(np.float32).max), float16: 65504.0,
           bfloat16: float(np.uint32(0x7F7F0000).view(np.float32))}
EPS = {"te": 0.0, "deepgemm": 1e-4, "tilekernels": 1e-4, "vllm": 1e-10, "sglang": 1e-10, "torchao": 1e-12}
OPTIONS = list(itertools.product(BLOCK_PROFILES, (False, True)))
options_parameter = pytest.mark.parametrize(("profile", "pow2"), OPTIONS)


def raw(a: Any) -> np.ndarray:
    return fp8.asnumpy(a).view(np.uint8)


def f32(a: Any) -> np.ndarray:
    return fp8.asnumpy(a)


# ---- a second definition: numbers as fractions, one rounding at a time ----
def fl(z: Fraction | float) -> float:
    """Round a value to f32, to nearest even, with subnormals kept."""
    if isinstance(z, float) and not math.isfinite(z):
        return z
    z = Fraction(z)
    if z == 0:
        return 0.0
    exponent = abs(z.numerator).bit_length() - z.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > abs(z)
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(z / unit) * unit
    return math.copysign(math.inf, rounded) if abs(rounded) >= Fraction(2) ** 128 else float(rounded)


def product(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b) or (math.isinf(a) and b == 0) or (math.isinf(b) and a == 0):
        return math.nan
    sign = math.copysign(1, a) * math.copysign(1, b)
    return math.copysign(math.inf if math.isinf(a) or math.isinf(b)
                         else fl(Fraction(abs(a)) * Fraction(abs(b))), sign)


def quotient(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b) or (math.isinf(a) and math.isinf(b)) or (a == 0 and b == 0):
        return math.nan
    sign = math.copysign(1, a) * math.copysign(1, b)
    if math.isinf(b) or a == 0:
        return math.copysign(0.0, sign)
    return math.copysign(math.inf if math.isinf(a) or b == 0 else fl(Fraction(abs(a)) / Fraction(abs(b))),
                         sign)


def power(v: float, up: bool) -> float:
    """Return the nearest power of two in one direction."""
    fraction, exponent = math.frexp(v)
    return math.ldexp(1.0, exponent if up and fraction != 0.5 else exponent - 1)


def scale_by_hand(amax: float, top: float, profile: str, pow2: bool, eps: float,
                  largest: float) -> tuple[float, float]:
    """Return (factor, scale_inv) by the tables of docs/numerics.md."""
    a = max(amax, fl(eps))
    if profile == "te":
        s = 1.0 if a in (0, math.inf) else quotient(top, a)
        s = largest if math.isinf(s) else s
        s = power(s, False) if pow2 else s
        return s, quotient(1.0, s)
    by_max = quotient(a, top)
    if pow2:
        if profile == "deepgemm":
            inv = min(max(power(by_max, True) if 0 < by_max < math.inf else by_max, 2.0**-126), 2.0**127)
        else:
            inv = by_max if math.isinf(by_max) else max(power(by_max, True) if by_max else 0.0, 2.0**-127)
        return quotient(1.0, inv), inv
    if profile == "torchao":
        s = quotient(top, a)
        return s, quotient(1.0, s)
    if profile == "sglang":
        return quotient(top, a), product(a, quotient(1.0, top))
    return quotient(top, a) if profile == "tilekernels" else quotient(1.0, by_max), by_max


@functools.cache
def edges_by_hand(source: Any, dtype: Any, profile: str, pow2: bool,
                  eps: float) -> list[tuple[np.ndarray, np.float32]]:
    return [block_by_hand(block, dtype, profile, pow2, eps, LARGEST[source]) for block in edge_blocks(source)]


def block_by_hand(block: np.ndarray, dtype: Any, profile: str, pow2: bool, eps: float,
                  largest: float) -> tuple[np.ndarray, np.float32]:
    x = [float(v) for v in block.astype(np.float32)]
    factor, inv = scale_by_hand(max([0.0, *(abs(v) for v in x if v == v)]), MAXIMUM[dtype], profile, pow2,
                                eps, largest)
    scaled = [quotient(v, inv) if profile == "vllm" and not pow2 else product(v, factor) for v in x]
    return FORMAT[dtype].encode(np.array(scaled), True), np.float32(inv)


def edge_blocks(source: Any) -> np.ndarray:
    """Return blocks of 32 elements: one large value, and difficult ones beside it."""
    tops = [0.0, -0.0, 2.0**-149, 2.0**-133, 2.0**-127, 2.0**-126, 1e-38, 1.2e-36, 1.3e-36, 1.4e-36,
            448 * 2.0**-127, 448 * 2.0**-126, 448 * 2.0**-128, 1e-30, 1e-12, 1.5e-10, 9.99e-5, 1e-4, 1.0,
            447.9, 448.0, 449.0, 480.0, 3.7, 57344.0, 61440.0, 65504.0, 1e30, 3.4e38,
            float(np.finfo(np.float32).max), math.inf, math.nan]
    x = np.zeros((2 * len(tops), 32), np.float32)
    with np.errstate(all="ignore"):
        for i, top in enumerate(tops):
            for sign, row in ((1, 2 * i), (-1, 2 * i + 1)):
                x[row, row % 32] = sign * top
                for k, part in enumerate((0.5, -0.3, 2.0**-9, 1.0, -(2.0**-130))):
                    x[row, (row + 3 + k) % 32] = np.float32(part) * (np.float32(top) if np.isfinite(top)
                                                                     else np.float32(1000))
                x[row, (row + 11) % 32] = -0.0
                if sign < 0:
                    x[row, (row + 13) % 32] = math.nan
        return reference.astype(x, source)


@pytest.mark.full
@options_parameter
@pytest.mark.parametrize("source", INPUT_DTYPES, ids=str)
def test_by_hand(source, profile, pow2, run):
    x = edge_blocks(source)
    for dtype, eps in itertools.product(FP8_DTYPES, (None, 0.0, 1e-3)):
        options = {"dtype": dtype, "profile": profile, "pow2_scale": pow2, "eps": eps,
                   "scale_layout": "compact"}
        row = fp8.quantize_block(run.array(x), block=(1, 32), **options)
        flipped = run.array(np.ascontiguousarray(x.T))
        column = fp8.quantize_block(flipped, block=(1, 32), rowwise=False, columnwise=True,
                                    **options).columnwise
        assert column is not None
        for i, (codes, inv) in enumerate(edges_by_hand(source, dtype, profile, pow2, EPS[profile]
                                                       if eps is None else eps)):
            for data, scale_inv in ((raw(row.data)[i], f32(row.scale_inv)[i, 0]),
                                    (raw(column.data)[i], f32(column.scale_inv)[0, i])):
                assert scale_inv.tobytes() == inv.tobytes(), (i, x[i].astype(np.float32).max(), scale_inv,
                                                              inv)
                np.testing.assert_array_equal(data, codes, err_msg=str((i, dtype, eps)))


@pytest.mark.full
@pytest.mark.parametrize("options", [
    *({"profile": profile, "pow2_scale": pow2, "block": (1, 32), "scale_layout": "compact"}
      for profile, pow2 in OPTIONS),
    *({"mode": mode, "profile": profile} for mode, profile in itertools.product(MX_MODES, MX_PROFILES))],
    ids=str)
def test_every_bfloat16_in_a_block(options, run):
    """The kernels for rows, and (with blocks of one element, down columns) those for tiles."""
    name = "quantize_mx" if "mode" in options else "quantize_block"
    patterns = oracle.patterns(oracle.BFLOAT16)
    at = np.arange(patterns.size), np.arange(patterns.size) % 32
    x = np.zeros((patterns.size, 32), bfloat16)
    x[at] = patterns
    for dtype in FP8_DTYPES:
        want = getattr(reference, name)(x, dtype=dtype, **options)
        testing.assert_bytes_equal(getattr(fp8, name)(run.array(x), dtype=dtype, **options), want)
        column = getattr(fp8, name)(run.array(patterns.reshape(1, -1)), rowwise=False, columnwise=True,
                                    dtype=dtype, **options).columnwise
        np.testing.assert_array_equal(raw(column.scale_inv).reshape(-1), raw(want.scale_inv).reshape(-1))
        np.testing.assert_array_equal(raw(column.data).reshape(-1), raw(want.data)[at])


@pytest.mark.full
@options_parameter
def test_scales_by_hand(profile, pow2):
    values = oracle.patterns(oracle.BFLOAT16).astype(np.float32)[::37]
    amax = np.where(np.isnan(values), 0, np.abs(values)).astype(np.float32)
    for dtype in FP8_DTYPES:
        factor, inv = scales_from_amax(amax, np.float32(MAXIMUM[dtype]), profile, np.float32(EPS[profile]),
                                       pow2, np.float32(LARGEST[bfloat16]))
        for i, a in enumerate(amax):
            hand = scale_by_hand(float(a), MAXIMUM[dtype], profile, pow2, EPS[profile], LARGEST[bfloat16])
            assert (float(factor[i]), float(inv[i])) == hand, a


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_quotients_next_to_ties(dtype, run):
    """vllm divides: elements whose quotients are the floats nearest to ties between two codes, with scales of
    any significand."""
    amax = np.random.default_rng(0).uniform(256, 512, 256).astype(np.float32)
    s = (amax / np.float32(MAXIMUM[dtype]))[:, None]
    ties = np.arange(1, 32, 2, dtype=np.float32) * np.float32(2.0**-10 if dtype == float8_e4m3fn
                                                              else 2.0**-17)
    # some are ties of subnormal codes, the others only of normal ones
    around = np.concatenate([ties, 16 * ties])
    x = (around * s).view(np.int32)[:, :, None] + np.arange(-1, 2, dtype=np.int32)
    x = np.concatenate([amax[:, None], x.reshape(len(amax), -1).view(np.float32)], axis=1)
    # any shape, warp tiles, and whole blocks
    for columns in (x.shape[1], 100, 128):
        given = np.pad(x, ((0, 0), (0, columns - x.shape[1])))
        for shown, columnwise in ((given, False), (np.ascontiguousarray(given.T), True)):
            options = {"dtype": dtype, "profile": "vllm", "columnwise": columnwise}
            testing.assert_bytes_equal(fp8.quantize_block(run.array(shown), **options),
                        reference.quantize_block(shown, **options))


def test_power_of_two_scales_are_the_formula():
    """With pow2_scale every profile's scale_inv is 2^ceil(log2(amax / max)) in the normal range."""
    amax = np.random.default_rng(0).integers(0x20000000, 0x7F000000, 4096, np.uint32).view(np.float32)
    exact = np.float32(448) * np.exp2(np.arange(-60, 60)).astype(np.float32)
    amax = np.concatenate([amax, exact, np.nextafter(exact, np.float32(np.inf)),
                           np.nextafter(exact, np.float32(0))])
    want = [Fraction(2) ** (math.frexp(float(a) / 448)[1] + 2) for a in amax]
    for i, a in enumerate(amax):
        while want[i] / 2 >= Fraction(float(a)) / 448:
            want[i] /= 2
    for profile in BLOCK_PROFILES:
        _, inv = scales_from_amax(amax, np.float32(448), profile, np.float32(0), True,
                                  np.float32(LARGEST[float32]))
        np.testing.assert_array_equal(inv, np.array([float(w) for w in want], np.float32))


def test_zero_and_flow():
    zeros = np.zeros((1, 128), np.float32)
    assert fp8.quantize_block(zeros).scale_inv[0, 0] == 1
    assert fp8.quantize_block(zeros, eps=1e-10).scale_inv[0, 0] == 2.0**-42
    assert fp8.quantize_block(zeros, profile="deepgemm", pow2_scale=True).scale_inv[0, 0] == 2.0**-22
    tiny = np.full((1, 128), 2.0**-130, np.float32)
    assert fp8.quantize_block(tiny).scale_inv[0, 0] == 2.0**-127                # a subnormal
    assert fp8.quantize_block(tiny).dequantize()[0, 0] == 2.0**-130


# ---- layouts ----
@pytest.mark.parametrize("shape", [(1, 1), (144, 264), (130, 257), (2, 133, 144)], ids=str)
def test_squares_are_the_same_in_both_directions(shape, run):
    q = fp8.quantize_block(run.array(cases.values("normal", shape, float32)), block=(128, 128),
                           columnwise=True, scale_layout="compact")
    row, column = parts(q)
    testing.assert_bytes_equal(np.ascontiguousarray(f32(column.scale_inv).swapaxes(-1, -2)),
                               f32(row.scale_inv))
    np.testing.assert_array_equal(raw(column.data).swapaxes(-1, -2), raw(row.data))
    both = fp8.quantize_block(run.array(cases.values("normal", shape, float32)), block=(128, 128),
                              columnwise=True, transposed=False)
    assert both.columnwise is both.rowwise


@pytest.mark.parametrize("profile", ["te", "deepgemm", "torchao"])
def test_an_eps_of_minus_zero_is_zero(profile, run):
    x = np.zeros((2, 256), float32)
    x[0, 3], x[0, 200] = 3, 1e-30
    for eps in (-0.0, 0.0):
        testing.assert_bytes_equal(fp8.quantize_block(run.array(x), profile=profile, eps=eps),
                                   reference.quantize_block(x, profile=profile, eps=0.0))


def test_a_block_names_the_rowwise_tile(run):
    """(128, 1) is (1, 128) of the transposed array."""
    host = cases.values("normal", (130, 300), float16)
    down = fp8.quantize_block(run.array(host), block=(128, 1), columnwise=True, scale_layout="compact")
    along = fp8.quantize_block(run.array(np.ascontiguousarray(host.T)), block=(1, 128), columnwise=True,
                               scale_layout="compact")
    row, column = parts(down)
    row_t, column_t = parts(along)
    assert (row.block, row.transposed, column.block, column.transposed) == ((128, 1), False, (1, 128), True)
    np.testing.assert_array_equal(raw(row.data), raw(row_t.data).T)
    np.testing.assert_array_equal(f32(row.scale_inv), f32(row_t.scale_inv).T)
    np.testing.assert_array_equal(raw(column.data), raw(column_t.data).T)
    np.testing.assert_array_equal(f32(column.scale_inv), f32(column_t.scale_inv).T)
