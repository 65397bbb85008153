"""convert_scales against the addresses of docs/layouts.md written as loops, the values of E8M0, and what
DeepGEMM computes."""

from __future__ import annotations

import doctest
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_data import COLUMN, ROW
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scale_arrays import addresses, as_held, filled, flat, powers, raw
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases.scales.convert import layouts_of
from cupy_fp8.formats import float8_e8m0fnu, float32, int32
from cupy_fp8.kernels import errors
from cupy_fp8.layouts import SCALE_DTYPES, round_up, scale_shape
from cupy_fp8.ops.scales import convert

SQUARE = (128, 128)


# ---- addresses and values ----
SHAPES = {ROW: [(1, 1), (5, 300), (130, 96), (33, 1100), (260, 33)], (1, 128): [(35, 700), (129, 4224)],
          COLUMN: [(1, 1), (300, 5), (1100, 33)], (128, 1): [(700, 131)],
          SQUARE: [(1, 1), (129, 700), (300, 1300)], (64, 32): [(66, 170)],
          (1, None): [(34, 300)], (None, 1): [(300, 34)]}


@pytest.mark.parametrize("block", SHAPES, ids=str)
def test_every_scale_is_where_it_belongs(block, run):
    source: Any
    target: Any
    for shape in SHAPES[block]:
        values = powers(shape, block)
        for source, target in product(layouts_of(block), repeat=2):
            for held, to in product(SCALE_DTYPES[source], SCALE_DTYPES[target]):
                s = filled(source, shape, block, held, {place: as_held(byte, held) for place,
                                                        byte in values.items()})
                got = fp8.convert_scales(run.array(s), source=source, target=target, shape=shape, block=block,
                                         dtype=to)
                assert got.dtype == to
                assert got.shape == scale_shape(shape, block, target)
                want = np.zeros_like(flat(got))
                for place, at in addresses(target, shape, block).items():
                    want[at] = as_held(values[place], to)
                np.testing.assert_array_equal(flat(got), want, f"{source} {held} -> {target} {to} of {shape}")

@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (1, None), SQUARE], ids=str)
def test_the_addresses_are_those_of_other_ops(block, transposed, run):
    """Quantisers write the layouts of this file, with zeros as padding. Values are unchanged."""
    x = run.array(cases.values("normal", (141, 700), float32))
    layouts = [name for name in ("compact", "gemm_ready", "deepgemm_sm90") if name in layouts_of(block)]
    made = [fp8.quantize_block(x, block=block, columnwise=True, transposed=transposed, scale_layout=layout)
            for layout in layouts]
    for layout, q in zip(layouts, made, strict=True):
        for s, compact in zip(q.parts.values(), made[0].parts.values(), strict=True):
            assert s.block is not None
            want, lines = np.zeros_like(flat(s.scale_inv)), raw(compact.scale_inv)
            shape = (700, 141) if block == SQUARE and s.transposed else (141, 700)  # the stored shape
            for place, at in addresses(layout, shape, s.block).items():
                want[at] = (lines.T if s.block[1] == 1 else lines)[place]
            np.testing.assert_array_equal(flat(s.scale_inv), want)
            for mine, plain in ((s, compact), (s.T, compact.T)):
                testing.assert_bytes_equal(mine.dequantize(), plain.dequantize())


@pytest.mark.parametrize("block", [ROW, COLUMN, SQUARE], ids=str)
def test_a_batch_is_its_matrices(block, run):
    shape = (2, 3, 70, 300)
    for source, target in product(layouts_of(block), repeat=2):
        s = cases.values("bits", scale_shape(shape, block, source), float8_e8m0fnu)
        held = SCALE_DTYPES[source][0]
        if held == float32:
            s = reference.astype(s, float32)
        elif held == int32:
            s = cases.values("bits", s.shape, float32).view(int32)
        options: dict[str, Any] = {"source": source, "target": target, "block": block}
        got = run.numpy(fp8.convert_scales(run.array(s), shape=shape, **options))
        for e in np.ndindex(2, 3):
            want = reference.convert_scales(s[e], shape=shape[2:], **options)
            testing.assert_bytes_equal(got[e], want)


@needs_host
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 300), st.integers(0, 4500), st.integers(0, 2),
       st.sampled_from([ROW, COLUMN, (1, 128), (128, 1), SQUARE, (64, 32)]),
       st.data(), st.integers(0, 2**32 - 1))
def test_there_and_back(m, k, batch, block, data, seed):
    """Any two layouts: the same bytes as the reference's, and the identity except in padding."""
    shape = (*((batch,) if batch else ()), *((m, k) if block[1] != 1 else (k, m)))
    via = data.draw(st.sampled_from(layouts_of(block)))
    compact = cases.values("bits", scale_shape(shape, block, "compact"), float8_e8m0fnu, seed)
    compact = data.draw(st.sampled_from([compact, reference.astype(compact, float32)]))
    there, back = ({"source": a, "target": b, "shape": shape, "block": block} for a, b in (("compact", via),
                                                                                           (via, "compact")))
    with testing.executor("host"):
        stored = fp8.convert_scales(compact, **there)
        testing.assert_bytes_equal(stored, reference.convert_scales(compact, **there))
        testing.assert_bytes_equal(fp8.convert_scales(stored, dtype=compact.dtype, **back), compact)


# ---- values ----
def test_every_byte_to_f32(run):
    s = np.arange(256, dtype=np.uint8).reshape(256, 1)
    got = run.numpy(fp8.convert_scales(run.array(s.view(float8_e8m0fnu)), source="compact", target="compact",
                                       shape=(256, 32), block=ROW,
                                       dtype=float32))
    want = [0x00400000, *(e << 23 for e in range(1, 255)), 0x7FC00000]
    assert bits(got).reshape(-1).tolist() == want
    assert got[0, 0] == 2.0**-127


EVERY_NAN = (0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF)
#: f32 bits without an E8M0 equivalent
WRONG = {"-0": 0x80000000, "inf": 0x7F800000, "-inf": 0xFF800000, "-1": 0xBF800000, "-2^-127": 0x80400000,
         "3": 0x40400000,
         "just above 1": 0x3F800001, "just below 1": 0x3F7FFFFF, "2^-128": 0x00200000, "2^-149": 1,
         "above 2^-127": 0x00400001,
         "below 2^-126": 0x007FFFFF, "FLT_MAX": 0x7F7FFFFF}  # fmt: skip


def column_of(words: Any) -> np.ndarray:
    """Return f32 scales of rows with one block each."""
    return np.array(list(words), np.uint32).view(np.float32).reshape(-1, 1)


def to_bytes(s: Any, target: Any = "compact", **options: Any) -> Any:
    dtype = SCALE_DTYPES[target][0]
    return fp8.convert_scales(s, source="compact", target=target, shape=(s.shape[0], 32), block=ROW,
                              dtype=dtype, **options)


def test_every_power_of_two_to_e8m0(run):
    s = np.ldexp(np.float32(1), np.arange(-127, 128)).reshape(-1, 1)
    assert raw(to_bytes(run.array(s), check=True)).reshape(-1).tolist() == list(range(255))
    assert raw(to_bytes(run.array(column_of([0])), check=True)).tolist() == [[0]]
    nan = column_of(EVERY_NAN)
    fp8.device_errors(clear=True)
    assert raw(to_bytes(run.array(nan), check=True)).reshape(-1).tolist() == [255] * len(EVERY_NAN)
    assert fp8.device_errors() == ()


def test_the_bits_stay_where_the_dtype_does(run):
    s = column_of((*WRONG.values(), *EVERY_NAN, 0x3F800000, 0x00400000))
    for target in ("compact", "gemm_ready"):
        got = fp8.convert_scales(run.array(s), source="compact", target=target, shape=(len(s), 128),
                                 block=(1, 128))
        assert got.dtype == float32
        assert bits(run.numpy(got)).reshape(-1)[:len(s)].tolist() == bits(s).reshape(-1).tolist()


@pytest.mark.parametrize("name", WRONG)
def test_no_e8m0_of_other_values(name, monkeypatch, run):
    """NumPy raises; a device writes NaN, and notes an error."""
    good = 2.0**4
    s = column_of([WRONG[name]] * 5)
    s[:3] = good
    if run.name != "cuda":
        out = cases.values("bits", (5, 1), float8_e8m0fnu)
        cases.poison(out)
        with pytest.raises(ValueError, match=r"^scale_inv: expected powers of two from 2\*\*-127 to "
                           r"2\*\*127, which E8M0 holds, got "
                                             + re.escape(f"{s[3, 0]}") + r" at \(3, 0\); "):
            to_bytes(s, out=out)
        assert (raw(out) == 0xAA).all()
        monkeypatch.setattr(convert, "_check_powers_of_two", lambda *_: None)
    for target in ("compact", "swizzled", "deepgemm_sm100"):
        fp8.device_errors(clear=True)
        w = to_bytes(run.array(s), target)
        assert flat(w)[[at[0] for at in addresses(target, (5, 32), ROW).values()]].tolist() == [131, 131, 131,
                                                                                                255, 255]
        found = fp8.device_errors(clear=True)
        assert found == (() if run.name == "reference"
                         else (errors.MESSAGES[errors.Fact.SCALE_NOT_POWER_OF_TWO],))


@pytest.mark.parametrize("block", [(1, 128), (128, 1), SQUARE], ids=str)
def test_what_is_wrong_in_the_padding_is_not(block, run):
    """And the index in the message is that in the array."""
    s = np.full(scale_shape((129, 141), block, "gemm_ready"), 3, np.float32)
    used = s[..., :2 if block == SQUARE else 129 if block == (1, 128) else 141]
    used[...] = 0.5
    options: dict[str, Any] = {"source": "gemm_ready", "target": "compact", "shape": (129, 141),
                               "block": block, "dtype": float8_e8m0fnu}
    fp8.device_errors(clear=True)
    assert (raw(fp8.convert_scales(run.array(s), check=True, **options)) == 126).all()
    assert fp8.device_errors() == ()
    used[1, 1] = -4
    with pytest.raises(ValueError, match=r"got -4\.0 at \(1, 1\)"):
        fp8.convert_scales(run.array(s), check=True, **options)


# ---- DeepGEMM's layouts ----
def deepgemm_sm90(s: np.ndarray) -> np.ndarray:
    """Return a column-major tensor [lines, blocks] whose columns are a multiple of 16 bytes."""
    lines, blocks = s.shape
    out = np.zeros((round_up(lines, 4) * blocks,), np.float32)
    view = np.lib.stride_tricks.as_strided(out, (lines, blocks), (4, 4 * round_up(lines, 4)))
    view[...] = s
    return view


def deepgemm_sm100(s: np.ndarray) -> np.ndarray:
    """Return a column-major tensor [lines, ceil(blocks / 4)] of int32: exponents as bytes, four of a row to a
    word, zeros where there is none."""
    lines, blocks = s.shape
    padded = np.zeros((round_up(lines, 4), round_up(blocks, 4)), np.uint8)
    padded[:lines, :blocks] = bits(s) >> 23
    return padded.view("<i4").copy(order="F")[:lines]


@pytest.mark.parametrize("shape", [(1, 1), (7, 300), (128, 512), (131, 4100)], ids=str)
def test_deepgemm_of_activations_and_weights(shape, run):
    x = cases.values("normal", shape, float32)
    q = fp8.quantize_block(x, profile="deepgemm", pow2_scale=True, scale_layout="compact")._any
    for layout, of in (("deepgemm_sm90", deepgemm_sm90), ("deepgemm_sm100", deepgemm_sm100)):
        want = of(q.scale_inv)
        s = run.array(q).to_layout(layout)
        got = s.scale_inv.swapaxes(-1, -2)[:shape[0]]  # as docs/layouts.md passes it on
        assert got.shape == want.shape
        assert got.strides == (4, 4 * round_up(shape[0], 4))
        np.testing.assert_array_equal(fp8.asnumpy(got), want)
    weights = fp8.quantize_block(x, block=SQUARE, profile="deepgemm", pow2_scale=True,
                                 scale_layout="compact")._any
    want = deepgemm_sm100(weights.scale_inv[np.arange(shape[0]) // 128])
    s = run.array(weights).to_layout("deepgemm_sm100")
    np.testing.assert_array_equal(fp8.asnumpy(s.scale_inv.swapaxes(-1, -2)[:shape[0]]), want)
    testing.assert_bytes_equal(s.to_layout("compact", dtype=float32).scale_inv, weights.scale_inv)


def test_only_the_first_line_of_a_block_is_read(run):
    """If lines of 2-D blocks should be equal but are not, every layout gets the same."""
    words = np.arange(1, 401, dtype=np.int32).reshape(2, 200)
    first = np.repeat(words[:, ::128], 128, axis=-1)[:, :199]
    options: dict[str, Any] = {"shape": (199, 700), "block": SQUARE}
    copy = run.numpy(fp8.convert_scales(run.array(words), source="deepgemm_sm100", target="deepgemm_sm100",
                                        **options))
    np.testing.assert_array_equal(copy[:, :199], first)
    assert (copy[:, 199:] == 0).all()
    compact = run.numpy(fp8.convert_scales(run.array(words), source="deepgemm_sm100", target="compact",
                                           **options))
    np.testing.assert_array_equal(bits(compact), np.ascontiguousarray(words[:, ::128].T).view(np.uint8)[:,
                                                                                                        :6])


def test_the_page_prints_what_it_shows():
    """docs/layouts.md."""
    failed, attempted = doctest.testfile(str(Path(__file__).resolve().parents[3] / "docs" / "layouts.md"),
                                         module_relative=False)
    assert (failed, attempted) == (0, 16)
