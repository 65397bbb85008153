"""diagnostics.compare: figures of the recipes that it names, and a verdict that follows from them."""

from __future__ import annotations

import math
import re
from typing import Any, cast

import numpy as np
import pytest
import stand_in_arithmetic
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import diagnostics
from cupy_fp8.diagnostics import verdict
from cupy_fp8.diagnostics.comparison import RECIPES, each
from cupy_fp8.diagnostics.recipe_rows import LEGEND, recipe_name
from cupy_fp8.diagnostics.text import Column, count, elided, fitting, share, text_table

NAMES = ["tensor E4M3", "delayed E4M3", "tensor E4M3 pow2", "tensor E5M2", "128×128 E4M3",
         "128×128 E4M3 pow2", "row E4M3", "row E4M3 pow2", "1×128 E4M3", "1×128 E4M3 pow2",
         "MX E4M3", "MX E5M2"]


def values(*shape: int, outliers: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
    """Return normally distributed values, with one column larger than the others."""
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    x[..., 3] *= outliers
    return x.astype(dtype)


def local_sqnr(x: np.ndarray, q: Any) -> float:
    """Compute the definition, in a loop."""
    a, v = x.astype(np.float64).reshape(-1), q.dequantize().astype(np.float64).reshape(-1)
    ratios = []
    for run in range(0, a.size, 32):
        sizes = np.abs(a[run:run + 32])
        exponents = np.frexp(sizes)[1]
        median = np.sort(exponents[sizes > 0])[((sizes > 0).sum() - 1) // 2]
        kept = run + np.flatnonzero((exponents < median + 4) & (np.arange(sizes.size) != sizes.argmax()))
        signal, noise = np.square(a[kept]).sum(), np.square(v[kept] - a[kept]).sum()
        if signal:
            ratios.append(min(noise / signal, 1))
    return -10 * math.log10(np.mean(ratios))


@pytest.mark.parametrize("x", [values(160, 256, dtype=fp8.bfloat16), values(3, 40, 70, outliers=1e4),
                               np.exp2(4 * values(40, 77))], ids=["bfloat16", "3-D", "many outliers"])
def test_rows_are_what_the_recipes_do(x):
    found = diagnostics.compare(x)
    assert [row.name for row in found] == NAMES
    assert (found.shape, found.dtype) == (x.shape, x.dtype.name)
    for row, recipe in zip(found, RECIPES, strict=True):
        assert row.recipe == recipe
        scale = np.float32(448) / np.abs(x.astype(np.float32)).max()
        q = (fp8.quantize_tensor(x, scale) if isinstance(recipe, fp8.DelayedScaling) else recipe.quantize(x))
        assert row.error == diagnostics.error(x, q)
        assert row.bytes_per_element == q.nbytes / x.size
        assert found[row.name] is row
        assert row.local_sqnr_db == pytest.approx(local_sqnr(x, q), rel=1e-9)
        assert row.lost == ((row.error.saturated or 0) + row.error.underflowed) / x.size


def test_names():
    assert recipe_name(fp8.BlockScaling()) == "1×128 E4M3 pow2"        # the profile's own choice
    assert recipe_name(fp8.BlockScaling(profile="vllm", eps=0.5)) == "1×128 E4M3 eps 0.5 vllm"
    assert recipe_name(fp8.BlockScaling((None, 1), pow2_scale=False)) == "column E4M3"
    assert recipe_name(fp8.MXScaling(block=(32, 32), profile="torchao")) == "MX 32×32 E4M3 torchao"
    assert recipe_name(fp8.DelayedScaling(fp8.float8_e5m2, margin=2)) == "delayed E5M2 margin 2"
    assert recipe_name(fp8.CurrentScaling(eps=1e-3)) == "tensor E4M3 eps 0.001"


def test_duplicates_are_one_row():
    x = values(64, 100)
    found = diagnostics.compare(x)
    assert found.same["delayed E4M3"] == "tensor E4M3"
    assert found.same["1×128 E4M3"] == "row E4M3"               # rows of 100 are one block
    assert [row.name for row in found.distinct] == [name for name in NAMES if name not in found.same]
    text = repr(found)
    assert re.findall(r"^(?:row|1×128) E4M3  ", text, re.MULTILINE) == ["row E4M3  "]
    assert "Same figures: tensor E4M3 = delayed E4M3; row E4M3 = 1×128 E4M3; " in text
    assert found["1×128 E4M3"].error == found["row E4M3"].error


def test_delayed_scaling_takes_the_given_amax():
    x = values(32, 64)
    found = diagnostics.compare(x, amax=np.full(1, 0.5, np.float32))
    assert found["delayed E4M3"].error == diagnostics.error(x, fp8.quantize_tensor(x, 896.0))
    assert (found["delayed E4M3"].error.saturated or 0) > 1000
    assert "delayed E4M3" not in found.same


def test_recipes_of_the_caller():
    x = values(32, 64)
    found = diagnostics.compare(x, {"mine": fp8.MXScaling(), "theirs": fp8.MXScaling(mode="floor")})
    assert [row.name for row in found] == ["mine", "theirs"]
    assert found["theirs"].error == diagnostics.error(x, fp8.quantize_mx(x, mode="floor"))
    (only,) = diagnostics.compare(x, [fp8.CurrentScaling(fp8.float8_e5m2)])
    assert only.name == "tensor E5M2"
    with pytest.raises(KeyError, match="the recipes are mine, theirs"):
        found["ours"]


def test_data_with_scales_are_their_values():
    x = values(130, 140)
    q = fp8.quantize_mx(x, columnwise=True)
    found = diagnostics.compare(q)
    assert found.dtype == "float8_e4m3fn, block 1×32"
    assert found.rows == diagnostics.compare(q.dequantize()).rows
    assert found["MX E4M3"].error.sqnr_db == math.inf
    assert found.verdict.startswith("Take tensor E4M3 pow2 for weights")   # this many dB count as exact
    one = fp8.quantize_tensor(x).rowwise
    assert diagnostics.compare(one, [fp8.MXScaling()]).dtype == "float8_e4m3fn, one scale"


def test_rows_come_one_by_one():
    calls = []

    def run(quantize, x):
        calls.append(x.shape)
        q = quantize(x)
        assert quantize(x, out=q) is q
        return q

    rows = each(values(8, 32), run=run)
    assert not calls
    assert next(rows).name == "tensor E4M3"
    assert calls == [(8, 32)]
    with pytest.raises(ValueError, match="two or three dimensions"):
        each(values(8))                                         # raises at the call, not at the first row


@pytest.mark.parametrize(("x", "recipes", "error", "message"), [
    (np.ones((2, 2)), None, TypeError, r"float64; pass x\.astype\(np\.float32\)"),
    (np.ones((2, 2), fp8.float8_e4m3fn), None, TypeError, r"pass fp8\.Scaled\(data, scale_inv"),
    (np.ones(2, np.float32), None, ValueError, r"got shape \(2,\); x\[None\] makes"),
    (np.zeros((2, 0), np.float32), None, ValueError, r"expected elements"),
    ([[1.0]], None, TypeError, "x"),
    (values(2, 4), fp8.MXScaling(), TypeError, r"expected recipes, such as \[fp8\.MXScaling\(\)"),
    (values(2, 4), [fp8.MXScaling], TypeError, "is no recipe"),
    (values(2, 4), {"a": "MX"}, TypeError, "expected a recipe as a, got 'MX'"),
    (values(2, 4), [], ValueError, "expected one or more"),
    (values(2, 4), [fp8.MXScaling(), fp8.MXScaling(scale_layout="swizzled")], ValueError,
     "a dict gives names"),
], ids=str)
def test_errors(x, recipes, error, message):
    with pytest.raises(error, match=message):
        diagnostics.compare(x, recipes)


# ---- verdicts ----
def rows_of_unlike_sizes(columns: int = 1024) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((512, columns))
    return (x * np.exp2(np.random.default_rng(1).uniform(-8, 8, (512, 1)))).astype(np.float32)


def taken(verdict: str) -> dict[str, str]:
    """{'weights': a recipe, 'activations': a recipe}."""
    found: dict[str, str] = {}
    for name, kinds in re.findall(r"Take ([^:]*?) for ([a-z ]+):", verdict):
        found |= dict.fromkeys(kinds.split(" and "), name)
    return found


def test_verdicts():
    plain, wild = (diagnostics.compare(values(256, 256, outliers=size)) for size in (1, 1e6))
    assert plain.verdict.startswith("Take tensor E4M3 for weights and activations: 31.")
    assert "none is simpler. It is written fp8.CurrentScaling()." in plain.verdict
    assert wild["tensor E4M3"].lost > 0.9
    assert max(wild, key=lambda row: row.error.sqnr_db).lost > 0.3      # its few large values are exact
    chosen = wild[taken(wild.verdict)["weights"]]
    assert chosen.lost <= min(row.lost for row in wild) + 0.001
    assert "tensor E4M3 has 0.00 dB locally, 100 % of the values saturated or 0" in wild.verdict
    assert verdict.verdict_on([plain.rows] * 2, [None] * 2).startswith(
        "Take tensor E4M3 for weights and activations: it is hardly worse than the best recipe in both "
        "tensors (at least 31.")
    mostly_plain = verdict.verdict_on([plain.rows, wild.rows, plain.rows], [None] * 3)
    assert "in 2 of 3 tensors (at least 31." in mostly_plain
    mixed = verdict.verdict_on([wild.rows, plain.rows, wild.rows], [None] * 3)
    assert f"in 2 of 3 tensors (at least {wild[chosen.name].local_sqnr_db:.1f} dB locally" in mixed


def test_values_that_happen_to_be_exact_are_no_reason():
    """A column of outliers is the amax of its rows, which scales that are not powers of two store exactly: it
    dominates the SQNR, and MX loses a third as many values as the recipe with the highest one."""
    x = rows_of_unlike_sizes()
    x[:, 5] *= 2.0**14
    found = diagnostics.compare(x)
    most = max(found, key=lambda row: row.error.sqnr_db)
    assert most.name == "1×128 E4M3"
    assert most.error.sqnr_db > 80
    assert found["MX E4M3"].error.sqnr_db < 40
    assert found["MX E4M3"].lost < 0.4 * most.lost
    assert taken(found.verdict) == {"weights": "MX E4M3", "activations": "MX E4M3"}
    slightly = diagnostics.compare(np.where(np.arange(300) == 7, 30, 1).astype(np.float32) * values(256, 300))
    assert slightly["row E4M3"].error.sqnr_db > 37
    assert taken(slightly.verdict) == {"weights": "tensor E4M3", "activations": "tensor E4M3"}


@pytest.mark.parametrize("factor", [2.0**14, 2.0**16])
@pytest.mark.parametrize("outliers", [1, 2, 4, 12])
def test_outliers_hide_nothing(outliers, factor):
    """However many columns of every 32 have them: the SQNR that counts is that of the other values, some of
    which are lost by some recipes."""
    x = values(256, 512)
    others = np.arange(512) % 32 >= outliers
    x[:, ~others] *= factor
    found, of_others = diagnostics.compare(x), {}
    for row in found:
        if not isinstance(row.recipe, fp8.DelayedScaling):
            v = row.recipe.quantize(x).dequantize()
            sqnr = diagnostics.error(x[:, others], np.ascontiguousarray(v[:, others])).sqnr_db
            # each run lacks its largest value too, and the mean is that of ratios
            assert row.local_sqnr_db == pytest.approx(max(sqnr, 0), abs=2.5), row.name
            of_others[row.name] = sqnr
    for name in taken(found.verdict).values():
        assert of_others[name] > max(of_others.values()) - 3


def test_largest_values_that_are_cut_off_count():
    """They are the largest of their neighbours, and few."""
    x = values(64, 256)
    x[::8, ::32] = 500
    found = diagnostics.compare(x, [fp8.DelayedScaling(), fp8.MXScaling()], amax=np.full(1, 8, np.float32))
    cut, mx = found
    assert cut.local_sqnr_db > mx.local_sqnr_db - 1
    assert cut.lost < 0.005
    assert taken(found.verdict)["weights"] == "MX E4M3"


def test_a_verdict_for_weights_and_one_for_activations():
    """As docs/start.md says: 128 tokens share no scale, products with weights of 128×128 are fast, and so are
    those of two equal recipes."""
    from cupy_fp8.cli import demo_data

    w, x = (make(512, 512, seed=3) for make in (demo_data.weight, demo_data.activation))
    alone = [diagnostics.compare(w, kind="weights").verdict,
             diagnostics.compare(x, kind="activations").verdict]
    assert list(map(taken, alone)) == [{"weights": "tensor E4M3"}, {"activations": "1×128 E4M3"}]
    rows = [diagnostics.compare(a).rows for a in (w, x)]
    both = verdict.verdict_on(rows, ["weights", "activations"])
    assert taken(both) == {"weights": "128×128 E4M3", "activations": "1×128 E4M3"}
    assert "; tensor E4M3 is as good, but not fast beside 1×128 E4M3 of activations. It is written" in both
    unlike = diagnostics.compare(rows_of_unlike_sizes(256))
    assert taken(unlike.verdict) == {"weights": "row E4M3", "activations": "1×128 E4M3"}
    unlike_both = verdict.verdict_on([unlike.rows] * 2, ["weights", "activations"])
    assert taken(unlike_both) == {"weights": "row E4M3", "activations": "row E4M3"}
    with pytest.raises(ValueError, match=r"kind: expected one of .*'activation'; did you mean act"):
        diagnostics.compare(w, kind=cast(Any, "activation"))


@pytest.mark.parametrize("recipes", [[fp8.BlockScaling((128, 128))], [fp8.BlockScaling((None, 1))],
                                     [fp8.MXScaling(block=(32, 32))]], ids=str)
def test_one_recipe_that_nobody_would_take(recipes):
    assert set(taken(diagnostics.compare(values(160, 160), recipes).verdict)) == {"weights", "activations"}


@pytest.mark.parametrize("recipe", [*RECIPES, fp8.BlockScaling(profile="vllm", eps=1e-3)], ids=str)
def test_code_makes_the_recipe(recipe):
    (row,) = diagnostics.compare(values(8, 8), [recipe])
    assert eval(row.code, {"fp8": fp8}) == recipe


def test_verdict_on_what_is_not_finite():
    x = values(64, 64)
    x[1, 1] = np.inf
    broken, fine = diagnostics.compare(x), diagnostics.compare(values(64, 64))
    assert broken.notes[0] == "Left out of the errors: 1 NaN or Inf in x."
    assert broken.verdict == "Take none yet: find the NaN or Inf in x first."
    both = verdict.verdict_on([broken.rows, broken.rows], [None, None])
    assert both == "Take none yet: find the NaN or Inf in these tensors first."
    assert verdict.verdict_on([broken.rows, fine.rows], [None, None]).endswith(" 1 with NaN or Inf left out.")


def test_zeros_are_exact():
    found = diagnostics.compare(np.zeros((130, 130), np.float32))
    assert found.verdict == ("Take tensor E4M3 for weights and activations: it is exact. It is written "
                             "fp8.CurrentScaling().")
    assert found["MX E4M3"].cells()[1:4] == ("exact", "exact", "–")


# ---- what is shown ----
def test_texts_of_a_comparison():
    found = diagnostics.compare(values(256, 256))
    first, head, _, *rows = repr(found).splitlines()
    assert first == "Comparison of 256×256 float32"
    assert max(map(len, (first, head, *rows[:-1]))) <= 80
    assert " ".join(head.split()) == "recipe SQNR dB local dB normal error saturated to zero bytes"
    report = found["tensor E4M3"].error
    assert report.normal_error
    wrong = f"{report.normal_error * 100:.1f} / {report.max_normal_error:.1%}"
    assert rows[0].split() == ["tensor", "E4M3", f"{report.sqnr_db:.2f}",
                               f"{found['tensor E4M3'].local_sqnr_db:.2f}", *wrong.split(), "0",
                               str(report.underflowed), "1.000"]
    assert rows[-1] == found.verdict
    html = found._repr_html_()
    assert f"<td>{report.sqnr_db:.2f}</td>" in html
    assert found.verdict in html
    titles = {title.strip() for title in head.split("  ") if title}
    assert {title.removesuffix(" dB") for title in titles} == LEGEND.keys()


def test_tables():
    columns = [Column("name", 6, right=False), Column("n", 3), Column("m", 3, rank=1), Column("k", 3, rank=2)]
    assert text_table(columns[:2], [["a", "1"], ["bb", "22"]]) == (
        "name      n\n──────  ───\na         1\nbb       22")
    assert [fitting(columns, width) for width in (21, 20, 16, 15, 5)] == [
        [0, 1, 2, 3], [0, 1, 2], [0, 1, 2], [0, 1], [0, 1]]


def test_short_texts():
    assert [count(n) for n in (None, 0, 999_999, 1_000_000, 99_950_000,
                                  999_400_000, 999_600_000)] == [
        "unknown", "0", "999,999", "1.00 M", "100 M", "999 M", "1.00 G"]
    assert all(len(count(10**n - 1)) <= 7 for n in range(12))
    assert (share(0.5), share(1e-6), share(1e-7)) == ("50 %", "0.0001 %", "less than 0.0001 %")
    assert elided("abcdefgh", 5) == "ab…gh"
    assert len(elided("x" * 300, 40)) == 40
    assert elided("short", 5) == "short"


# ---- GPUs ----
RECIPES_ON_DEVICES: list[Any] = [fp8.CurrentScaling(), fp8.DelayedScaling(), fp8.MXScaling()]


def assert_same_figures(here, there):
    for a, b in zip(here, there, strict=True):
        assert (a.name, a.bytes_per_element) == (b.name, b.bytes_per_element)
        assert vars(a.error) == pytest.approx(vars(b.error), rel=1e-12)
        assert a.local_sqnr_db == pytest.approx(b.local_sqnr_db, rel=1e-12)
    assert here.verdict == there.verdict


@needs_host
def test_where_cupy_is(monkeypatch):
    """The figures are those of NumPy, and nothing else leaves the device."""
    x = values(40, 160, outliers=1e3)
    here = diagnostics.compare(x, RECIPES_ON_DEVICES)
    module, copied = stand_in_arithmetic.install(monkeypatch)
    there = diagnostics.compare(module.asarray(x), RECIPES_ON_DEVICES)
    assert_same_figures(here, there)
    assert max(copied) < x.nbytes / 8
    assert there.dtype == "float32"


@pytest.mark.gpu
def test_on_a_gpu():
    x = values(400, 1600, outliers=1e3)
    assert_same_figures(diagnostics.compare(x), diagnostics.compare(fp8.asarray(x, like="cupy")))
