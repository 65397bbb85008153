"""Every argument of every op, wrong in every way: refused by name before anything is written, or accepted and
computed correctly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from declared import DTYPES_OF_CASES, Example, every_example, every_example_that
from other_results import other_parts, results_of
from perturbed import (
    DTYPES,
    Tensor,
    given,
    layouts,
    named,
    outcome,
    parameters,
    refused,
    right_or_refused,
    shapes,
    with_array,
)
from places import Place
from trees import map_arrays

from cupy_fp8 import Quantized, Scaled
from cupy_fp8.formats import INPUT_DTYPES
from cupy_fp8.kernels import Launch


@pytest.fixture
def never_launched() -> Iterator[None]:
    with mock.patch.object(Launch, "start"):
        yield


def is_optional(example: Example, a: Any) -> bool:
    """Whether an array is a separate argument that may be left out or given as a number."""
    return any(a is value for value in (*example.args[1:], *example.kwargs.values()))


@every_example
def test_not_an_array(example, place, never_launched):
    example = example.on(place.run)
    for name, a in given(example).items():
        values = np.zeros(a.shape, np.float32).tolist()
        for wrong in (None, values, "x", memoryview(b"x"), {}, object(), Tensor(), True, 1j):
            pattern = named(name, name.rpartition(".")[0])
            if not is_optional(example, a) or (wrong is not None and wrong is not values):
                refused(with_array(example, a, wrong), pattern)


@every_example
def test_wrong_dtype(example, place, never_launched):
    """Refused by name, except dtypes that cases have, and results whose bytes an op only moves."""
    example = example.on(place.run)
    for name, a in given(example).items():
        of_cases = DTYPES_OF_CASES.get((example.op.name, name.partition("[")[0]), {a.dtype})
        for dtype in DTYPES:
            if dtype == a.dtype or (dtype.hasobject and place.devices):
                continue
            message = outcome(with_array(example, a, place.array(np.zeros(a.shape, dtype))))
            if message is None:
                assert dtype in of_cases, (name, dtype)
            elif not message.startswith(f"TypeError: {name}: expected"):
                assert re.search(named(*parameters(example)), message), (name, dtype, message)
                assert dtype in of_cases or f"expected dtype {dtype}," in message, (name, dtype, message)


@every_example_that(lambda example: "xs[1]" in example.named())
def test_another_dtype_in_a_list(example, place):
    example = example.on(place.run)
    a = given(example)["xs[1]"]
    for dtype in set(INPUT_DTYPES) - {a.dtype}:
        right_or_refused(with_array(example, a, place.array(np.ones(a.shape, dtype))), named("xs"))


@every_example
def test_wrong_shape(example, place):
    """Refused by the name of an argument or of the result, or a call as valid as the first one."""
    example = example.on(place.run)
    for a in given(example).values():
        for shape in shapes(a.shape):
            wrong = with_array(example, a, place.array(np.zeros(shape, a.dtype)))
            right_or_refused(wrong, named(*parameters(example)))


@every_example
def test_other_layouts(example, place):
    """Input arrays with other strides are copied, read in place, or refused by name; outputs are refused."""
    original = example
    for name, a in given(example).items():
        for how, changed in layouts(a):
            example = original.on(place.run)
            other = with_array(example, given(example)[name], place.array(changed))
            whole = name in {found.name for found in example.declared if found.written}
            must_fail = whole if how != "misaligned" else bool(place.devices)
            if how == "read-only" and place.devices:
                continue
            assert not right_or_refused(other, named(name, name.rpartition(".")[0])) or not must_fail, (
                name,
                how,
            )


def other_arguments(example: Example, others: Callable[[Any], Iterable[tuple[str, Any]]],
                    place: Place) -> Iterator[tuple[str, Example]]:
    """Yield the call with others in place of each of its results, with a copy of everything for each."""
    for i, a in enumerate(example.args):
        if isinstance(a, (Scaled, Quantized)):
            for how, other in others(a):
                args = (*example.args[:i], other, *example.args[i + 1:])
                tree = args, example.kwargs, example.out
                yield how, example.with_tree(map_arrays(tree, lambda a: place.run.array(a.copy(order="K"))))


def has_results(example: Example) -> bool:
    return any(isinstance(a, (Scaled, Quantized)) for a in example.args)


@every_example_that(has_results)
def test_other_results(example, place):
    """Data quantised in another way are read as what they are, or refused."""
    for how, other in other_arguments(example, lambda a: results_of(a.shape), place):
        right_or_refused(other, named(*parameters(example)), how)


def wrong_parts(a: Scaled | Quantized) -> Iterator[tuple[str, Any]]:
    """Yield data with inconsistent parts. Those of a square matrix are consistent however they are stored;
    columns of groups are an operand without rows."""
    fits = [".transposed="] if a.shape[-2:-1] == a.shape[-1:] else []
    if isinstance(a, Quantized) and a._column is not None and a._column.splits is not None:
        fits.append(".rowwise")
    return ((how, other) for how, other in other_parts(a) if not any(each in how for each in fits))


@every_example_that(has_results)
def test_parts_that_do_not_fit(example, place):
    """Impossible with the constructors of results, but a copy of a result changed by hand may have them."""
    for how, wrong in other_arguments(example, wrong_parts, place):
        refused(wrong, named(*parameters(example)), how)
