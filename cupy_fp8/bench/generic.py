"""Rows of the benchmark, and calls for host times, made from an op's registration."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from .. import testing
from ..arrays import address, asnumpy
from ..cases import ALIGNED_MATRIX, Arguments, Case, HostCalls, Registration, outputs, poison
from ..cases.base import RAISED, arrays_in, values_made_by, zeros
from ..kernels import forced_executor, recording
from .data import on_gpu
from .measure import Call, Check, Spec

#: A comparison gets the positional arguments, the options and the result of a timed call. It raises
#: AssertionError unless samples of the result equal the reference's.
Compare = Callable[[tuple[Any, ...], dict[str, Any], Any], None]


def specs_of(op: Registration, compare: Compare | None = None) -> Iterator[Spec]:
    """Yield a row for each of the registration's timed calls. compare: None: the whole result is compared."""
    for label, case, shape in op.timed():
        yield Spec(op.name, label, case.shape if shape is None else shape,
                   functools.partial(traffic, op, case), functools.partial(make, op, case, compare))


def traffic(op: Registration, case: Case) -> int:
    """Return the bytes that a call must move, from the sizes of its arrays. No kernel runs."""
    with forced_executor("host"), recording(), values_made_by(zeros):
        args, kwargs = op.inputs(case)
        result = op.function(*args, **kwargs)
    return op.moves((args, kwargs), outputs(result, kwargs, op.updates))


def make(op: Registration, case: Case, compare: Compare | None = None) -> tuple[Call, Check]:
    """Return a call on the GPU over new arrays, and a check of what it wrote."""
    args, kwargs = arguments = _arguments(op, case)
    starts = {name: asnumpy(kwargs[name]).copy() for name in RAISED if kwargs.get(name) is not None}
    call, out = _with_out(op, arguments)
    if op.updates:
        return call, functools.partial(_check_another, op, case)
    given = {address(a) for value in (*args, *kwargs.values()) for a in arrays_in(value)}
    for a in arrays_in(out):
        if address(a) not in given:  # the check covers what the timed calls write
            poison(a)
    if compare is not None:
        return call, functools.partial(compare, args, kwargs, out)
    return call, functools.partial(_check_all, op, arguments, starts, out)


def _arguments(op: Registration, case: Case) -> Arguments:
    with values_made_by(on_gpu):
        args, kwargs = op.inputs(case)
    return testing.Executor("cuda").array_arguments(args, kwargs)


def _with_out(op: Registration, arguments: Arguments) -> tuple[Call, Any]:
    """Return a call that writes a result in place, and this result."""
    args, kwargs = arguments
    out = op.function(*args, **kwargs)
    given = {} if op.updates else {"out": out}
    return functools.partial(op.function, *args, **kwargs, **given), out


def _check_all(op: Registration, arguments: Arguments, starts: dict[str, Any], out: Any) -> None:
    """Compare all written arrays. starts: initial values of the buffers that a call raises."""
    args, kwargs = arguments
    written = outputs(out, kwargs)
    args, kwargs = _on_host(args, kwargs | starts)
    _compare(op, written, outputs(op.reference(*args, **kwargs), kwargs), (args, kwargs))


def _check_another(op: Registration, case: Case) -> None:
    """Check another call, since the timed calls have updated their arguments."""
    args, kwargs = _arguments(op, case)
    given, options = _on_host(args, kwargs)
    desired = outputs(op.reference(*given, **options), options, op.updates)
    _compare(op, outputs(op.function(*args, **kwargs), kwargs, op.updates), desired, (given, options))


def _on_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    bring = testing.Executor("cuda").numpy
    return tuple(map(bring, args)), {name: bring(value) for name, value in kwargs.items()}


def _compare(op: Registration, actual: dict[str, Any], desired: dict[str, Any], arguments: Arguments) -> None:
    if op.agrees is not None:
        op.agrees(actual, desired, arguments)
        return
    for name, array in actual.items():
        testing.assert_bytes_equal(array, desired[name])


def smallest_calls(op: Registration) -> HostCalls:
    """Return calls with an op's smallest non-empty matrix."""
    sizes: dict[int, Case] = {}
    for case in op.cases():
        if math.prod(case.shape) and len(case.shape) == len(ALIGNED_MATRIX):
            sizes.setdefault(math.prod(case.shape), case)
    case = sizes[min(sizes)] if sizes else next(op.cases())
    args, kwargs = arguments = testing.Executor("cuda").array_arguments(*op.inputs(case))
    allocating: Call = functools.partial(op.function, *args, **kwargs)
    return HostCalls("", _with_out(op, arguments)[0], None if op.updates else allocating)
