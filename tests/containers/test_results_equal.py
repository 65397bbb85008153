"""Comparison of two results by bytes and metadata: `==`, bytes_equal and assert_bytes_equal, which names the
differing field."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pkgutil
import re
import weakref
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from block_data import result

import cupy_fp8 as fp8
from cupy_fp8 import Gate, Grouped, Quantized, Scaled, cases, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases.moe.route import routing as routed
from cupy_fp8.formats import bfloat16, float8_e5m2
from cupy_fp8.recipes import RECIPES

X = cases.values("normal", (40, 256), bfloat16)


def grouped(seed: int = 0) -> Grouped:
    return fp8.group_quantize(cases.values("normal", (40, 256), bfloat16, seed), [8, 32], fp8.BlockScaling(),
                              columnwise=True)


def gated(**options: Any) -> Gate:
    return fp8.topk_gate(X, 4, return_scores=True, sequences=2, **options)


def edited(q: Any, path: str) -> Any:
    """Return a copy with one changed bit in one array."""
    again = copy.deepcopy(q)
    a = again
    for name in path.split("."):
        a = getattr(a, name)
    bits(a).reshape(-1)[-1] ^= 1
    return again


#: for each result a function that makes it, and the names of its arrays
RESULTS: dict[str, tuple[Any, list[str]]] = {
    "Scaled": (lambda: fp8.quantize_mx(X).rowwise, ["data", "scale_inv"]),
    "Quantized": (lambda: fp8.cast_transpose(X, 2.0, dbias=True),
                  ["rowwise.data", "columnwise.data", "dbias"]),
    "blocks": (lambda: fp8.quantize_block(X, columnwise=True),
               ["rowwise.data", "rowwise.scale_inv", "columnwise.data", "columnwise.scale_inv"]),
    "Grouped": (grouped, ["rowwise", "columnwise", "scale_inv", "columnwise_scale_inv", "splits", "offsets"]),
    "Routing": (lambda: routed(20, 2, 3, form="mask"),
                ["row_map", "splits", "sources", "offsets", "experts"]),
    "Gate": (lambda: gated(), ["indices", "weights", "counts", "scores", "score_sums"]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_equal_results(name):
    make, _ = RESULTS[name]
    a, b = make(), make()
    assert (a == b, a != b, b == a, a == a) == (True, False, True, True)
    assert a == copy.deepcopy(a)
    assert fp8.bytes_equal(a, b) is True
    testing.assert_bytes_equal(a, b)
    for many in ([a, b], (a, b)):
        assert fp8.bytes_equal(many, [b, a]) is True
        testing.assert_bytes_equal(many, (b, a))


@pytest.mark.parametrize(("name", "path"),
                         [(name, path) for name, (_, paths) in RESULTS.items() for path in paths])
def test_a_byte_that_differs_is_named(name, path):
    a = RESULTS[name][0]()
    b = edited(a, path)
    assert (a == b, a != b) == (False, True)
    assert fp8.bytes_equal(a, b) is False
    with pytest.raises(AssertionError,
                       match=rf"^{re.escape(path)}: 1 of \d+ elements of .* differ; first at .*: actual "
                             rf"0x.*, desired 0x"):
        testing.assert_bytes_equal(a, b)
    assert fp8.bytes_equal([a, a], [a, b]) is False
    with pytest.raises(AssertionError, match=rf"^\[1\]\.{re.escape(path)}: 1 of "):
        testing.assert_bytes_equal([a, a], [a, b])


ROW, COLUMN = result((64, 96)), result((96, 64)).T
Q = fp8.quantize_mx(X, columnwise=True)


@pytest.mark.parametrize(("a", "b", "message"), [
    (ROW, Scaled._of(ROW.data, ROW.scale_inv, ROW.shape, False, (1, 64), "compact"),
     "block: actual (1, 32), desired (1, 64)"),
    (ROW, Scaled._of(ROW.data, ROW.scale_inv, ROW.shape, False, (1, 32), "swizzled"),
     "scale_layout: actual 'compact', desired 'swizzled'"),
    (ROW, Scaled._of(ROW.data, ROW.scale_inv, (96, 64), True, (1, 32), "compact"),
     "shape: actual (64, 96), desired (96, 64)"),
    (ROW, Scaled._of(ROW.data, ROW.scale_inv, ROW.shape, True, (1, 32), "compact"),
     "transposed: actual False, desired True"),
    (ROW, Scaled(ROW.data.view(float8_e5m2), *list(ROW.__getstate__().values())[1:]),
     "data: dtype: actual float8_e4m3fn, desired float8_e5m2"),
    (Q, fp8.quantize_mx(X), "columnwise: actual of type Scaled, desired None"),
    (Q, Quantized(None, Q.columnwise), "rowwise: actual of type Scaled, desired None"),
    (fp8.quantize_mx(X), Q, "columnwise: actual None, desired of type Scaled"),
    (fp8.cast_transpose(X, 2.0), fp8.cast_transpose(X, 2.0, dbias=True),
     "dbias: actual None, desired of type ndarray"),
    (Q, Q.rowwise, "type: actual of type Quantized, desired of type Scaled"),
    (Q.data, Q, "type: actual of type ndarray, desired of type Quantized"),
    ([Q], Q, "type: actual of type list, desired of type Quantized"),
    ([Q, Q], [Q], "length: actual 2, desired 1"),
    ([[Q, Q]], [[Q]], "[0].length: actual 2, desired 1"),
    ([None], [Q.data], "[0]: actual None, desired of type ndarray"),
    (routed(20, 2, 3), routed(20, 2, 3, align=4), "rows: actual 40, desired 48"),
    (gated(), fp8.topk_gate(X, 4, sequences=2), "scores: actual of type ndarray, desired None"),
    (gated(factor=0.0), gated(factor=-0.0), "weights: "),
    (dataclasses.replace(gated(), score="sigmoid"), gated(), "score: actual 'sigmoid', desired 'softmax'"),
    (dataclasses.replace(gated(), normalize=False), gated(), "normalize: actual False, desired True"),
    (dataclasses.replace(gated(), factor=2), gated(), "factor: actual 2.0, desired 1.0"),
    (Grouped.wrap(X, [8, 32]), Grouped.wrap(X, [9, 31]),
     "splits: 2 of 2 elements of int64[2] differ; first at (0,)"),
])  # fmt: skip
def test_metadata_that_differ_are_named(a, b, message):
    assert fp8.bytes_equal(a, b) is False
    if not isinstance(a, (np.ndarray, list)):
        assert (a == b) is False
    with pytest.raises(AssertionError, match="^" + re.escape(message)):
        testing.assert_bytes_equal(a, b)


def test_nan_equals_nan_and_zeros_have_a_sign():
    data, scale = np.zeros((2, 32), np.uint8), np.array([[np.nan], [0]], np.float32)
    codes = data.view(fp8.float8_e4m3fn)
    a = Scaled(codes, scale, (2, 32), block=(1, 32), scale_layout="compact")
    assert a == copy.deepcopy(a)
    assert a != Scaled(codes, -scale, (2, 32), block=(1, 32), scale_layout="compact")


@pytest.mark.parametrize("wrong", [3, None, "x", {"a": X}, [3], [X, "x"], [[X], 3.0]], ids=repr)
def test_what_cannot_be_compared(wrong):
    with pytest.raises(TypeError, match=r"^a: expected a numpy\.ndarray or cupy\.ndarray, got "):
        fp8.bytes_equal(wrong, X)
    with pytest.raises(TypeError, match=r"^b: expected a numpy\.ndarray or cupy\.ndarray, got "):
        fp8.bytes_equal(X, wrong)
    with pytest.raises(TypeError, match=r"^actual: expected a numpy\.ndarray or cupy\.ndarray, got "):
        testing.assert_bytes_equal(wrong, X)
    with pytest.raises(TypeError, match=r"^desired: expected a numpy\.ndarray or cupy\.ndarray, got "):
        testing.assert_bytes_equal(X, wrong)
    assert (wrong == Q) is False
    assert wrong != Q


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_no_keys(name):
    """Ops write to them, which changes what they equal. Weak references to them work."""
    a = RESULTS[name][0]()
    assert not isinstance(a, Hashable)
    with pytest.raises(TypeError, match=f"unhashable type: '{type(a).__name__}'"):
        hash(a)
    assert weakref.ref(a)() is a


#: equal values of options
ALIKE: dict[str, list[Any]] = {
    "dtype": ["e5m2", "float8_e5m2", float8_e5m2, float8_e5m2.type], "margin": [1, np.int8(1), np.uint64(1)],
    "history_len": [16, np.int32(16)], "algo": ["max", np.str_("max")],
    "eps": [0.5, np.float16(0.5), np.float64(0.5)], "pow2_scale": [True, np.True_, 1, np.int8(1)],
    "block": [(32, 32), [32, 32], (np.int8(32), np.int64(32))], "mode": ["rceil", np.str_("rceil")],
    "profile": ["te", np.str_("te")], "scale_layout": ["compact", np.str_("compact")]}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_equal_recipes_have_equal_hashes(recipe):
    for field in dataclasses.fields(recipe):
        values = ALIKE[field.name]
        if recipe is fp8.BlockScaling and field.name == "block":
            values = [(1, 64), [1, 64], (np.int8(1), np.int64(64))]
        made = [recipe(**{field.name: value}) for value in values]
        assert len({*made}) == 1, field.name
        assert all(one == made[0] for one in made), field.name


def package_classes() -> list[type]:
    names = [module.name for module in pkgutil.walk_packages(fp8.__path__, "cupy_fp8.")
             if not module.name.startswith(("cupy_fp8.kernels_cu", "cupy_fp8.__main__",
                                           "cupy_fp8.bench.triton"))]   # which needs Triton
    modules = [fp8, *map(importlib.import_module, names)]
    return list({value: None for module in modules for value in vars(module).values()
                 if isinstance(value, type) and value.__module__.startswith("cupy_fp8")})


def test_every_class_with_its_own_equality_has_its_own_hash_or_none():
    """For frozen dataclasses Python makes both from the same fields."""
    kinds = [kind for kind in package_classes() if "__eq__" in vars(kind)]
    assert {kind.__name__ for kind in kinds} > {"Result", "HashedTuple", "MXScaling", "ErrorReport"}
    assert [kind for kind in kinds if "__hash__" not in vars(kind)] == []
    plain: Any = object
    inherited: list[Any] = [kind for kind in package_classes() if vars(plain)["__hash__"] == kind.__hash__]
    assert [kind for kind in inherited if kind.__eq__ is not plain.__eq__] == []


@pytest.mark.gpu
def test_on_the_gpu():
    with testing.executor("cuda") as run:
        a, b = run.array(Q), run.array(Q)
        assert a == b
        assert fp8.bytes_equal(a, b)
        testing.assert_bytes_equal(a, Q)                    # for either kind
        assert a != Q                                       # results of two kinds are never equal
        with pytest.raises(TypeError, match=r"^b\.rowwise\.data: a numpy array among cupy arrays"):
            fp8.bytes_equal(a, Q)
        bits(b.data)[0, 0] ^= 1
        assert a != b
        with pytest.raises(AssertionError, match=r"^rowwise\.data: 1 of 10240 elements"):
            testing.assert_bytes_equal(a, b)
