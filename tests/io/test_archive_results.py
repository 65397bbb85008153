"""Every kind of result that an op returns is loaded as it was saved, and `save` refuses what `load` would."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from declared import ALIGNED, EXAMPLES, Example
from perturbed import anew
from tiers import quick_if

import cupy_fp8 as fp8
from cupy_fp8 import testing
from cupy_fp8.arrays import Result
from cupy_fp8.cases import OPS, base
from cupy_fp8.formats import float32
from cupy_fp8.io import archive
from cupy_fp8.results import Quantized, Scaled

_LARGEST = 10_000                # elements of a case whose result is saved
EVERY = [example for example in (*EXAMPLES, *ALIGNED) if not example.updates]


def results_in(made: Any) -> Iterator[Any]:
    """Yield a result, its parts and what its methods make of it, if they do not raise."""
    yield made
    if isinstance(made, (tuple, list)):
        for one in made:
            yield from results_in(one)
    if isinstance(made, Quantized):
        yield from (each for part in made.parts.values() for each in results_in(part))
    parts = [made] if isinstance(made, Scaled) else made.parts.values() if isinstance(made, Quantized) else []
    if parts and all(part.splits is None for part in parts):
        yield made.T
    if isinstance(made, fp8.Grouped) and int(made.offsets[-1]) == made.splits.sum() * made.shape[1]:
        yield list(made)


def same_again(path: Any, saved: dict[str, Any], like: Any = None) -> None:
    fp8.save(path, **saved)
    loaded = fp8.load(path, like=like)
    testing.assert_bytes_equal(list(loaded.values()), list(saved.values()))
    for name, a in saved.items():
        assert type(loaded[name]) is type(a), name
        assert not isinstance(a, Result) or loaded[name] == a, name


@pytest.mark.parametrize("example", quick_if(lambda example: example.quick, EVERY), ids=str)
def test_every_kind_of_result(example: Example, tmp_path):
    for i, result in enumerate(results_in(anew(example))):
        if result is not None:
            same_again(tmp_path / f"{i}.npz", {"result": result})


@pytest.mark.full
@pytest.mark.parametrize("op", OPS)
def test_results_of_every_case(op, tmp_path):
    """The contents of arrays do not matter here."""
    for case in OPS[op].cases():
        if np.prod(case.shape, dtype=np.float64) <= _LARGEST:
            with base.values_made_by(base.zeros):
                args, kwargs = OPS[op].inputs(case)
            made = OPS[op].function(*args, **kwargs)
            saved = {f"r{i}": one for i, one in enumerate(results_in(made)) if one is not None}
            if saved:
                same_again(tmp_path / "results.npz", saved)


def laid_out(layout: Any = "gemm_ready") -> Quantized:
    q = fp8.quantize_block(np.ones((150, 140), float32), scale_layout="compact")
    return fp8.scaling_aware_transpose(q, splits=[70, 0, 60], scale_layout=layout)


@pytest.mark.parametrize("layout", ["gemm_ready", "compact"])
def test_sizes_are_kept(layout, tmp_path, run):
    q = run.array(laid_out(layout))
    fp8.save(tmp_path / "q.npz", q=q, row=q.rowwise)
    loaded = fp8.load(tmp_path / "q.npz", like=q.rowwise.data)
    assert loaded["q"] == q
    assert loaded["q"].rowwise.splits is loaded["q"].columnwise.splits is loaded["row"].splits
    fp8.grouped_matmul_nt(loaded["q"], q, group="k", check=True)
    with pytest.raises(ValueError, match=r"^splits: expected the sizes that a is laid out by"):
        fp8.grouped_matmul_nt(loaded["q"], q, run.array(np.array([60, 0, 70])), group="k", check=True)
    # with memory of its own, so it can be written again
    row = loaded["q"].rowwise
    rows = fp8.quantize_block(np.ones((150, 140), float32), scale_layout="compact").rowwise
    given = Scaled(row.data, run.array(rows.scale_inv), row.shape, False, (1, 128), "compact")
    fp8.scaling_aware_transpose(given, splits=[60, 0, 70], scale_layout=layout, out=loaded["q"])
    assert fp8.asnumpy(row.splits).tolist() == [60, 0, 70]


def test_absent_fields_are_left_out(tmp_path):
    """A version without sizes of groups can read all other results."""
    q = fp8.quantize_block(np.ones((4, 140), float32))
    fp8.save(tmp_path / "q.npz", q=q, laid_out=laid_out())
    with np.load(tmp_path / "q.npz") as file:
        values = json.loads(str(file[archive.MANIFEST]))["values"]
    assert set(values["q"]["fields"]) == {"rowwise"}
    assert "splits" not in values["q"]["fields"]["rowwise"]["fields"]
    assert "splits" in values["laid_out"]["fields"]["columnwise"]["fields"]


def test_data_in_another_order_are_saved_in_that_of_c(tmp_path):
    row = fp8.quantize_tensor(np.arange(12, dtype=float32).reshape(3, 4), 1.0).rowwise
    for data in (np.asfortranarray(row.data), np.repeat(row.data, 2, axis=1)[:, ::2]):
        same_again(tmp_path / "q.npz", {"q": Scaled(data, row.scale_inv, row.shape)})


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"splits": None}, ValueError, r"^weights\.q\.columnwise\.data: expected shape \(140, 150\)"),
    ({"splits": np.zeros(2, np.int64)}, ValueError, r"^weights\.q\.columnwise\.scale_inv: expected shape"),
    ({"scale_inv": np.zeros(3, np.int8)}, TypeError, r"^weights\.q\.columnwise\.scale_inv: expected dtype")])
def test_what_load_would_refuse_is_not_written(changes, error, message, tmp_path):
    column = Scaled._of(**{**laid_out().columnwise.__getstate__(), **changes})
    with pytest.raises(error, match=message):
        fp8.save(tmp_path / "q.npz", weights={"q": Quantized._of(None, column)})
    assert not list(tmp_path.iterdir())


# ---- options in NumPy's scalars ----
ONES: list[Any] = [np.float64(1), np.float32(1), np.float16(1), np.int64(1), np.uint8(1), 1, True]
YES: list[Any] = [np.bool_(True), np.int64(1), 1]
RECIPES: dict[type, dict[str, list[Any]]] = {
    fp8.BlockScaling: {"eps": ONES[:-1], "pow2_scale": YES, "profile": [np.str_("vllm")],
                       "scale_layout": [np.str_("compact")], "block": [[1, np.int64(128)]]},
    fp8.CurrentScaling: {"eps": ONES[:-1], "pow2_scale": YES, "dtype": [np.str_("e5m2")]},
    fp8.DelayedScaling: {"margin": ONES[3:-1], "history_len": ONES[3:-1], "algo": [np.str_("most_recent")]},
    fp8.MXScaling: {"mode": [np.str_("floor")], "profile": [np.str_("torchao")],
                    "scale_layout": [np.str_("swizzled")], "block": [np.array([32, 32])]}}


@pytest.mark.parametrize(("kind", "field"), [(kind, field.name) for kind in RECIPES
                                             for field in dataclasses.fields(kind)])
def test_recipes_of_numpys_scalars(kind, field, tmp_path):
    """They hold Python's own numbers and names, which JSON preserves."""
    for value in RECIPES[kind].get(field, []):
        recipe = kind(**{field: value})
        held = getattr(recipe, field)
        assert isinstance(held, np.dtype) or type(held) in (float, bool, int, str, tuple), repr(value)
        fp8.save(tmp_path / "v.npz", v=recipe)
        assert fp8.load(tmp_path / "v.npz")["v"] == recipe


def in_numpys(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a result, with its numbers and names as NumPy's."""
    kinds: dict[type, Any] = {bool: np.bool_, int: np.int64, str: np.str_}
    return {name: tuple(np.int64(n) for n in a) if name == "shape" else kinds.get(type(a), lambda a: a)(a)
            for name, a in fields.items()}


def test_results_of_numpys_scalars(tmp_path):
    """Made by hand, or by calls that were given such options."""
    x = np.ones((8, 256), float32)
    block = fp8.quantize_block(x, scale_layout="compact", columnwise=True)
    grouped = fp8.group_quantize(x, [3, 5], fp8.BlockScaling(), columnwise=True)
    routing = fp8.route(np.zeros((4, 1), np.int32), num_experts=2)
    for made in (block.rowwise, block.columnwise, grouped, routing):
        fields = in_numpys(made.__getstate__())
        for again in (type(made)(**fields), type(made)._of(**fields) if isinstance(made, Scaled)
                      else type(made)._of_fields(**fields)):
            fp8.save(tmp_path / "q.npz", q=again)
            assert fp8.load(tmp_path / "q.npz")["q"] == made
    layout: Any = np.str_("compact")
    same_again(tmp_path / "q.npz", {"q": fp8.quantize_block(x, scale_layout=layout)})
