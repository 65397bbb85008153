"""Rows of the benchmark, and calls for host times, that are made from an op's registration alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from .. import testing
from ..cases import ALIGNED_MATRIX, Case, Registration, outputs
from ..cases.base import zeros_for_values
from ..kernels import forced_executor, recording
from .measure import Call, Check, Spec


def specs_of(op: Registration) -> Iterator[Spec]:
    """A row for each of the registration's timed calls."""
    for case in op.timed:
        options = [f"{name}={getattr(value, 'name', value)}" for name, value in case.options.items()]
        label = ", ".join([case.dtype.name, *options])
        yield Spec(op.name, label, case.shape, traffic(op, case), functools.partial(make, op, case))


def traffic(op: Registration, case: Case) -> int:
    """The bytes that a call must move, from the sizes of its arrays. No kernel runs."""
    with forced_executor("host"), recording(), zeros_for_values():
        args, kwargs = op.inputs(case)
        result = op.function(*args, **kwargs)
    return op.moves((args, kwargs), outputs(result, kwargs, op.updates).values())


def make(op: Registration, case: Case) -> tuple[Call, Check]:
    """A call on the GPU over arrays of its own, and a check of what it wrote."""
    call, out = with_out(op, case)

    def check() -> None:
        args, kwargs = op.inputs(case)
        made = out
        if op.updates:  # the timed calls have updated their arguments, so another call is checked
            given, options = testing.Executor("cuda").array_arguments(*op.inputs(case))
            made = op.function(*given, **options)
        desired = outputs(op.reference(*args, **kwargs), kwargs, op.updates)
        for name, array in outputs(made, {}, op.updates).items():
            testing.assert_bytes_equal(array, desired[name])

    return call, check


def with_out(op: Registration, case: Case) -> tuple[Call, Any]:
    """A call that writes a result in place, and this result."""
    args, kwargs = testing.Executor("cuda").array_arguments(*op.inputs(case))
    out = op.function(*args, **kwargs)
    given = {} if op.updates else {"out": out}
    return functools.partial(op.function, *args, **kwargs, **given), out


def host_calls(op: Registration) -> tuple[Call, Call | None]:
    """Calls with an op's smallest matrix that has elements: one that writes in place, and one that
    allocates."""
    sizes: dict[int, Case] = {}
    for case in op.cases():
        if math.prod(case.shape) and len(case.shape) == len(ALIGNED_MATRIX):
            sizes.setdefault(math.prod(case.shape), case)
    case = sizes[min(sizes)] if sizes else next(op.cases())
    args, kwargs = testing.Executor("cuda").array_arguments(*op.inputs(case))
    allocating: Callable[[], Any] = functools.partial(op.function, *args, **kwargs)
    return with_out(op, case)[0], None if op.updates else allocating
