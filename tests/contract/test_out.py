"""Every wrong form of `out=`: another kind of result, a part too many or too few, and every array of it wrong
in every way."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from declared import EXAMPLES, Example, every_example, every_example_that, every_result
from other_results import other_parts
from perturbed import (
    DTYPES,
    LAYOUTS,
    Tensor,
    compare,
    named,
    on_host,
    refused,
    results,
    right_or_refused,
    shapes,
    with_array,
)

import cupy_fp8 as fp8
from cupy_fp8 import cases, testing
from cupy_fp8.arrays import Result, address, is_array
from cupy_fp8.cases import DIRECTIONS
from cupy_fp8.formats import float8_e5m2, float32

#: a result of each type that ops return
RESULTS = {type(example.out): example for example in EXAMPLES if example.out is not None}
OUT = named("out")


def with_out(example: Example, out: Any) -> Example:
    return example.with_tree((example.args, example.kwargs, out))


@every_result
def test_another_kind_of_result(example, place):
    example = example.on(place.run)
    others = [other.on(place.run).out for kind, other in RESULTS.items() if kind is not type(example.out)]
    for wrong in (*others, [], (), [1], 1.0, "out", {}, object(), Tensor()):
        if type(wrong) is not type(example.out):
            refused(with_out(example, wrong), OUT)


def make_again(made: Any, in_groups: bool) -> None:
    """Use the public constructors, which check what calls leave unchecked. in_groups: the scales of a Scaled
    are those of groups, which constructors do not accept."""
    if isinstance(made, (list, tuple)):
        for part in made:
            make_again(part, in_groups)
    elif isinstance(made, Result):
        state = made.__getstate__()
        assert set(state) == {field.name for field in dataclasses.fields(made)}     # type: ignore[arg-type]
        make_again(list(state.values()), in_groups)
        if not (in_groups and isinstance(made, fp8.Scaled)):
            type(made)(**state)


@every_result
def test_new_results_are_valid(example, place):
    """Of a first call, and of a remembered one."""
    example = example.on(place.run)
    options = {name: value for name, value in example.kwargs.items() if name != "noop"}
    for _ in range(2):
        make_again(example.op.function(*example.args, **options), options.get("splits") is not None)


@every_result
def test_other_parts(example, place):
    example = example.on(place.run)
    for how, wrong in other_parts(example.out):
        accepted = right_or_refused(with_out(example, wrong), OUT, how)
        assert not accepted or (how == "turned" and isinstance(wrong, list)), how   # of arrays that are alike


@every_example_that(lambda example: isinstance(example.out, fp8.Quantized))
def test_a_part_that_was_not_asked_for(example, place):
    example = example.on(place.run)
    fields = example.out.__getstate__()
    for name, value in fields.items():
        if value is None:
            part = example.out._any
            wrong = fp8.Quantized._of(**{**fields, name: part.scale_inv if name == "dbias" else part})
            refused(with_out(example, wrong), OUT, name)


@every_example
def test_not_an_array(example, place):
    example = example.on(place.run)
    for name, a in results(example).items():
        for wrong in (None, [[1]], 1.0, np.float32(1), "x", memoryview(b"x"), {}, object(), Tensor()):
            if wrong is None:
                if a is not example.out:
                    refused(with_array(example, a, wrong), OUT)
            else:
                refused(with_array(example, a, wrong), named(name))


@every_example
def test_wrong_dtype_and_shape(example, place):
    example = example.on(place.run)
    for name, a in results(example).items():
        for dtype in DTYPES:
            if dtype != a.dtype and not (dtype.hasobject and place.devices):
                refused(with_array(example, a, place.array(np.zeros(a.shape, dtype))),
                        named(name) + "expected dtype ")
        for shape in shapes(a.shape):
            accepted = right_or_refused(with_array(example, a, place.array(np.zeros(shape, a.dtype))),
                                        named(name) + "expected ")
            assert not accepted or (a.size == np.prod(shape) == 1 and a is example.out), (name, shape)


MESSAGES = {
    "strided": r"expected a C-contiguous array, got strides \(.*\); make one with cupy_fp8.empty$",
    "read-only": "the array is read-only$",
    "misaligned": r"address 0x[0-9a-f]+ is not a multiple of (the element size )?\d$",
}


@every_example
@pytest.mark.parametrize("how", LAYOUTS)
def test_other_layouts(example, how, place):
    example = example.on(place.run)
    for name, a in results(example).items():
        original = np.zeros(a.shape, a.dtype)
        changed = LAYOUTS[how](original) if a.ndim and a.size else original
        differs = (not changed.flags.c_contiguous or not changed.flags.writeable
                   or changed.ctypes.data % a.itemsize)
        if differs and not (how == "read-only" and place.devices):
            other = with_array(example, a, place.array(changed))
            taken = right_or_refused(other, named(name) + MESSAGES.get(how, MESSAGES["strided"]))
            assert not taken or (how == "turned" and example.op.name == "unswizzle_scales"), name


@every_result
def test_a_result_is_written_in_place(example, place):
    """Twice: in a first call, and in a remembered one. No object or address in the result changes."""
    example = example.on(place.run)
    before = [(id(a), address(a)) for a in results(example).values()]
    for _ in range(2):
        args, kwargs = on_host(example)
        example.poison()
        result = example.call()
        assert example.op.updates or result is example.out
        compare(example, args, kwargs)
        assert [(id(a), address(a)) for a in results(example).values()] == before


@every_example
def test_an_array_that_two_parts_share(example, place):
    """If given as two arrays, both are written, or the result is refused."""
    example = example.on(place.run)
    right_or_refused(with_out(example, unshared(example.out)), OUT)


def unshared(out: Any) -> Any:
    """Return the same result with separate arrays in its parts."""
    if isinstance(out, tuple):
        return tuple(map(unshared, out))
    if isinstance(out, Result):
        fields = {name: unshared(part) for name, part in out.__getstate__().items()}
        made = object.__new__(type(out))
        made.__dict__.update(fields)
        return made
    return fp8.empty_like(out) if is_array(out) else out


RECIPES: list[Any] = [
    fp8.DelayedScaling(),
    fp8.CurrentScaling(float8_e5m2),
    fp8.BlockScaling(),
    fp8.MXScaling(),
]


@pytest.mark.parametrize("directions", DIRECTIONS[:3], ids=lambda d: "-".join(k for k, on in d.items() if on))
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_results_that_recipes_make(recipe, directions, place):
    x = place.array(cases.values("normal", (33, 140), float32))
    scale = {"scale": 2.0} if isinstance(recipe, fp8.DelayedScaling) else {}
    out = recipe.empty(x.shape, like=x, **directions)
    assert recipe.quantize(x, out=out, **scale, **directions) is out
    want = recipe.quantize(fp8.asnumpy(x), **scale, **directions)
    testing.assert_bytes_equal(place.run.numpy(out), want)
