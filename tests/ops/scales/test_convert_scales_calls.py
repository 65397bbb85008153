"""Calls of convert_scales: arrays anywhere in memory, results in every layout, errors before a byte is
written; on a GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from block_data import COLUMN, ROW, result
from launches import note_launches
from scale_arrays import VIEWS, as_held, filled, guarded, powers
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import cases, diagnostics, io, kernels, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases.scales.convert import layouts_of
from cupy_fp8.formats import float8_e8m0fnu, float32
from cupy_fp8.layouts import SCALE_DTYPES, scale_dtype, scale_shape

plot: Any = fp8.plot              # tests use attributes of artists that their types lack

SQUARE = (128, 128)


# ---- how the arrays lie ----
COPIED = ("backwards",)


@needs_host
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_compact_views_are_read_where_they_are(view, columnwise, monkeypatch):
    launched = note_launches(monkeypatch)
    host = np.ldexp(np.float32(1), np.random.default_rng(0).integers(-127, 128, (60, 200)).astype(np.int32))
    s = VIEWS[view](host)
    *batch, rows, columns = s.shape
    shape, block = ((*batch, rows * 32, columns), COLUMN) if columnwise else ((*batch, rows, columns * 32),
                                                                              ROW)
    for target in ("gemm_ready", "deepgemm_sm100"):
        options: dict[str, Any] = {"source": "compact", "target": target, "shape": shape, "block": block}
        with testing.executor("host"):
            got = fp8.convert_scales(s, **options)
        testing.assert_bytes_equal(got, reference.convert_scales(np.ascontiguousarray(s), **options))
    assert ({one.values[0] for one in launched} == {s.__array_interface__["data"][0]}) == (view not in COPIED)


@pytest.mark.parametrize("view", VIEWS)
def test_any_view(view, run):
    host = cases.values("bits", (60, 200), float8_e8m0fnu)
    s = VIEWS[view](bits(run.array(host))).view(float8_e8m0fnu)
    *batch, rows, columns = s.shape
    for target in SCALE_DTYPES:
        shape = *batch, rows, columns * 32
        options: dict[str, Any] = {"source": "compact", "target": target, "shape": shape, "block": ROW}
        testing.assert_bytes_equal(run.numpy(fp8.convert_scales(s, **options)),
                                   reference.convert_scales(fp8.asnumpy(s), **options))


@needs_host
@pytest.mark.parametrize(("lines", "step"), [(3, 2**31 + 6), (97, 2**25 + 6), (130, 2**24 + 2**18)])
def test_offsets_of_more_than_32_bits(lines, step):
    """Scales gigabytes apart, along each stride, in memory that is never touched in between."""
    try:
        memory = np.zeros((lines - 1) * step + 40, np.uint8)
    except MemoryError:
        pytest.skip("needs 4 GB of address space")
    s = np.lib.stride_tricks.as_strided(memory, (lines, 40), (step, 1)).view(float8_e8m0fnu)
    bits(s)[...] = np.random.default_rng(0).integers(1, 256, s.shape)
    for turned, (shape, block) in ((s, ((lines, 1280), ROW)), (s.T, ((1280, lines), COLUMN))):
        for target in SCALE_DTYPES:
            options: dict[str, Any] = {"source": "compact", "target": target, "shape": shape, "block": block}
            with testing.executor("host"):
                got = fp8.convert_scales(turned, **options)
            testing.assert_bytes_equal(got, reference.convert_scales(np.ascontiguousarray(turned), **options))


@pytest.mark.full
@pytest.mark.parametrize("lead", [0, 4, 8, 1, 3])
@pytest.mark.parametrize("block", [(1, 128), (128, 1), SQUARE], ids=str)
def test_out_is_written_and_nothing_else(block, lead, run):
    """Results at any address that their elements, and their readers, allow."""
    for shape, (source, target) in product([(37, 1300), (132, 2048)], product(layouts_of(block), repeat=2)):
        for held, to in product(SCALE_DTYPES[source], SCALE_DTYPES[target]):
            if lead % held.itemsize or lead % to.itemsize or (lead and target in ("swizzled",
                                                                                  "deepgemm_sm100")):
                continue
            values = powers(shape, block, lead)
            s, source_intact = guarded(run, scale_shape(shape, block, source), held, lead)
            bits(s)[...] = bits(run.array(filled(source, shape, block, held, {p: as_held(v, held) for p,
                                                                              v in values.items()})))
            out, intact = guarded(run, scale_shape(shape, block, target), to, lead)
            options: dict[str, Any] = {"source": source, "target": target, "shape": shape, "block": block,
                                       "dtype": to}
            assert fp8.convert_scales(s, out=out, **options) is out
            testing.assert_bytes_equal(out, reference.convert_scales(fp8.asnumpy(s), **options))
            assert intact()
            assert source_intact()


# ---- results ----
KINDS = [(ROW, float8_e8m0fnu), (COLUMN, float8_e8m0fnu), ((32, 32), float8_e8m0fnu), ((1, 128), float32),
         ((128, 1), float32),
         (SQUARE, float32)]


def powers_of_two(s: Any) -> Any:
    """Return the same result with scales that E8M0 holds."""
    if s.scale_inv.dtype == float32:
        exponents = np.random.default_rng(1).integers(-20, 21, s.scale_inv.shape, np.int32)
        s.scale_inv[...] = np.ldexp(np.float32(1), exponents)
    return s


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("block", "scale"), KINDS, ids=str)
@pytest.mark.parametrize("shape", [(140, 270), (2, 70, 300), (0, 40), (3, 0, 40)], ids=str)
def test_results_in_every_layout(shape, block, scale, transposed, run, tmp_path):
    compact = powers_of_two(result(shape, block, "compact", transposed, scale=scale))
    values = compact.dequantize()
    for via in layouts_of(block):
        s = run.array(compact).to_layout(via)
        assert (s.shape, s.transposed, s.block, s.scale_layout) == (shape, transposed, block, via)
        assert s.scale_inv.shape == scale_shape(shape, block, via, transposed)
        assert s.scale_inv.dtype == scale_dtype(scale, via)
        testing.assert_bytes_equal(run.numpy(s.dequantize()), values)
        testing.assert_bytes_equal(run.numpy(s.T.dequantize()), np.ascontiguousarray(values.swapaxes(-1, -2)))
        assert s.to_layout(via) is s
        for then in layouts_of(block):
            testing.assert_bytes_equal(run.numpy(s.to_layout(then).to_layout("compact",
                                                                             dtype=scale).scale_inv),
                                                                             compact.scale_inv)
        if via != "compact":
            turned = s.T.to_layout("compact", dtype=scale).scale_inv
            testing.assert_bytes_equal(run.numpy(turned), np.ascontiguousarray(compact.T.scale_inv))
        io.save(tmp_path / "s.npz", s=s, t=s.T)
        for name, want in (("s", s), ("t", s.T)):
            loaded = io.load(tmp_path / "s.npz")[name]
            facts = loaded.shape, loaded.transposed, loaded.block, loaded.scale_layout
            assert facts == (want.shape, want.transposed, want.block, via)
            testing.assert_bytes_equal(loaded.scale_inv, want.scale_inv)


def test_words_are_looked_at_like_other_scales():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    x = cases.values("normal", (140, 700), float32)
    for block in ((1, 128), SQUARE):
        s = fp8.quantize_block(x, block=block)._any
        words = s.to_layout("deepgemm_sm100")
        assert "deepgemm_sm100 scales" in repr(words)
        assert words.nbytes == x.size + words.scale_inv.size * 4
        assert diagnostics.error(x, words) == diagnostics.error(x, s)
        assert repr(diagnostics.blocks(x, words)) == repr(diagnostics.blocks(x, s))
        np.testing.assert_array_equal(*(plot.scale_heat_map(a).images[0].get_array() for a in (words, s)))
    pyplot.close("all")


def test_dtype_of_compact_scales():
    s = result((64, 96), ROW)
    f32 = s.to_layout("compact", dtype=np.float32)
    assert f32.scale_inv.dtype == float32
    assert f32.to_layout("compact", dtype=float32) is f32
    testing.assert_bytes_equal(f32.to_layout("swizzled").to_layout("compact").scale_inv, s.scale_inv)
    words = fp8.quantize_block(np.ones((4, 512), np.float32))._any.to_layout("deepgemm_sm100")
    assert words.to_layout("compact").scale_inv.dtype == float8_e8m0fnu
    assert words.to_layout("gemm_ready").scale_inv.dtype == float32


def test_scales_that_fit_the_next_op():
    """Words become f32 again for an op that needs it."""
    q = fp8.quantize_block(cases.values("normal", (130, 260), float32), scale_layout="compact")
    words = q._any.to_layout("deepgemm_sm100")
    direct = fp8.scaling_aware_transpose(q)
    for s in (words, words.to_layout("compact", dtype=float32)):
        testing.assert_bytes_equal(fp8.scaling_aware_transpose(s), direct)


# ---- what is refused ----
GOOD: dict[str, Any] = {"source": "compact", "target": "gemm_ready", "shape": (9, 256), "block": (1, 128)}


@needs_host
@pytest.mark.parametrize("target", ["swizzled", "deepgemm_sm100"])
def test_who_reads_them_wants_them_aligned(target):
    with testing.executor("host") as run:
        out, intact = guarded(run, scale_shape((9, 256), (1, 128), target), SCALE_DTYPES[target][0], 8)
        cases.poison(out)
        with pytest.raises(ValueError, match=r"^out: address 0x.*8 is not a multiple of 16, as that of "
                           rf"{target} scales has to be"):
            fp8.convert_scales(np.ones((9, 2), np.float32), **{**GOOD, "target": target}, out=out)
    assert intact()
    assert (bits(out).reshape(-1).view(np.uint8) == 0xAA).all()


def test_new_scales_cannot_be_made_during_a_capture(place, monkeypatch):
    if not place.devices:
        pytest.skip("NumPy captures no graphs")
    made = fp8.quantize_block(np.ones((9, 256), np.float32))
    q, routing = place.run.array(made), place.run.array(fp8.route(np.zeros((9, 1), np.int32), num_experts=1))
    words = q.to_layout("deepgemm_sm100")
    monkeypatch.setattr(kernels, "capturing", lambda device: True)
    for name, layout, call in (("q", "deepgemm_sm100", words.dequantize),
                               ("x", "gemm_ready",
                                lambda: fp8.permute(q, routing, scale_layout="compact")),
                               ("x", "deepgemm_sm100", lambda: fp8.sort_chunks(words, [9], [0]))):
        with pytest.raises(ValueError, match=rf"^{name}: {layout} scales are made compact in new memory.*; "
                           rf"take {name}\.to_layout\('compact'\) before the capture$"):
            call()


# ---- on a GPU ----
