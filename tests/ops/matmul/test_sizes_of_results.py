"""Results whose layout depends on sizes have a copy of these, and products of groups refuse other ones: on
the host by value, on the device by a note in its sticky word."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import testing
from cupy_fp8.formats import float32
from cupy_fp8.kernels import Launch, errors
from cupy_fp8.ops.matmul import align_rows, wgmma
from cupy_fp8.results import Quantized, Scaled

OTHER = errors.MESSAGES[errors.Fact.SPLIT_OTHER]
ROWS, K, N = 160, 144, 32
SIZES, OTHERS = np.array([64, 0, 96]), np.array([60, 4, 96])


def values(columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, columns)).astype(float32)


def rows_of(run: Any, columns: int = K, seed: int = 0) -> Quantized:
    with testing.executor("reference"):
        q = fp8.quantize_block(values(columns, seed), pow2_scale=True, scale_layout="compact")
    made: Quantized = run.array(q)
    return made


def aware(run: Any, sizes: Any, columns: int = K, seed: int = 0) -> Quantized:
    return fp8.scaling_aware_transpose(rows_of(run, columns, seed), splits=run.array(sizes))


def grouped(run: Any, sizes: Any, columns: int = K, seed: int = 0) -> fp8.Grouped:
    return fp8.group_quantize(run.array(values(columns, seed)), run.array(sizes), fp8.BlockScaling(),
                              columnwise=True)


def weights(run: Any) -> Scaled:
    with testing.executor("reference"):
        w = fp8.quantize_block(np.ones((len(SIZES), N, K), float32), block=(128, 128)).rowwise
    made: Scaled = run.array(w)
    return made


MAKERS = {"aware": aware, "grouped": grouped}
#: (a, b, group): what makes the operands, each from sizes; None: one that is laid out by none.
_Maker = Callable[..., Any]
PRODUCTS: list[tuple[_Maker, _Maker | None, str]] = [
    (aware, None, "m"), (grouped, None, "m"), (aware, aware, "k"), (aware, grouped, "k"),
    (grouped, aware, "k"), (grouped, grouped, "k")]
IDS = [f"{group}-{a.__name__}-{b.__name__ if b else 'weights'}" for a, b, group in PRODUCTS]
every_product = pytest.mark.parametrize(("a", "b", "group"), PRODUCTS, ids=IDS)


def product(run: Any, a: _Maker, b: _Maker | None, group: Any, sizes: np.ndarray, of_b: np.ndarray,
            splits: Any, **options: Any) -> Any:
    right = weights(run) if b is None else b(run, of_b, N, 1)
    return fp8.grouped_matmul_nt(a(run, sizes), right, None if splits is None else run.array(splits),
                                 group=group, dtype=float32, **options)


# ---- copies ----
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_results_have_copies_of_their_sizes(make, dtype, run):
    sizes = run.array(SIZES.astype(dtype))                  # astype copies, so that these may change
    made = make(run, sizes)
    made = made.columnwise if make is aware else made
    sizes[...] = 7
    assert fp8.asnumpy(made.splits).tolist() == SIZES.tolist()
    assert made.splits.dtype == dtype
    with pytest.raises(ValueError, match=r"^splits: expected \d groups, as a has, got 2$"):
        fp8.grouped_matmul_nt(made, made, [64, 96], group="k")


@pytest.mark.parametrize("recipe", [fp8.BlockScaling(), fp8.MXScaling(), fp8.BlockScaling((1, None)),
                                    fp8.CurrentScaling()], ids=str)
def test_given_sizes_and_offsets_may_change(recipe, run):
    sizes, offsets = run.array(SIZES.copy()), run.array(np.array([0, 64, 64, 160]) * K)
    g = fp8.group_quantize(run.array(values(K)), sizes, recipe, columnwise=True, offsets=offsets)
    want = fp8.asnumpy(g.dequantize())
    sizes[...], offsets[...] = 1, 0
    testing.assert_bytes_equal(fp8.asnumpy(g.dequantize()), want)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_out_gets_the_sizes_of_its_call(make, run):
    x, q = run.array(values(K)), rows_of(run)

    def called(sizes: np.ndarray, out: Any = None) -> Any:
        if make is aware:
            return fp8.scaling_aware_transpose(q, splits=run.array(sizes), out=out)
        return fp8.group_quantize(x, run.array(sizes), fp8.BlockScaling(), columnwise=True, out=out)

    out = called(OTHERS)
    assert called(SIZES, out) is out
    testing.assert_bytes_equal(run.numpy(out), run.numpy(called(SIZES)))


def test_the_parts_of_an_out_have_one_array_of_sizes(run):
    q = rows_of(run)
    made: Any = fp8.scaling_aware_transpose(q, splits=run.array(SIZES))
    without = fp8.scaling_aware_transpose(q)
    row = dataclasses.replace(made.rowwise, splits=made.rowwise.splits.copy())
    with pytest.raises(ValueError, match=r"^out\.rowwise\.splits: expected sizes, as out\.columnwise has"):
        fp8.scaling_aware_transpose(q, splits=run.array(SIZES), out=Quantized(row, made.columnwise))
    with pytest.raises(ValueError, match=r"^out\.columnwise\.splits: expected sizes, got None"):
        fp8.scaling_aware_transpose(q, splits=run.array(SIZES), out=without)
    with pytest.raises(ValueError, match=r"^out\.columnwise\.splits: expected None, got sizes"):
        fp8.scaling_aware_transpose(q, out=made)
    narrow = run.array(SIZES.astype(np.int32))
    with pytest.raises(TypeError, match=r"^out\.columnwise\.splits: expected dtype int32, got int64"):
        fp8.scaling_aware_transpose(q, splits=narrow, out=made)


def test_no_further_launch(monkeypatch):
    launched: list[str] = []
    monkeypatch.setattr(Launch, "start", lambda launch, *_: launched.append(launch.variant.kernel.entry))
    with testing.executor("host"):
        run = testing.Executor("host")
        aware(run, SIZES)
    assert launched == ["group_find_segments", "scaling_aware_transpose"]


# ---- other sizes ----
@every_product
def test_the_same_sizes(a, b, group, run):
    """Those of the operands are taken where none are given."""
    got = product(run, a, b, group, SIZES, SIZES, None)
    testing.assert_bytes_equal(fp8.asnumpy(product(run, a, b, group, SIZES, SIZES, SIZES, check=True)),
                               fp8.asnumpy(got))
    assert fp8.device_errors(clear=True) == ()
    with testing.executor("reference"):
        reference = testing.Executor("reference")
        want = product(reference, a, b, group, SIZES, SIZES, None)
    # Tensor cores round sums of FP8 products to 14 bits (docs/numerics.md, section 10).
    np.testing.assert_allclose(fp8.asnumpy(got), want, rtol=0, atol=2.0**-9 * np.abs(want).max())


@every_product
def test_other_sizes_are_refused_by_value(a, b, group, run):
    """Where the host knows them, in NumPy arrays, or waits for the device."""
    message = r"^splits: expected the sizes that a is laid out by, \[64, 0, 96\], got \[60, 4, 96\]$"
    with pytest.raises(ValueError, match=message):
        product(run, a, b, group, SIZES, SIZES, OTHERS, check=True)
    if b is not None:
        with pytest.raises(ValueError, match=r"^b\.splits: expected the sizes that a is laid out by, "):
            product(run, a, b, group, SIZES, OTHERS, None, check=True)
    if run.name != "cuda":
        with pytest.raises(ValueError, match=message):
            product(run, a, b, group, SIZES, SIZES, OTHERS)


@pytest.mark.parametrize("kernel", ["usual", "copies", "any"])
@every_product
def test_other_sizes_are_noted_on_the_device(a, b, group, kernel, device, monkeypatch):
    """Each operand's are compared, by either kernel, whoever has the sizes that the call takes."""
    if kernel == "any":
        monkeypatch.setattr(wgmma, "takes", lambda *_: False)
    monkeypatch.setattr(align_rows, "worth_copies", lambda _: kernel == "copies")
    run = device.run
    for of_a, of_b, given, found in (
            (SIZES, SIZES, None, ()), (SIZES, SIZES, SIZES, ()), (SIZES, SIZES, OTHERS, (OTHER,)),
            (SIZES, OTHERS, None, (OTHER,) if b else ()), (OTHERS, SIZES, SIZES, (OTHER,)),
            (SIZES, OTHERS, SIZES, (OTHER,) if b else ())):
        product(run, a, b, group, of_a, of_b, given)
        assert fp8.device_errors(clear=True) == found, (of_a, of_b, given)
        if found:
            with pytest.raises(ValueError, match="expected the sizes that a is laid out by"):
                product(run, a, b, group, of_a, of_b, given, check=True)
            assert fp8.device_errors() == ()


@pytest.mark.parametrize("place", [0, 31, 32, 69])
def test_every_size_is_compared(place, device):
    """Of more groups than a warp has lanes, and of sizes of either dtype."""
    run, sizes = device.run, np.full(70, 2)
    for dtype in (np.int32, np.int64):
        other = sizes.astype(dtype)
        other[place] -= 1
        q = aware(run, sizes)
        fp8.grouped_matmul_nt(q, q, run.array(other), group="k")
        assert fp8.device_errors(clear=True) == (OTHER,)
        fp8.grouped_matmul_nt(q, q, run.array(sizes.astype(dtype)), group="k")
        assert fp8.device_errors() == ()


def test_sizes_in_a_list_are_compared_on_the_device(device):
    q = aware(device.run, SIZES)
    fp8.grouped_matmul_nt(q, q, OTHERS.tolist(), group="k")
    assert fp8.device_errors(clear=True) == (OTHER,)


# ---- what else is done with such results ----
REFUSED: dict[str, Callable[[Any], Any]] = {
    "dequantize": lambda q: q.dequantize(), "T": lambda q: q.T, "to_layout": lambda q: q.to_layout("compact"),
    "to_layout, itself": lambda q: q.to_layout(q.scale_layout), "to_block": lambda q: q.to_block((128, 128)),
    "rebase": lambda q: fp8.rebase_scales(q, block=(128, 128)), "scales": fp8.diagnostics.scales,
    "error": lambda q: fp8.diagnostics.error(np.ones(q.shape, float32), q),
    "blocks": lambda q: fp8.diagnostics.blocks(np.ones(q.shape, float32), q),
    "scale_heat_map": lambda q: fp8.plot.scale_heat_map(q),
    "scale_histogram": lambda q: fp8.plot.scale_histogram(q),
    "error_by_magnitude": lambda q: fp8.plot.error_by_magnitude(np.ones(q.shape, float32), q)}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("layout", ["gemm_ready", "compact"])
def test_parts_of_groups_are_no_tensor(layout, use, run):
    made = fp8.scaling_aware_transpose(rows_of(run), splits=run.array(SIZES), scale_layout=layout)
    for part in (made.rowwise, made.columnwise):
        with pytest.raises(ValueError, match=r"^q: expected data of one piece, got data of 3 groups"):
            use(part)


@pytest.mark.parametrize("use", ["matmul_nt", "pad_groups", "scaling_aware_transpose"])
def test_rows_of_groups_are_no_matrix(use, run):
    row = aware(run, SIZES).rowwise
    call = {"matmul_nt": lambda: fp8.matmul_nt(row, row),
            "pad_groups": lambda: fp8.pad_groups(row, run.array(SIZES), align=16),
            "scaling_aware_transpose": lambda: fp8.scaling_aware_transpose(row)}[use]
    with pytest.raises(ValueError, match=r"^[aqx]: expected data of one piece, got data of 3 groups"):
        call()


def test_copies_and_representations(run):
    made = aware(run, SIZES)
    assert ", in 3 groups" in repr(made)
    assert "in 3 groups" in made._repr_html_()
    assert made == deepcopy(made)
    assert made != aware(run, OTHERS)
    assert (again := deepcopy(made)).columnwise.splits is again.rowwise.splits is not made.rowwise.splits
    on_host = run.numpy(made)
    assert pickle.loads(pickle.dumps(on_host)) == on_host
    changed: Any = deepcopy(made)
    changed.columnwise.splits[0] += 1
    assert made != changed


def test_parts_of_other_sizes_do_not_fit():
    a, b = (aware(testing.Executor("reference"), sizes) for sizes in (SIZES, OTHERS))
    with pytest.raises(ValueError, match=r"^columnwise\.splits: expected the sizes of rowwise, got others$"):
        Quantized(a.rowwise, b.columnwise)


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"splits": SIZES.astype(float32)}, TypeError, "splits: expected dtype int32, int64, got float32"),
    ({"splits": SIZES[None]}, ValueError, "splits: expected one dimension, got shape (1, 3)"),
    ({"splits": SIZES.tolist()}, TypeError, "splits: expected a numpy.ndarray or cupy.ndarray, got list"),
    ({"splits": SIZES[:2]}, ValueError, "scale_inv: expected shape (3, 144), gemm_ready scales of blocks "
                                        "(128, 1) of shape (160, 144) in 2 groups, got (4, 144)"),
    ({"splits": None}, ValueError, "data: expected shape (144, 160) for the logical shape (160, 144) stored"),
    ({"transposed": False}, ValueError, "data: expected shape (160, 144) for the logical shape (160, 144),"),
    ({"shape": (1, 160, 144)}, ValueError, "shape: expected (M, K) of groups of rows, got (1, 160, 144)"),
    ({"block": None, "scale_layout": None}, ValueError, "splits: expected None for one scale, got 3 sizes"),
])  # fmt: skip
def test_constructor(changes, error, message):
    column = aware(testing.Executor("reference"), SIZES).columnwise
    assert Scaled(**column.__getstate__()) == column
    with pytest.raises(error) as raised:
        Scaled(**{**column.__getstate__(), **changes})
    assert str(raised.value).startswith(message)
