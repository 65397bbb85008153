"""Results laid out by sizes keep a copy of these; products of groups refuse others, or note them."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import numpy as np
import pytest
from tiers import quick_if

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
    return cast(Quantized, run.array(q))


def aware(run: Any, sizes: Any, columns: int = K, seed: int = 0) -> Quantized:
    return fp8.scaling_aware_transpose(rows_of(run, columns, seed), splits=run.array(sizes))


def grouped(run: Any, sizes: Any, columns: int = K, seed: int = 0) -> fp8.Grouped:
    return fp8.group_quantize(run.array(values(columns, seed)), run.array(sizes), fp8.BlockScaling(),
                              columnwise=True)


def weights(run: Any) -> Scaled:
    with testing.executor("reference"):
        w = fp8.quantize_block(np.ones((len(SIZES), N, K), float32), block=(128, 128)).rowwise
    return cast(Scaled, run.array(w))


MAKERS = {"aware": aware, "grouped": grouped}
#: (a, b, group): functions that make the operands from sizes; None: not laid out by sizes
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
    """Those of the operands are used if none are given."""
    got = product(run, a, b, group, SIZES, SIZES, None)
    testing.assert_bytes_equal(fp8.asnumpy(product(run, a, b, group, SIZES, SIZES, SIZES, check=True)),
                               fp8.asnumpy(got))
    assert fp8.device_errors(clear=True) == ()
    with testing.executor("reference"):
        reference = testing.Executor("reference")
        want = product(reference, a, b, group, SIZES, SIZES, None)
    # tensor cores round sums of FP8 products to 14 bits (docs/numerics.md, section 10)
    np.testing.assert_allclose(fp8.asnumpy(got), want, rtol=0, atol=2.0**-9 * np.abs(want).max())


@every_product
def test_other_sizes_are_refused_by_value(a, b, group, run):
    """If the host knows them, in NumPy arrays, or waits for the device."""
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
    """Each operand's are compared, by either kernel, whichever has the sizes of the call."""
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


#: inconsistent fields of a Grouped: sizes or offsets that were exchanged, or changed in place
DISAGREEING: dict[str, Callable[[Any, Any], Any]] = {
    "other sizes": lambda run, g: dataclasses.replace(g, splits=run.array(OTHERS)),
    "other offsets": lambda run, g: dataclasses.replace(g, offsets=run.array(np.array([0, 60, 64, 160]) * K)),
    "sizes in place": lambda run, g: g.splits.__setitem__(slice(None), run.array(OTHERS)) or g,
    "offsets in place": lambda run, g: g.offsets.__setitem__(1, 60 * K) or g,
    "the last offset": lambda run, g: g.offsets.__setitem__(3, 159 * K) or g}


@pytest.mark.parametrize("change", DISAGREEING.values(), ids=DISAGREEING)
@pytest.mark.parametrize("group", ["m", "k"])
def test_sizes_and_offsets_that_disagree_are_refused(group, change, run):
    """Otherwise the sizes of the call would equal those of an operand that is laid out by others."""
    def call() -> None:
        a = change(run, grouped(run, SIZES))
        fp8.grouped_matmul_nt(a, weights(run) if group == "m" else a, group=group, check=True)

    with pytest.raises(ValueError, match=r"^(a\.)?offsets: expected \d+ at \d \(rows before it, times 144 "):
        call()


@pytest.mark.parametrize("kernel", ["usual", "any"])
@pytest.mark.parametrize("change", DISAGREEING.values(), ids=DISAGREEING)
def test_offsets_that_disagree_are_noted_on_the_device(change, kernel, device, monkeypatch):
    if kernel == "any":
        monkeypatch.setattr(wgmma, "takes", lambda *_: False)
        monkeypatch.setattr(align_rows, "worth_copies", lambda _: False)
    run = device.run
    wrong, right = change(run, grouped(run, SIZES)), grouped(run, SIZES)
    with_sizes_of = wrong.splits
    group: Any
    for a, b, group in ((wrong, weights(run), "m"), (wrong, wrong, "k"),
                        (wrong, aware(run, with_sizes_of), "k"), (aware(run, with_sizes_of), wrong, "k")):
        fp8.grouped_matmul_nt(a, b, group=group)
        assert fp8.device_errors(clear=True) == (OTHER,), group
    for a, b, group in ((right, weights(run), "m"), (right, right, "k")):
        fp8.grouped_matmul_nt(a, b, group=group)
        assert fp8.device_errors() == ()


def test_remembered_calls_know_the_sizes(device):
    """Sizes of a result whose other arrays are the same. A call remembered by these alone would read the
    sizes of the earlier one."""
    run = device.run
    q, given = aware(run, SIZES), run.array(SIZES)
    other = Quantized._of(*(Scaled._of(**{**part.__getstate__(), "splits": run.array(OTHERS)})
                            for part in q.parts.values()))
    out = fp8.grouped_matmul_nt(q, q, given, group="k")
    for a, found in ((q, ()), (q, ()), (other, (OTHER,)), (q, ()), (other, (OTHER,))):
        fp8.grouped_matmul_nt(a, q, given, group="k", out=out)
        assert fp8.device_errors(clear=True) == found


@pytest.mark.parametrize("place", quick_if(lambda place: place in (0, 70), [0, 1, 31, 32, 33, 69, 70]))
def test_every_offset_is_compared(place, device):
    run, sizes = device.run, np.full(70, 2)
    g = grouped(run, sizes)
    fp8.grouped_matmul_nt(g, g, group="k")
    assert fp8.device_errors() == ()
    offsets = fp8.asnumpy(g.offsets)
    offsets[place] += 1
    g.offsets[...] = run.array(offsets)
    fp8.grouped_matmul_nt(g, g, group="k")
    assert fp8.device_errors(clear=True) == (OTHER,)


def test_offsets_of_wrong_sizes_are_no_other_error(device):
    """If sizes pass the last row, offsets add no further error."""
    run = device.run
    for sizes, fact in ((np.array([64, 0, 100]), errors.Fact.SPLIT_SUM),
                        (np.array([64, -1, 96]), errors.Fact.SPLIT_NEGATIVE)):
        g = grouped(run, sizes)
        fp8.device_errors(clear=True)
        fp8.grouped_matmul_nt(g, g, group="k")
        assert fp8.device_errors(clear=True) == (errors.MESSAGES[fact],)


def test_save_refuses_sizes_that_disagree(device, tmp_path):
    """Arrays on a GPU are compared just as when they are loaded as NumPy's."""
    run = device.run
    a, b = aware(run, SIZES), aware(run, OTHERS)
    for value, message in (
            (dataclasses.replace(grouped(run, SIZES), splits=run.array(OTHERS)), "q.offsets: expected "),
            (Quantized(a.rowwise, b.columnwise), "q.columnwise.splits: expected the sizes of rowwise")):
        with pytest.raises(ValueError, match=f"^{message}"):
            fp8.save(tmp_path / "q.npz", q=value)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", quick_if(lambda place: place in (0, 69), [0, 31, 32, 69]))
def test_every_size_is_compared(place, device):
    """For more groups than a warp has lanes, and sizes of either dtype."""
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


# ---- other uses of such results ----
def beside(q: Any) -> Any:
    part = next(iter(q.parts.values())) if isinstance(q, Quantized) else q
    return fp8.full(q.shape, 1, float32, like=getattr(part, "data", np))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "dequantize": lambda q: q.dequantize(), "T": lambda q: q.T, "to_layout": lambda q: q.to_layout("compact"),
    "to_layout, itself": lambda q: q.to_layout(q.scale_layout), "to_block": lambda q: q.to_block((128, 128)),
    "rebase": lambda q: fp8.rebase_scales(q, block=(128, 128)), "scales": fp8.diagnostics.scales,
    "error": lambda q: fp8.diagnostics.error(beside(q), q),
    "blocks": lambda q: fp8.diagnostics.blocks(beside(q), q),
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


#: Functions that take row-wise data. Data of groups are refused as such before anything else: otherwise
#: following the advice would lead to another error.
ROW_USES: dict[str, Callable[[Any, Any], Any]] = {
    "matmul_nt": lambda q, run: fp8.matmul_nt(q, q),
    "weights": lambda q, run: fp8.grouped_matmul_nt(rows_of(run), q, [ROWS]),
    "pad_groups": lambda q, run: fp8.pad_groups(q, run.array(SIZES), align=16),
    "sort_chunks": lambda q, run: fp8.sort_chunks(q, run.array(SIZES), run.array(np.array([2, 0, 1]))),
    "scaling_aware_transpose": lambda q, run: fp8.scaling_aware_transpose(q),
    "scale_span": lambda q, run: fp8.diagnostics.scale_span(q),
    "save_safetensors": lambda q, run: fp8.io.save_safetensors("never_written.safetensors", {"w": q}),
    "block_ranges": lambda q, run: fp8.plot.block_ranges(np.ones(q.shape, float32), q)}


@pytest.mark.parametrize("use", ROW_USES.values(), ids=ROW_USES)
def test_rows_of_groups_are_no_matrix(use, run):
    made = aware(run, SIZES)
    for q in (made.rowwise, made.columnwise, made, Quantized(None, made.columnwise)):
        with pytest.raises(ValueError, match=r"^[abqxw]: expected data of one piece, got data of 3 groups"):
            use(q, run)


#: functions that take no Grouped
TENSOR_USES: dict[str, Callable[[Any], Any]] = {
    **{name: use for name, use in REFUSED.items() if " " not in name and name not in (
        "dequantize", "T", "to_layout", "to_block")},
    "matmul_nt": lambda g: fp8.matmul_nt(g, g), "scaling_aware_transpose": fp8.scaling_aware_transpose,
    "scale_span": fp8.diagnostics.scale_span, "compare": fp8.diagnostics.compare,
    "save_safetensors": lambda g: fp8.io.save_safetensors("never_written.safetensors", {"w": g}),
    "block_ranges": lambda g: fp8.plot.block_ranges(np.ones(g.shape, float32), g),
    "pad_groups": lambda g: fp8.pad_groups(g, SIZES, align=16)}


@pytest.mark.parametrize("use", TENSOR_USES.values(), ids=TENSOR_USES)
def test_a_grouped_is_no_tensor(use):
    """Its scales are those of all groups in sequence: no advice may take them for a matrix's."""
    g = grouped(testing.Executor("reference"), SIZES)
    with pytest.raises(TypeError, match=r"got Grouped; (\w+)\[i\] is the tensor of group i, and \1\.dequ"):
        use(g)
    plain: Any = fp8.Grouped.wrap(np.ones((ROWS, K), float32), SIZES)
    with pytest.raises(TypeError, match=r"got Grouped; (\w+)\[i\] is the tensor of group i$"):
        use(plain)


def test_copies_and_representations(run):
    made = aware(run, SIZES)
    assert ", in 3 groups" in repr(made)
    assert "in 3 groups" in made._repr_html_()
    with testing.executor("reference"):
        mx = run.array(fp8.quantize_mx(values(K)))
    assert "columnwise (stored transposed, in 3 groups)" in repr(
        fp8.scaling_aware_transpose(mx, splits=run.array(SIZES)))
    assert repr(made).count("in 3 groups") == 1
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
