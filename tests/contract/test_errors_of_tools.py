"""Functions for files, plots and tests name the wrong parameter in errors, whatever they are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

import cupy_fp8 as fp8

X = np.ones((64, 128), np.float32)
Q = fp8.quantize_mx(X)
ROUTING = fp8.route(np.zeros((64, 2), np.int64) + np.arange(2), num_experts=4)
#: valid for no parameter of WRONG
NONSENSE = [5, 1.5, 10**400, b"x", np.array(1.0), np.ones((2, 2), np.complex64), np.array([None]),
            np.zeros(2, [("a", "f4")]), object(), int, len, {1, 2}, [None], [[1, 2], [3]], ...]
#: a valid call, by the parameter that is given nonsense instead
WRONG: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "path of load": (fp8.load, {}), "path of save": (fp8.save, {"x": X}),
    "path of load_safetensors": (fp8.io.load_safetensors, {}),
    "block of load_safetensors": (fp8.io.load_safetensors, {"path": "x.safetensors"}),
    "path of save_safetensors": (fp8.io.save_safetensors, {"tensors": {"x": X}}),
    "path of read_matrices": (fp8.io.read_matrices, {}),
    "path of log_step": (fp8.diagnostics.log_step, {"step": 1, "tensors": {"w": Q}}),
    "tensors of save_safetensors": (fp8.io.save_safetensors, {"path": "x.safetensors"}),
    "metadata of save_safetensors": (fp8.io.save_safetensors, {"path": "x.safetensors", "tensors": {"x": X}}),
    "block of to_block": (Q.to_block, {}),
    "found of comparison": (fp8.plot.comparison, {}), "log of steps": (fp8.plot.steps, {}),
    "series of curves": (fp8.plot.curves, {"x": [1, 2]}), "series of reports": (fp8.plot.reports, {"x": [1]}),
    "xscale of curves": (fp8.plot.curves, {"x": [1, 2], "series": {}}),
    "rows of bars": (fp8.plot.bars, {}), "form of bars": (fp8.plot.bars, {"rows": {"a": {"b": 1}}}),
    "form of cells": (fp8.plot.cells, {"values": [[1.0]]}),
    "dtypes of format_ranges": (fp8.plot.format_ranges, {}),
    "shape of scale_layout": (fp8.plot.scale_layout, {"layout": "compact"}),
    "layout of scale_layout": (fp8.plot.scale_layout, {"shape": (3, 256)}),
    "block of scale_layout": (fp8.plot.scale_layout, {"shape": (3, 256), "layout": "compact"}),
    "loss of loss_map": (fp8.plot.loss_map, {"report": fp8.diagnostics.blocks(X, Q)}),
    "x of block_ranges": (fp8.plot.block_ranges, {"q": Q}),
    "q of block_ranges": (fp8.plot.block_ranges, {"x": X}),
    "row of block_ranges": (fp8.plot.block_ranges, {"x": X[:5], "q": fp8.quantize_mx(X[:5])}),
    "rows of cells": (fp8.plot.cells, {"values": np.ones((4, 1))}),
    "columns of cells": (fp8.plot.cells, {"values": np.ones((1, 4))}),
    "steps of amax_history": (fp8.plot.amax_history, {"amax": np.ones(4), "limit": np.ones(4)}),
    "align of Routing": (lambda align: replace(ROUTING, align=align), {}),
    "splits of Routing": (lambda splits: replace(ROUTING, splits=splits), {}),
    "ax of curves": (fp8.plot.curves, {"x": [1, 2], "series": {"a": [1, 2]}}),
    "ax of comparison": (fp8.plot.comparison, {"found": fp8.diagnostics.compare(X)}),
    "executor of executor_problem": (lambda executor: fp8.testing.executor_problem(executor), {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_nonsense_is_refused_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parameter = name.split()[0]
    function, options = WRONG[name]
    for wrong in NONSENSE:
        with pytest.raises((TypeError, ValueError), match=rf"^{parameter}[:,\[]"):
            function(**options, **{parameter: wrong})
    assert list(tmp_path.iterdir()) == []


def test_arrays_of_any_dtype_are_joined():
    for dtype in (np.complex64, np.complex128, np.bool_, "U3", [("a", "f4")]):
        a = np.zeros(2, dtype)
        assert fp8.concatenate([a, a]).shape == (4,)
        assert fp8.concatenate([a, a]).dtype == a.dtype


@pytest.mark.parametrize("function", [fp8.load, fp8.io.load_safetensors, fp8.io.read_matrices], ids=str)
def test_a_descriptor_is_no_path(function, tmp_path):
    """Python's `open` takes a number for an open file, and closes it afterwards."""
    with open(tmp_path / "file", "wb") as file:
        with pytest.raises(TypeError, match=r"^path: expected a file name, got int"):
            function(file.fileno())
        file.write(b"open")


@pytest.mark.parametrize("function", [fp8.load, fp8.save, fp8.io.load_safetensors, fp8.io.read_matrices],
                         ids=str)
def test_an_empty_name_is_no_path(function):
    with pytest.raises(ValueError, match=r"^path: expected a file name, got ''"):
        function("")


def test_names_and_raw_of_load_safetensors(tmp_path):
    path = tmp_path / "a.safetensors"
    fp8.io.save_safetensors(path, {"x": X})
    for wrong in (5, object(), np.ones(2, np.float16), [None], [[1]], b"x"):
        with pytest.raises(TypeError, match=r"^names: expected "):
            fp8.io.load_safetensors(path, names=wrong)  # type: ignore[arg-type]
    for wrong in ([1], X, "yes"):
        with pytest.raises(TypeError, match=r"^raw: expected True or False"):
            fp8.io.load_safetensors(path, raw=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [fp8.plot.cells, fp8.plot.amax_history], ids=str)
@pytest.mark.parametrize("wrong", ["x", b"x", [[1, 2], [3]], ["a"], 10**400, np.array(["a"])], ids=str)
def test_what_is_no_number_is_not_drawn(function, wrong):
    first = next(iter(inspect.signature(function).parameters))
    given = [wrong] if function is fp8.plot.cells else [wrong, [1.0]]
    with pytest.raises(TypeError, match=f"^{first}: expected numbers, got "):
        function(*given)


@pytest.mark.parametrize("wrong", [None, 5, "x", b"x"], ids=repr)
def test_what_is_no_list_makes_no_table(wrong):
    with pytest.raises(TypeError, match=r"^head: expected a list"):
        fp8.plot.table(wrong, [["a"]])
    with pytest.raises(TypeError, match=r"^rows: expected a list"):
        fp8.plot.table(["a"], wrong)
    with pytest.raises(TypeError, match=r"^rows\[1\]: expected a list"):
        fp8.plot.table(["a"], [["a"], wrong])


def test_one_amax_for_a_tensor():
    with pytest.raises(ValueError, match=r"^amax: expected one element, got shape \(2,\)"):
        fp8.diagnostics.compare(X, amax=np.ones(2, np.float32))
    with pytest.raises(TypeError, match=r"^dtype: expected a dtype"):
        fp8.testing.arrays(cast(Any, "float9"))
