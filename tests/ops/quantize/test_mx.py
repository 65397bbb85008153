"""What quantize_mx writes: the table of docs/numerics.md and every edge by hand, an oracle in f64, all 2**32
float32 as an amax (on a GPU); layouts, blocks of 32 x 32, batches, memory orders, any shape."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracle
import pytest
from block_data import parts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.calls import validate
from cupy_fp8.cases.quantize.mx import MX_DIRECTIONS
from cupy_fp8.formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float32
from cupy_fp8.options import MX_MODES, MX_PROFILES, MX_SCALE_LAYOUTS
from cupy_fp8.reference.quantize.mx import scale_byte

FORMAT = {float8_e4m3fn: oracle.E4M3FN, float8_e5m2: oracle.E5M2}
EMAX = {float8_e4m3fn: 8, float8_e5m2: 15}
RECIPROCAL = {float8_e4m3fn: 0x3B124925, float8_e5m2: 0x37924925}       # of the maximum
FLT_MAX = float(np.finfo(np.float32).max)
SQUARE = (32, 32)

options_parameter = pytest.mark.parametrize(("mode", "profile"),
                                            list(itertools.product(MX_MODES, MX_PROFILES)))


def raw(a: Any) -> np.ndarray:
    return fp8.asnumpy(a).view(np.uint8)


def f32(word: int) -> np.float32:
    return np.uint32(word).view(np.float32)


# ---- the definition, a second time: exact in f64 ----
def byte_of(amax: np.ndarray, dtype: Any, mode: str, profile: str) -> np.ndarray:
    """e of amax in f32, NaN already dealt with. Products of two f32 are exact in f64, and so is everything
    about powers of two."""
    wide, emax = amax.astype(np.float64), EMAX[dtype]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if mode == "rceil":
            e = oracle.encode_e8m0((wide * np.float64(f32(RECIPROCAL[dtype]))).astype(np.float32)).astype(int)
        elif mode == "floor":
            product = (wide * 2.0**-emax).astype(np.float32).astype(np.float64)
            e = np.where(product < 2.0**-126, 0, np.frexp(product)[1] - 1 + 127)
        else:
            # This rounds to nearest in so many bits, with halves away from zero, and only in normal numbers.
            if mode == "even":
                mantissa = FORMAT[dtype].mantissa_bits
                unit = np.ldexp(1.0, np.maximum(np.frexp(wide)[1] - 1, -127 + (wide < 2.0**-126)) - mantissa)
                wide = np.where(np.isfinite(wide) & (wide > 0), np.floor(wide / unit + 0.5) * unit, wide)
            exponent = np.frexp(wide)[1] - 1
            field = np.where(wide < 2.0**-126, 0, exponent + 127)
            up = (mode == "ceil") & (np.where(wide < 2.0**-126, wide != 0, wide != np.ldexp(1.0, exponent)))
            e = np.maximum(field + up - emax, 0)
    return np.where(np.isfinite(amax), e, 254 if profile == "te" else 255).astype(np.uint8)


def codes_of(x: np.ndarray, e: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        inverse = np.where(e == 255, np.nan, np.ldexp(1.0, 127 - e.astype(int)))
        return FORMAT[dtype].encode((x.astype(np.float64) * inverse).astype(np.float32).astype(np.float64),
                                    True)


def quantized_by_hand(x: np.ndarray, dtype: Any, mode: str, profile: str) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scale bytes) of a matrix in row-wise blocks, block by block."""
    codes, scales = np.empty(x.shape, np.uint8), np.empty((x.shape[0], -(-x.shape[1] // 32)), np.uint8)
    wide = x.astype(np.float32)
    for j in range(scales.shape[1]):
        block = wide[:, 32 * j : 32 * j + 32]
        magnitude = np.where(np.isnan(block), np.float32(0 if profile == "te" else np.inf), np.abs(block))
        scales[:, j] = byte_of(magnitude.max(axis=1), dtype, mode, profile)
        codes[:, 32 * j : 32 * j + 32] = codes_of(block, scales[:, j : j + 1], dtype)
    return codes, scales


def interesting_amaxes() -> np.ndarray:
    """Amaxes around every power of two and what each mode does between two of them, subnormals, the largest
    numbers, and any bits."""
    mantissas = [0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x6FFFFF, 0x700000,
                 0x77FFFF, 0x780000, 0x7FFFFE, 0x7FFFFF]
    words = np.array([e << 23 | m for e in range(255) for m in mantissas], np.uint32)
    some = np.random.default_rng(5).integers(0, 0x7F800000, 40_000, np.uint32)
    return np.concatenate([words, some,
                           np.arange(0x04000000, 0x04000000 + 300, dtype=np.uint32)]).view(np.float32)


@options_parameter
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_reference_scale_byte(dtype, mode, profile):
    amax = np.append(interesting_amaxes(), np.float32(np.inf))
    np.testing.assert_array_equal(scale_byte(amax, dtype, mode, profile), byte_of(amax, dtype, mode, profile))


@options_parameter
@pytest.mark.parametrize("source", INPUT_DTYPES, ids=str)
def test_by_hand(source, mode, profile, run):
    for kind, dtype in itertools.product(("bits", "edges", "normal"), FP8_DTYPES):
        x = cases.values(kind, (34, 75), source)
        codes, scales = quantized_by_hand(x, dtype, mode, profile)
        codes_t, scales_t = quantized_by_hand(x.T, dtype, mode, profile)
        q = fp8.quantize_mx(run.array(x), dtype=dtype, mode=mode, profile=profile, columnwise=True)
        np.testing.assert_array_equal(raw(q.scale_inv), scales)
        np.testing.assert_array_equal(raw(q.data), codes)
        assert q.columnwise is not None
        np.testing.assert_array_equal(raw(q.columnwise.scale_inv), scales_t.T)
        np.testing.assert_array_equal(raw(q.columnwise.data), codes_t.T)


# ---- single values ----
def single(value: Any, run: testing.Executor, source: Any = float32, **options: Any) -> list[tuple[int, int]]:
    """(e, byte) of a value in an otherwise zero block: in the kernels for rows and for tiles, along rows and
    down columns."""
    found = []
    for shape, at in (((2, 64), (1, 40)), ((3, 33), (2, 7)), ((64, 4), (35, 2)), ((37, 5), (36, 4))):
        x = np.zeros(shape, source)
        x[at] = value
        q = fp8.quantize_mx(run.array(x), columnwise=True, **options)
        assert q.columnwise is not None
        for part, block in ((q.rowwise, (at[0], at[1] // 32)), (q.columnwise, (at[0] // 32, at[1]))):
            assert part is not None
            found.append((int(raw(part.scale_inv)[block]), int(raw(part.data)[at])))
            zeros = raw(part.data).copy()
            zeros[at] = 0
            nan_block = raw(part.scale_inv)[block] == 255
            assert (np.count_nonzero(zeros) == 0) != nan_block
            scales = raw(part.scale_inv).copy()
            scales[block] = 0
            assert not scales.any()
    return sorted(set(found))


@pytest.mark.parametrize(("value", "rceil", "floor"), [
    (448.0, (127, 0x7E), (127, 0x7E)),
    (449.0, (128, 0x76), (127, 0x7E)),
    (480.0, (128, 0x77), (127, 0x7E)),
    (FLT_MAX, (247, 0x78), (246, 0x7E)),
    (2.0**-126, (0, 0x40), (0, 0x40)),
    (2.0**-133, (0, 0x08), (0, 0x08)),
    (2.0**-149, (0, 0x00), (0, 0x00)),
])
@pytest.mark.parametrize("profile", MX_PROFILES)
def test_table_of_numerics(value, rceil, floor, profile, run):
    for mode, want in (("rceil", rceil), ("floor", floor)):
        assert single(value, run, mode=mode, profile=profile) == [want]
        assert single(-value, run, mode=mode, profile=profile) == [(want[0], want[1] | 0x80)]


@pytest.mark.parametrize(("word", "dtype", "mode", "e"), [
    (0x04600001, float8_e4m3fn, "rceil", 0),            # Exact arithmetic gives 1.
    (0x04600002, float8_e4m3fn, "rceil", 1),
    (0x04600001, float8_e4m3fn, "ceil", 1),
    (0x047FFFFF, float8_e4m3fn, "floor", 1),            # The product rounds up into the normal numbers.
    (0x047FFFFE, float8_e4m3fn, "floor", 0),
    (0x07FFFFFF, float8_e5m2, "floor", 1),
    (0x047FFFFF, float8_e4m3fn, "even", 1),
    (0x0477FFFF, float8_e4m3fn, "even", 0),  # It is below the tie of its last mantissa bit, or on it.
    (0x04780000, float8_e4m3fn, "even", 1),
    (0x07EFFFFF, float8_e5m2, "even", 0),
    (0x07F00000, float8_e5m2, "even", 1),
    (0x7F7FFFFF, float8_e4m3fn, "even", 247),
    (0x7F7FFFFF, float8_e4m3fn, "ceil", 247),
    (0x7F7FFFFF, float8_e5m2, "rceil", 240),
    (0x7F000000, float8_e5m2, "ceil", 239),
])
def test_edges_of_the_modes(word, dtype, mode, e, run):
    assert {found for found, _ in single(f32(word), run, dtype=dtype, mode=mode)} == {e}


@pytest.mark.parametrize("mode", MX_MODES)
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_nan_and_inf(dtype, mode, run):
    top = 0x7E if dtype == float8_e4m3fn else 0x7B
    for source in INPUT_DTYPES:
        for sign, negative in ((1.0, 0), (-1.0, 0x80)):
            inf, nan = source.type(sign * np.inf), bits(np.array([sign * np.nan], source))
            # This NaN has another payload.
            nan = (nan | 0x12 if source != bfloat16 else nan).view(source)[0]
            assert single(inf, run, source, dtype=dtype, mode=mode) == [(254, top | negative)]
            # The rest of the block stays 0.
            assert single(nan, run, source, dtype=dtype, mode=mode) == [(0, 0x7F)]
            for value in (inf, nan):
                assert single(value, run, source, dtype=dtype, mode=mode, profile="torchao") == [(255, 0x7F)]


def test_what_is_beside_nan_and_inf(run):
    x = np.zeros((1, 96), np.float32)
    x[0, [0, 1, 2, 31]] = np.nan, 448, -2.0**-9, -0.0
    x[0, [32, 33, 34, 63]] = np.inf, FLT_MAX, -2.0**120, 5
    x[0, [64, 65]] = 1, -0.0
    for q in (fp8.quantize_mx(run.array(x)), fp8.quantize_mx(run.array(x.T.copy()), rowwise=False,
                                                             columnwise=True)):
        part = q._any
        codes = raw(part.data).reshape(-1)
        assert raw(part.scale_inv).reshape(-1).tolist() == [127, 254, 119]
        assert codes[[0, 1, 2, 3, 31]].tolist() == [0x7F, 0x7E, 0x81, 0, 0x80]
        # x * 2**-127 is 2, -2**-7, and 0.
        assert codes[[32, 33, 34, 63]].tolist() == [0x7E, 0x40, 0x84, 0]
        assert codes[[64, 65]].tolist() == [0x78, 0x80]
    for q in (fp8.quantize_mx(run.array(x), profile="torchao"),
              fp8.quantize_mx(run.array(x.T.copy()), rowwise=False, columnwise=True, profile="torchao")):
        part = q._any
        assert raw(part.scale_inv).reshape(-1).tolist() == [255, 255, 119]
        assert set(raw(part.data).reshape(-1)[:64].tolist()) == {0x7F}


# ---- every amax ----
def first_amaxes(dtype: Any, mode: str) -> np.ndarray:
    """For every byte the bits of the smallest finite amax whose byte, by the reference, is not below it;
    0x7F800000 where there is none. All modes are monotonic."""
    low: np.ndarray = np.zeros(256, np.uint32)
    high: np.ndarray = np.full(256, 0x7F800000, np.uint32)
    wanted = np.arange(256)
    while (low < high).any():
        middle = low + (high - low >> np.uint32(1))
        enough = (scale_byte(middle.view(np.float32), dtype, mode, "te") >= wanted) & (middle < 0x7F800000)
        low, high = np.where(enough | (low == high), low, middle + np.uint32(1)), np.where(enough, middle,
            high)
    return low


def expected_bytes(words: Any, first: Any, profile: str, xp: Any) -> Any:
    """Return the scale bytes of blocks of one element with these bits."""
    magnitude = words & xp.uint32(0x7FFFFFFF)
    e = xp.searchsorted(first, magnitude, side="right") - 1
    if profile == "torchao":
        return xp.where(magnitude >= 0x7F800000, 255, e).astype(np.uint8)
    return xp.where(magnitude == 0x7F800000, 254, xp.where(magnitude > 0x7F800000, 0, e)).astype(np.uint8)


def check_amaxes(run: testing.Executor, start: int, count: int, dtype: Any, mode: Any, profile: Any,
                 out: Any = None) -> Any:
    """Return the scale bytes of `count` f32 values by their bits, each a block of its own."""
    xp = backend.cupy() if run.name == "cuda" else np
    words = xp.arange(count, dtype=xp.uint32) + xp.uint32(start)
    out = fp8.quantize_mx(words.view(xp.float32).reshape(1, -1), dtype=dtype, mode=mode, profile=profile,
                          rowwise=False, columnwise=True, out=out)
    want = expected_bytes(words, xp.asarray(first_amaxes(dtype, mode)), profile, xp)
    wrong = bits(out.columnwise.scale_inv)[0] != want
    assert not bool(wrong.any()), hex(start + int(wrong.argmax()))
    return out


@pytest.mark.parametrize("mode", MX_MODES)
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_expected_bytes(dtype, mode):
    """What the test of every amax compares with, against the reference itself."""
    words = np.concatenate([(first_amaxes(dtype, mode)[:, None]
                             + np.arange(-2, 3)).ravel().clip(0).astype(np.uint32),
                            interesting_amaxes().view(np.uint32),
                            np.arange(0x7F7FFFF0, 0x7F800010, dtype=np.uint32)])
    for profile, sign in itertools.product(MX_PROFILES, (0, 0x80000000)):
        with np.errstate(invalid="ignore"):
            want = reference.quantize_mx((words | np.uint32(sign)).view(np.float32).reshape(-1, 1),
                                         dtype=dtype, mode=mode, profile=profile)
        np.testing.assert_array_equal(expected_bytes(words, first_amaxes(dtype, mode), profile, np),
                                      raw(want.scale_inv)[:, 0])


@options_parameter
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_some_amaxes(dtype, mode, profile, run):
    for start in (0, 0x003FFC00, 0x045FFC00, 0x047FFC00, 0x07EFFC00, 0x07FFFC00, 0x43DFFC00, 0x7F7FFC00,
                  0xFF7FFC00, 0x805FFC00):
        check_amaxes(run, start, 2048, dtype, mode, profile)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("mode", MX_MODES)
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_every_amax(dtype, mode):
    """All 2**32 float32 values."""
    count = 1 << 28
    with testing.executor("cuda") as run:
        for profile in MX_PROFILES:
            out = None
            for start in range(0, 1 << 32, count):
                if out is not None:
                    for a in out._any:
                        cases.poison(a)
                out = check_amaxes(run, start, count, dtype, mode, profile, out)


# ---- layouts, blocks of 32 x 32, memory orders ----
@pytest.mark.parametrize("shape", [(1, 1), (64, 96), (70, 101), (2, 33, 65)], ids=str)
@pytest.mark.parametrize("mode", MX_MODES)
def test_square_blocks(shape, mode, run):
    x = cases.values("normal", shape, float32)
    padded = np.zeros((*shape[:-2], *(-(-extent // 32) * 32 for extent in shape[-2:])), np.float32)
    padded[..., : shape[-2], : shape[-1]] = np.abs(x)
    tiles = padded.reshape(*padded.shape[:-2], padded.shape[-2] // 32, 32, padded.shape[-1] // 32,
                           32).max(axis=(-3, -1))
    e = byte_of(tiles, float8_e4m3fn, mode, "te")
    everywhere = e.repeat(32, axis=-2).repeat(32, axis=-1)[..., : shape[-2], : shape[-1]]
    codes = codes_of(x, everywhere, float8_e4m3fn)
    for transposed in (False, True):
        q = fp8.quantize_mx(run.array(x), columnwise=True, transposed=transposed, block=SQUARE, mode=mode)
        row, column = parts(q)
        assert (row.block, column.block) == ((1, 32), (32, 1))
        assert (row.data is column.data) != transposed
        np.testing.assert_array_equal(raw(row.data), codes)
        np.testing.assert_array_equal(raw(column.data), codes.swapaxes(-1, -2) if transposed else codes)
        np.testing.assert_array_equal(raw(row.scale_inv), everywhere[..., ::32])
        np.testing.assert_array_equal(raw(column.scale_inv), everywhere[..., ::32, :])


def test_a_batch_is_matrices_by_themselves(run):
    x = cases.values("edges", (3, 50, 70), bfloat16)
    for layout, transposed in itertools.product(MX_SCALE_LAYOUTS, (False, True)):
        options: dict[str, Any] = {"columnwise": True, "transposed": transposed, "scale_layout": layout}
        q = fp8.quantize_mx(run.array(x), **options)
        for e in range(3):
            one = fp8.quantize_mx(run.array(x[e].copy()), **options)
            for whole, single_part in zip(parts(q), parts(one), strict=True):
                for a, b in zip(whole, single_part, strict=True):
                    testing.assert_bytes_equal(a[e], b)


@pytest.mark.parametrize("directions", MX_DIRECTIONS, ids=lambda d: "-".join(k for k, on in d.items() if on))
@pytest.mark.parametrize("shape", [(64, 96), (45, 77), (3, 40, 64)], ids=str)
def test_swapped_axes_are_not_copied(shape, directions, run, monkeypatch):
    """Weights that lie in memory as […, K, M] give the same bytes as a copy, and no copy is made."""
    host = cases.values("normal", shape, bfloat16)
    memory = run.array(np.ascontiguousarray(host.swapaxes(-1, -2)))
    x = memory.swapaxes(-1, -2)
    assert not x.flags.c_contiguous

    def refuse(a: Any) -> Any:
        raise AssertionError("copied")

    monkeypatch.setattr(validate, "contiguous", refuse)
    for block in ((1, 32), SQUARE):
        testing.assert_bytes_equal(fp8.quantize_mx(x, block=block, **directions),
                    reference.quantize_mx(host, block=block, **directions))
    with pytest.raises(AssertionError, match="copied"):
        fp8.quantize_mx(x[..., ::2], **directions)


@needs_host
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 150), min_size=2, max_size=2), st.sampled_from([(), (1,), (2,)]),
       st.sampled_from(INPUT_DTYPES), st.sampled_from(["contiguous", "offset", "strided"]),
       st.sampled_from(MX_DIRECTIONS), st.sampled_from([(1, 32), SQUARE]), st.sampled_from(MX_SCALE_LAYOUTS),
       st.integers(0, 100))
def test_any_shape(matrix, batch, dtype, layout, directions, block, scale_layout, seed):
    case = cases.Case("quantize_mx", dtype, (*batch, *matrix), "bits", layout)
    x = cases.source(case, seed)
    options = {**directions, "block": block, "scale_layout": scale_layout, "mode": MX_MODES[seed % 4],
               "profile": MX_PROFILES[seed % 2]}
    want = reference.quantize_mx(x, **options)
    with testing.executor("host"):
        testing.assert_bytes_equal(fp8.quantize_mx(x, **options), want)
