"""What splits_to_offsets refuses, before one byte is written: sizes, options and outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from moe_arrays import on_the_cpu
from moe_arrays import refused as refused_call

import cupy_fp8 as fp8
from cupy_fp8 import backend

SPLITS = np.array([3, 0, 5], np.int64)
MOST = 2**63 - 1
TWO: dict[str, Any] = {"strides": (1, 2)}
AGAIN = "in memory; results need memory of their own$"
MEMORY = np.full(20, 3, np.int64)


def full(*dtypes: Any) -> list[np.ndarray]:
    """Outputs for SPLITS."""
    return [np.full(4, 7, dtype) for dtype in dtypes or (np.int64,)]


def odd() -> np.ndarray:
    """An int64 array at an odd multiple of 4 bytes."""
    buffer = np.zeros(48, np.uint8)
    lead = -buffer.ctypes.data % 8 + 4
    return buffer[lead:lead + 32].view(np.int64)


def each(error: type[Exception], message: str, option: str, values: Any, **options: Any) -> list[Any]:
    """Every value of an option is refused in the same way."""
    return [(error, message, SPLITS, {**options, option: value}) for value in values]


def of_splits(error: type[Exception], message: str, *values: Any, **options: Any) -> list[Any]:
    return [(error, message, value, {"outputs": full(), **options}) for value in values]


def overlapping(message: str, splits: np.ndarray, *outputs: np.ndarray) -> tuple[Any, ...]:
    return ValueError, f"{message} {AGAIN}", splits, {"strides": (1,) * len(outputs),
                                                      "outputs": list(outputs)}


class Wrong:
    """An object that no option takes, with a name that does not change."""

    def __repr__(self) -> str:
        return "Wrong()"


OUTPUTS_OF_TWO = full(np.int64, np.int64)
REFUSED: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
    # sizes
    *of_splits(TypeError, "splits: expected a numpy.ndarray or cupy.ndarray, got", 9, "45", {4, 5}, None,
               np.int64(3)),
    *of_splits(TypeError, "splits: expected dtype int32, int64, got",
               *(np.zeros(3, dtype) for dtype in (np.float32, np.uint32, np.int16, bool, ">i8"))),
    *of_splits(ValueError, r"splits: expected an array of one dimension, got shape \((|1, 3|3, 1)\)",
               *(np.zeros(shape, np.int64) for shape in ((), (1, 3), (3, 1)))),
    *of_splits(TypeError, "splits: expected integers", [4.0, 5], [[4], [5]]),
    *of_splits(ValueError, "splits: expected integers of 64 bits", [2**63]),
    *of_splits(ValueError, "splits: expected sizes of 0 or more, got -5 for group 1", [14, -5, 2],
               np.array([14, -5, 2])),
    *of_splits(ValueError, rf"splits: output 0 would end with {MOST + 1} \* 1, more than int64 holds$",
               [MOST, 1, 0], np.array([MOST, 1, 0])),
    *of_splits(ValueError,
               r"splits: output 1 would end with 8 \* 268435456, more than int32 holds; ask for int64 there$",
               [3, 0, 5], SPLITS, strides=(1, 2**28), dtypes=("int64", "int32"),
               outputs=full(np.int64, np.int32)),
    # options
    *each(TypeError, "strides: expected integers, one for each output, got", "strides",
          (1, None, 1.5, "ab", (1.0,), (1, "2"), (None,), np.array([1.5]), [[1]]), outputs=full()),
    *(each(ValueError, rf"strides: expected 0 to 2\*\*63 - 1, got {stride} for output 1", "strides",
           [(1, stride)])[0]
      for stride in (-1, -(2**70), 2**63, 2**70)),
    *each(TypeError, "include_leading_zero: expected True or False, got", "include_leading_zero",
          (None, "yes", 2, -1, (True, None), [True, "no"], {}, (True, [])), **TWO, outputs=OUTPUTS_OF_TWO),
    *each(ValueError,
          "include_leading_zero: expected one for all outputs or 2, one for each stride; got [013]",
          "include_leading_zero", ((), (True,), (True, False, True), np.array([True])), **TWO),
    *each(TypeError, "dtypes: expected int32, int64, got", "dtypes",
          (np.float64, "uint32", None, "nope", Wrong(), ">i8", 5, {}, fp8.float8_e4m3fn, ("int32", np.int16),
           [None, "int64"]), **TWO, outputs=OUTPUTS_OF_TWO),
    *each(ValueError, "dtypes: expected one for all outputs or 2, one for each stride; got [013]", "dtypes",
          ((), ("int32",), ["int32"] * 3), **TWO),
    *each(TypeError, "bulk_allocate: expected True or False", "bulk_allocate", (1.0, None, "no")),
    *each(TypeError, "check: expected True or False", "check", (1.0, None, "no")),
    # outputs
    *each(TypeError, r"outputs: expected a list of arrays \(an earlier result\), got", "outputs",
          (np.empty(4, np.int64), 3, "ab", {}, Wrong())),
    *each(ValueError, "outputs: expected 2 arrays, one for each stride, got [013]", "outputs",
          ([], full(), 3 * full()), **TWO),
    *(overlapping(r"outputs\[1\]: overlaps outputs\[0\]", np.ones(4, np.int64), MEMORY[first:first + 5],
                  MEMORY[second:second + 5])
      for first, second in ((0, 0), (0, 4), (4, 0), (9, 5)))]


@on_the_cpu
@pytest.mark.parametrize(("error", "message", "splits", "options"), REFUSED)
def test_refused(error, message, splits, options, run):
    refused_call(error, message, fp8.splits_to_offsets, splits, out_name="outputs", **options)


def test_any_dtype_holds_zeros():
    fp8.splits_to_offsets([MOST, 1, 0], strides=(0,), dtypes="int32")


@pytest.mark.skipif(backend.gpu_problem() is None, reason="there is a GPU")
def test_without_a_gpu_a_list_means_numpy():
    (a,) = fp8.splits_to_offsets([1, 2])
    assert isinstance(a, np.ndarray)
    assert a.tolist() == [0, 1, 3]
