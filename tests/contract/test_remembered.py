"""Repeated calls: changes since the last call are noticed, and nothing that the caller owns is kept."""

from __future__ import annotations

import gc
import importlib
import inspect
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from typing import Any
from unittest import mock

import numpy as np
import pytest
from declared import Example, every_example, every_result
from perturbed import (
    DTYPES,
    anew,
    change_contents,
    compare,
    given,
    on_host,
    outcome,
    strided,
    turn_round,
    turned,
    with_array,
)
from tiers import needs_host, where_kernels_run
from trees import leaves, map_arrays

import cupy_fp8 as fp8
from cupy_fp8 import cases, reference, testing
from cupy_fp8.arrays import bits, is_contiguous
from cupy_fp8.calls import call, descriptions, remembered
from cupy_fp8.formats import bfloat16
from cupy_fp8.kernels import owner_of

workspace = importlib.import_module("cupy_fp8.kernels.workspace")  # the package has a function of that name


def noticed(known: Example, changed: Example, options_are_equal: bool = False) -> None:
    """Check that after a call a changed one gives the same as without the first."""
    known.call()
    args, kwargs = on_host(known if options_are_equal else changed)
    changed.poison()
    after = outcome(changed)
    if after is None:
        compare(changed, args, kwargs)
    remembered.forget()
    assert outcome(changed) == after


@pytest.fixture
def validate(monkeypatch):
    """Count the calls that are validated, rather than remembered."""
    counted = mock.Mock(side_effect=call.validate_call)
    monkeypatch.setattr(call, "validate_call", counted)
    return counted


@every_example
def test_other_contents(example, device, validate):
    """In the same memory; with a result to write into, and in calls that allocate theirs. Only the first call
    of each form is validated."""
    example = example.on(device.run)
    validate.reset_mock()                                  # `on` has validated a call
    for _ in range(3):
        args, kwargs = on_host(example)
        example.poison()
        example.call()
        compare(example, args, kwargs)
        change_contents(example, device)
        assert validate.call_count == 1
    kept = []                                              # so that every result has memory of its own
    for _ in range(6 if not example.updates else 0):
        args, kwargs = on_host(example)
        kept.append(anew(example))
        compare(example.with_tree((example.args, example.kwargs, kept[-1])), args, kwargs)
        change_contents(example, device)
        assert validate.call_count == 2


@every_example
def test_other_contents_of_arrays_that_are_copied(example, device):
    """Arrays in a layout that kernels cannot read are copied, so their calls are not remembered."""
    original = example
    for name in given(original):
        for change in (strided, turned):
            example = original.on(device.run)
            a = given(example)[name]
            other = device.array(change(fp8.asnumpy(a)))
            held = any(a is b for b in leaves(example.out))  # by the result: only that very array is accepted
            if name in example.written or held or is_contiguous(other):
                continue
            example = with_array(example, a, other)
            for _ in range(4):
                args, kwargs = on_host(example)
                example.call()
                compare(example, args, kwargs)
                change_contents(example, device)
                turn_round(name, other, device)


@every_example
def test_another_dtype_or_shape_of_the_same_memory(example, device):
    example = example.on(device.run)
    for a in given(example).values():
        views = [a.view(dtype) for dtype in DTYPES if dtype.itemsize == a.itemsize and not dtype.hasobject
                 and dtype != a.dtype]
        for view in (*views, a.reshape(-1), a.reshape(a.shape[::-1]), a.reshape(1, *a.shape)):
            noticed(example, with_array(example, a, view))


@needs_host
def test_another_dtype_of_the_same_numpy_memory(validate):
    """Only the dtype distinguishes float16 from bfloat16."""
    x = np.arange(4096, dtype=np.float16).reshape(32, 128)
    with testing.executor("host"):
        out = fp8.quantize_mx(x)
        validate.reset_mock()
        for view in (x, x.view(bfloat16), x):
            testing.assert_bytes_equal(fp8.quantize_mx(view, out=out), reference.quantize_mx(view))
    assert validate.call_count == 2


def other_values(value: Any) -> Iterator[Any]:
    """Yield options that equal a given one but are not identical."""
    if isinstance(value, tuple) and value and all(isinstance(n, int) for n in value):
        yield from (tuple(map(float, value)), tuple(n if n != 1 else True for n in value), list(value))
    elif isinstance(value, (bool, int, float)):
        yield from {type(other): other for other in (bool(value), int(value), float(value), np.float32(value))
                    if other == value}.values()
        if value == 0:
            yield -0.0
    elif isinstance(value, str):
        yield from (value + "x", "".join(value))


@every_result
def test_two_arrays_that_were_one(example, device):
    """In an earlier call, which allocates like this one."""
    example = example.on(device.run)
    for one, other in combinations(given(example).values(), 2):
        if (one.shape, one.dtype) == (other.shape, other.dtype):
            remembered.forget()
            with suppress(TypeError, ValueError):               # not every op takes one array for both
                anew(with_array(example, other, one))
            args, kwargs = on_host(example)
            compare(example.with_tree((example.args, example.kwargs, anew(example))), args, kwargs)


@every_example
def test_options_that_are_equal(example, device):
    """True, 1 and 1.0 are equal and have the same hash; so are 0.0 and -0.0. Not every op takes each of
    them."""
    example = example.on(device.run)
    public = inspect.signature(getattr(fp8, example.op.name, example.op.function)).parameters
    options = {name: p.default for name, p in public.items() if p.default is not p.empty
               and name not in ("out", "check")}
    options |= {name: value for name, value in example.kwargs.items() if name in public}
    taken = list(public)[:len(example.args)]
    for name, value in options.items():
        for other in other_values(value) if name not in taken else ():
            noticed(example, example.with_tree((example.args, {**example.kwargs, name: other}, example.out)),
                    True)


@every_example
def test_numbers_in_the_place_of_arrays(example, device):
    example = example.on(device.run)
    for a in given(example).values():
        if a.size == 1 and outcome(with_array(example, a, 0.5)) is None:
            for before, after in ((0.0, -0.0), (-0.0, 0.0), (1.0, np.float32(1)), (1, 1.0), (0.5, 2)):
                noticed(with_array(example, a, before), with_array(example, a, after))


@every_example
@where_kernels_run
def test_no_array_is_kept_alive(example, run):
    gc.freeze()             # otherwise the collection traverses everything left by earlier tests
    example = example.on(run)
    for _ in range(2):
        example.call()
        if not example.updates:
            anew(example)
    gone = [weakref.ref(a) for a in leaves(example.tree)]
    del example
    gc.collect()
    assert [a() for a in gone] == [None] * len(gone)


@every_example
def test_an_array_in_the_place_of_one_that_is_gone(example, device):
    """Arrays come and go at the same addresses, as in a pool."""
    cp, example = device.cupy, example.on(device.run)
    workspaces: list[int] = []
    for _ in range(3):
        args, kwargs = on_host(example)
        example.call()
        compare(example, args, kwargs)
        owners = {id(owner_of(a)) for a in example.result}
        workspaces.append(sum(len(workspace._of_results._by_owner.get(owner, (None, ()))[1])
                              for owner in owners))
        assert workspaces[-1] == workspaces[0], "a workspace of a result that is gone"
        change_contents(example, device)
        example = example.with_tree(map_arrays(example.tree, lambda a: cp.ndarray(a.shape, a.dtype, a.data)))
        example.poison()


@every_example
def test_memory_by_turns(example, device):
    """Each array is in one of two places in turn, and the other place holds only poison."""
    copies = [list(leaves(example.on(device.run).tree)) for _ in range(3)]
    example = example.on(device.run)
    places = {id(a): (a, *others) for a, *others in zip(leaves(example.tree), *copies, strict=True)}
    contents = {known: fp8.asnumpy(a[0]).copy() for known, a in places.items()}
    rng = np.random.default_rng(0)

    def move(a: Any) -> Any:
        for place in places[id(a)]:
            cases.poison(place)
        place = places[id(a)][rng.integers(4)]
        bits(place)[...] = bits(device.array(contents[id(a)]))
        return place

    for turn in range(12):
        moved = example.with_tree(map_arrays(example.tree, move))
        args, kwargs = on_host(moved)
        moved.poison()
        if turn % 3 == 2 and not example.updates:
            moved = moved.with_tree((moved.args, moved.kwargs, anew(moved)))
        else:
            moved.call()
        compare(moved, args, kwargs)


@needs_host
@every_example
def test_an_array_made_read_only_between_two_calls(example):
    with testing.executor("host") as run:
        for name in example.written & set(example.named()):
            known = example.on(run)
            known.call()
            known.named()[name].flags.writeable = False
            message = outcome(known)
            assert message is not None
            assert message.startswith(f"ValueError: {name}")
            assert message.endswith(": the array is read-only")


@every_result
def test_results_of_two_calls_share_no_memory(example, device):
    calls = []
    for number in range(3):
        again = example.on(device.run)
        for _ in range(number):
            change_contents(again, device)
        before = on_host(again)
        calls.append((again.with_tree((again.args, {**again.kwargs, "amax": None}, anew(again))), *before))
    for made in calls:
        compare(*made)


@needs_host
def test_new_memory_of_another_alignment(monkeypatch, validate):
    """Launches may rely on the alignment of their outputs, so such a call is prepared like a new one."""
    alignments: list[int] = []
    make = descriptions.Allocation.make

    def aligned(self: descriptions.Allocation) -> tuple[list[Any], list[int]]:
        arrays = []
        for a in make(self)[0]:
            memory = np.empty(a.nbytes + 64, np.uint8)
            start = (alignments[-1] - memory.ctypes.data) % 32
            arrays.append(memory[start:start + a.nbytes].view(a.dtype).reshape(a.shape))
        return arrays, [a.ctypes.data for a in arrays]

    monkeypatch.setattr(descriptions.Allocation, "make", aligned)
    x = np.arange(4096, dtype=np.float32).reshape(32, 128)
    with testing.executor("host"):
        for alignment, made_anew in ((0, 1), (0, 1), (16, 2), (16, 2), (0, 3)):
            alignments.append(alignment)
            testing.assert_bytes_equal(fp8.quantize_mx(x), reference.quantize_mx(x))
            assert validate.call_count == made_anew


@pytest.mark.parametrize("align", [1, 16])
def test_a_list_of_sizes_is_copied_for_every_call(align, device, validate):
    """A call with a list is remembered like one with an array, whatever the sizes, and the array belongs to
    the result."""
    values = np.arange(300 * 16, dtype=np.float32).reshape(300, 16)
    x, sizes = device.array(values), [100, 0, 150]
    for given_sizes in (sizes, sizes, [1, 2, 297], sizes):
        g = fp8.group_quantize(x, given_sizes, fp8.MXScaling(), align=align)
        want = reference.group_quantize(values, np.array(given_sizes), fp8.MXScaling(), align=align)
        for name in ("splits", "offsets", "rowwise", "scale_inv"):
            testing.assert_bytes_equal(fp8.asnumpy(getattr(g, name)), getattr(want, name))
        g.splits[...] = 0                       # changes no later call's sizes
    assert validate.call_count == 1
    with pytest.raises(ValueError, match="splits: expected sizes that add up to at most the 300 rows"):
        fp8.group_quantize(x, [100, 201], fp8.MXScaling())


class _Changing:
    """A number of a user's class, which may change."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class _Float(float):
    pass


@needs_host
def test_options_that_equal_others_or_have_changed():
    """A remembered call distinguishes -0.0 from 0.0 everywhere. A mutable option is read in every call."""
    x, amax = np.ones((2, 256), np.float32), np.full(1, 3.5, np.float32)
    scales = fp8.swizzle_scales(reference.quantize_mx(x).scale_inv)
    margin, rows, shape, block = np.array(0), _Changing(2), np.array([2, 8]), np.array([1, 128])
    zeros: list[Any] = [lambda m, zero: m.multi_cast_transpose([x, x], (zero, 1)),
                        lambda m, zero: m.quantize_tensor(x, _Float(zero))]
    changing: list[Any] = [
        lambda m: m.compute_scale(amax, margin=margin),
        lambda m: m.unswizzle_scales(scales, shape=(rows, 8)),
        lambda m: m.unswizzle_scales(scales, shape=shape),
        lambda m: m.rebase_scales(reference.quantize_mx(x), block=block)]
    with testing.executor("host"):
        for known in zeros:
            known(fp8, 0.0)
            testing.assert_bytes_equal(known(fp8, -0.0), known(reference, -0.0))
        before = [known(fp8) for known in changing]
        margin[...], rows.value, shape[0], block[1] = 3, 1, 1, 64
        for known, earlier in zip(changing, before, strict=True):
            assert not fp8.bytes_equal(known(fp8), earlier)
