"""The path from a call to a launch that every op takes: `run`.

An op declares its arguments, its result and its launches (`Op`). `run` does the rest, in this order: a call
with the same memory as an earlier one is launched again at once; otherwise arguments are validated, the
result described, `out=` checked or memory allocated, and overlaps refused; then the reference computes, or
kernels are launched, and the call is remembered. Nothing is written before everything is valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from ..arrays import Array, address
from ..kernels import Launch, executor_of
from . import keys, memory, remembered, validate
from .arguments import Call, Input
from .descriptions import Allocation, Description, given_result

__all__ = ["Call", "Input", "Op", "run", "validate_call"]

_Inputs = TypeVar("_Inputs")


class Op(Generic[_Inputs]):
    """What is particular to an op. _Inputs: whatever `arguments` returns, usually a NamedTuple."""

    def arguments(self, call: Call, *given: Any) -> _Inputs:
        """Declare and validate the arguments, in the order in which users give them."""
        raise NotImplementedError

    def result(self, inputs: _Inputs) -> Description:
        """Describe the arrays that the call writes, besides those that it updates. Default: the inputs'
        `result`."""
        described: Description = inputs.result          # type: ignore[attr-defined]
        return described

    def reference(self, inputs: _Inputs) -> Any:
        """Compute the result by NumPy."""
        raise NotImplementedError

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterable[Launch]:
        """Yield the launches that write the result's arrays; written: their addresses, in order."""
        raise NotImplementedError


def run(op: Op[Any], given: tuple[Any, ...], out: Any = None) -> Any:
    """Call an op and return its result, or `out` after writing it."""
    key = None
    try:
        key = keys.key_of(op, given, out)
        known = key and remembered.find(key, out)
    # An option is unhashable, or a list contains itself: the op explains what is wrong with it.
    except (TypeError, ValueError, RecursionError):
        known = key = None
    if key and known and (found := known.run(key[1], given, out)) is not None:
        return found
    call, inputs, result, arrays = validate_call(op, given, out)
    if executor_of(call.xp) == "reference":
        return _by_reference(op, call, inputs, result, out)
    if arrays is None:
        validate.may_allocate(call.x)
        call.allocation = Allocation(call.x, result.arrays)
        arrays, written = call.allocation.make()
    else:
        call.owner, written = next(iter(arrays), None), list(map(address, arrays))
    call.result, call.arrays = result, arrays
    launches = list(op.launches(call, inputs, *written))
    for launch in launches:
        launch.run()
    if key and call.repeatable:
        remembered.remember(key, call, launches, written, out)
    return result.build(arrays) if out is None else out


def validate_call(op: Op[Any], given: tuple[Any, ...],
                  out: Any) -> tuple[Call, Any, Description, Sequence[Array] | None]:
    """Check everything about a call before anything is written. Return the call, the op's inputs, the
    description of its result, and the arrays of a result given as `out=`."""
    call = Call()
    inputs = op.arguments(call, *given)
    result, arrays = op.result(inputs), None
    if out is not None:
        result, arrays, ranges = given_result(result, out, call.x, call.xp)
        call.memory_ranges += ranges
    elif call.noop_at:
        raise ValueError("noop: needs out=, since nothing may be written")
    memory.check_separate(call.memory_ranges)
    return call, inputs, result, arrays


def _by_reference(op: Op[Any], call: Call, inputs: Any, result: Description, out: Any) -> Any:
    if out is None:
        return op.reference(inputs)
    if not call.noop_is_set():
        result.store(out, op.reference(inputs))
    return out
