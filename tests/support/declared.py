"""Calls of every op, and what they declare: found by running calls from the table of cases, so that no list
of arguments has to be maintained.

`EXAMPLES` has few calls per op that together declare everything that its cases declare. Each knows the memory
that it reads and writes, by the names used in messages.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from tiers import quick_if
from trees import leaves, map_arrays

import cupy_fp8 as fp8
from cupy_fp8 import cases, testing
from cupy_fp8.arrays import address
from cupy_fp8.calls import call as calls
from cupy_fp8.calls import keys
from cupy_fp8.calls.descriptions import Written
from cupy_fp8.calls.memory import Range
from cupy_fp8.cases import Case, Registration, base
from cupy_fp8.formats import INPUT_DTYPES

_SMALLEST, _LARGEST = 64, 60_000    # elements of an example's arrays
_MOST_ARRAYS = 20                   # most arrays of an example: calls with lists of tensors can have many


@dataclass(frozen=True, eq=False)
class Example:
    """A call with a result to write into, unless the op updates its arguments.

    declared : the memory of its arguments and of its result, in this call
    quick : whether the quick tier has it
    """

    op: Registration
    case: Case
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    declared: tuple[Range, ...]
    quick: bool

    @property
    def tree(self) -> tuple[Any, Any, Any]:
        return self.args, self.kwargs, self.out

    def named(self) -> dict[str, Any]:
        """Return the arrays that the call declares, by name."""
        return _named(self.tree, self.declared)

    @property
    def written(self) -> set[str]:
        return {name for found in self.declared if found.written
                for name in (found.name, found.name.partition("[")[0])}

    @property
    def result(self) -> list[Any]:
        """Return the arrays of the result, except arguments in it."""
        arguments = {id(a) for a in leaves((self.args, self.kwargs))}
        return [a for a in leaves(self.out) if id(a) not in arguments]

    @property
    def updates(self) -> bool:
        """Whether the call updates an argument and returns it, so that repeating the call has another
        input."""
        return bool(self.op.updates) or not self.result

    def poison(self) -> None:
        for a in self.result:
            cases.poison(a)

    def with_tree(self, tree: Any) -> Example:
        args, kwargs, out = tree
        return replace(self, args=args, kwargs=kwargs, out=out)

    def fresh(self) -> Example:
        """Return the same call with new arrays, and poison in the result."""
        found = self.with_tree(map_arrays(self.tree, lambda a: _copy(a)))
        found.poison()
        return found.declare()

    def on(self, run: testing.Executor) -> Example:
        """Return the same call with arrays on an executor."""
        return self.with_tree(map_arrays(self.fresh().tree, run.array)).declare()

    def declare(self) -> Example:
        return replace(self, declared=tuple(_valid(self.call)[0]))

    def call(self) -> Any:
        out = {} if self.op.updates else {"out": self.out}
        return self.op.function(*self.args, **self.kwargs, **out)

    def __str__(self) -> str:
        return str(self.case)


class _Validated(Exception):
    """Ends a call that has passed validation."""


def _never(*_: Any) -> None:
    """Stands in for `describe`: no call is found among the remembered ones."""


def _copy(a: np.ndarray) -> np.ndarray:
    """Return a writable copy of an array with the same strides."""
    copied = np.empty_like(a)
    copied[...] = a
    return copied


def _valid(call: Callable[[], Any]) -> tuple[list[Range], list[Written]]:
    """Return the memory that a call declares, and the arrays that it writes; nothing if it does not go
    through `calls.run`. The call ends before anything is written."""
    ranges: list[Range] = []
    written: list[Written] = []

    def noted(op: Any, given: Any, out: Any) -> Any:
        declared, _, result, _ = validate(op, given, out)
        ranges.extend(declared.memory_ranges)
        written.extend(result.arrays)
        raise _Validated

    validate = calls.validate_call
    with (mock.patch.object(calls, "validate_call", noted), mock.patch.object(keys, "key_of", _never),
          suppress(_Validated)):
        call()
    return ranges, written


def _named(tree: Any, declared: Iterable[Range]) -> dict[str, Any]:
    """Return the declared arrays by name; an array of which parts are declared gets the name before the
    brackets."""
    arrays = list(leaves(tree))
    by_place = {(address(a), a.nbytes): a for a in arrays}
    found = {}
    for one in declared:
        if (a := by_place.get((one.start, one.end - one.start))) is not None:
            # An array with a part for each member of a list has one name, even if the list has one member.
            whole = any(a is value for value in tree[1].values())
            found[one.name.partition("[")[0] if whole else one.name] = a
        elif one.start < one.end:
            around = (a for a in arrays if address(a) <= one.start and one.end <= address(a) + a.nbytes)
            found.update({one.name.partition("[")[0]: a for a in around})
    return found


def examples_of(op: Registration) -> Iterator[tuple[str, Example]]:
    """Yield few contiguous cases, with what they were chosen for: first cases that together declare every
    pair of names; then those that declare another set of names, or have another non-numeric option, or
    another axis; then those that align groups with other blocks of scales in one direction or both."""
    found = list(_described(op))
    chosen: list[_Described] = []
    for kind in ("pairs", "facts", "aligned"):
        facts = [(one, getattr(one, kind)) for one in found]
        missing = set[Any]().union(*(shown for _, shown in facts))
        missing -= set[Any]().union(*(shown for one, shown in facts if one in chosen))
        while missing:
            best, shown = max(facts, key=lambda one: (len(one[1] & missing), -one[0].size))
            missing -= shown
            chosen.append(best)
            yield kind, example_of(op, best.case, quick=kind == "pairs")


class _Described(NamedTuple):
    """A case, the elements of its arguments, and what it would show as an example."""

    case: Case
    size: int
    pairs: set[Any]                 # pairs of names that it declares
    facts: set[Any]                 # the set of its names, and its options
    aligned: set[Any]               # block of its scales and a direction, if its groups are aligned


def _described(op: Registration) -> Iterator[_Described]:
    for case in op.cases():
        if case.layout != "contiguous" or 0 in case.shape or _is_special(case.options):
            continue
        with base.values_made_by(base.zeros):
            args, kwargs = op.inputs(case)
        sizes = [a.size for a in leaves((args, kwargs))]
        size = sum(sizes)
        if not _SMALLEST <= size <= _LARGEST:
            continue
        ranges, written = _valid(functools.partial(op.function, *args, **kwargs))
        for name, a in _named((args, kwargs), ranges).items():
            DTYPES_OF_CASES.setdefault((op.name, name.partition("[")[0]), set()).add(a.dtype)
        # Empty arrays on a GPU share one address, and so have no name of their own.
        if 0 in sizes or not all(one.nbytes for one in written):
            continue
        names = {one.name for one in ranges} | {one.name for one in written}
        if len(names) <= _MOST_ARRAYS and (written or any(one.written for one in ranges)):
            options = {(name, value) for name, value in case.options.items()
                       if isinstance(value, (str, tuple, bool)) or name == "axis"}
            scales = case.options.get("block"), case.options.get("columnwise", False)
            yield _Described(case, size, set(product(names, names)), {frozenset(names), *options},
                             {scales} if case.options.get("align", 1) > 1 else set())


def _is_special(options: dict[str, Any]) -> bool:
    """Whether rows of `out` are an option (of unpad_groups), or the case's function reverses scales or puts
    them elsewhere in memory."""
    return options.get("exact") is False or options.get("stored") == "columns" or "scales_at" in options


def example_of(op: Registration, case: Case, quick: bool) -> Example:
    """Return the call of a case, as an example."""
    args, kwargs = op.inputs(case)
    before = [(a, a.copy()) for a in leaves((args, kwargs))]
    out = None if op.updates else op.function(*args, **kwargs)
    for a, contents in before:                              # the call may have raised an amax
        a[...] = contents
    public = getattr(fp8, op.name, op.function)
    if "noop" in inspect.signature(public).parameters:
        kwargs = {**kwargs, "noop": np.zeros(1, np.float32)}
    return Example(op, case, args, kwargs, out, (), quick).fresh()


def _group_quantize(*args: Any, amax: Any = None, **options: Any) -> Any:
    return fp8.group_quantize(*args, amaxes=amax, **options)


def in_contract(op: Registration) -> Registration:
    """Return the op as users call it. If results hold arguments, the registered function copies these into a
    given result."""
    direct = {"group_quantize": _group_quantize, "scaling_aware_transpose": fp8.scaling_aware_transpose}
    return replace(op, function=direct.get(op.name, op.function))


def takes_the_one_path(op: Registration) -> bool:
    args, kwargs = op.inputs(next(op.cases()))
    return bool(_valid(functools.partial(op.function, *args, **kwargs))[0])


#: By the names of an op and of an argument; lists without an index.
DTYPES_OF_CASES: dict[tuple[str, str], set[np.dtype[Any]]] = {}
_CHOSEN = [chosen for op in map(in_contract, cases.OPS.values()) if takes_the_one_path(op)
           for chosen in examples_of(op)]
#: Few calls per op. Those with groups aligned in other ways are for tests of sizes.
EXAMPLES = [example for kind, example in _CHOSEN if kind != "aligned"]
ALIGNED = [example for kind, example in _CHOSEN if kind == "aligned"]
DTYPES_OF_CASES["multi_cast_transpose", "xs"].update(INPUT_DTYPES)       # no case has float16


def every_example_that(wanted: Callable[[Example], bool]) -> pytest.MarkDecorator:
    chosen = quick_if(lambda example: example.quick, filter(wanted, EXAMPLES))
    return pytest.mark.parametrize("example", chosen, ids=str)


every_example = every_example_that(lambda example: True)
every_result = every_example_that(lambda example: not example.updates)
every_noop = every_example_that(lambda example: "noop" in example.kwargs)
