"""Offsets of groups from their sizes. Kernel: kernels_cu/moe/offsets.cu."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ... import backend, reference
from ...arrays import Array, empty_beside
from ...calls import validate
from ...calls.splits import DTYPES, Groups, read, refuse_negative
from ...formats import flag, names
from ...kernels import Kernel, Variant, error_word, executor_of, grid_size, workspace
from ...layouts import cdiv, round_up

_OUTPUTS = 16               # of one launch
_KERNEL = Kernel("moe/offsets", "splits_to_offsets")
_THREADS = 512
_TILE = 2 * _THREADS        # sizes per block of threads
_ADDED_ANEW = 8             # tiles up to which every block adds up all sizes before its own; with more there is a launch for that
_INT64_MAX = 2**63 - 1
_ALIGNED = 16               # bytes, where outputs share a buffer


def splits_to_offsets(splits: Any, *, strides: Sequence[int] = (1,), include_leading_zero: bool | Sequence[bool] = True,
                      dtypes: Any = np.int64, bulk_allocate: bool = False, outputs: list[Array] | None = None,
                      check: bool = False) -> list[Array]:
    """Where groups that follow one another begin and end, in as many units as there are strides, from one read of their sizes.

        output[i] = stride * (splits[0] + ... + splits[i])            for each stride; exact, never wrapped

    with a 0 before these where it is asked for: group i is then output[i] to output[i + 1].

    Parameters
    ----------
    splits : sizes of N groups, 0 or more each: an int32 or int64 array [N], or a list (for CuPy outputs it is copied to the GPU, which
        cannot be captured into a CUDA graph; where there are no outputs either, it means arrays of `cupy_fp8.xp`)
    strides : integers of 0 or more, one for each output: what an element of a group counts there (rows: 1; elements of a matrix of K
        columns: K; bytes)
    include_leading_zero : whether an output begins with a 0, and has N + 1 elements instead of N; one for all, or one for each
    dtypes : int32 or int64; one for all, or one for each
    bulk_allocate : the outputs are views of one buffer, each beginning at a multiple of 16 bytes: one allocation however many
    outputs : an earlier result (or arrays of these shapes and dtypes), written and returned; needed while a CUDA graph is captured
    check : wait for the device and raise ValueError if sizes there are wrong. (NumPy arrays and lists are always looked at)

    Returns
    -------
    A list of arrays, one for each stride; of a NumPy array NumPy arrays.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Sizes on the device raise nothing: a negative one counts as 0, an
    offset that its dtype does not hold is the dtype's largest value; `device_errors` tells.

    One launch for up to 16 outputs, two for more than 8192 groups. Source: TransformerEngine; docs/numerics.md section 6. Bytes moved:
    the sizes (twice for more than 8192) and the outputs once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> ends, elements = fp8.splits_to_offsets(np.array([3, 0, 5]), strides=(1, 256), include_leading_zero=(False, True),
    ...                                        dtypes=("int32", "int64"))
    >>> ends.tolist(), elements.tolist()
    ([3, 3, 8], [0, 768, 768, 2048])
    """
    if isinstance(outputs, (list, tuple)) and not flag(check, "check"):
        known = _targets.get(tuple(map(id, outputs)))
        if known is not None and known.fits(splits, (strides, include_leading_zero, dtypes)):
            known.launch(splits, splits.data.ptr)
            return outputs
    x, xp = _home(splits, outputs)
    groups = read(splits, x, xp, check)
    options = _each(strides), _unchanging(include_leading_zero), _unchanging(dtypes)
    plan = _plan(groups.number, options)
    if groups.host is not None:
        _check_sizes(groups.host, plan)
    if outputs is None:
        validate.may_allocate(groups.array)
        outputs = plan.empty(groups.array, flag(bulk_allocate, "bulk_allocate"))
        target = _Target(outputs, plan, groups, options, None)
    else:
        target = _validated(outputs, plan, groups, xp, options)
    if executor_of(xp) == "reference":
        for out, values in zip(outputs, reference.splits_to_offsets(groups.host, **plan.options), strict=True):
            out[...] = values
    else:
        target.launch(groups.array, groups.at)
    return outputs


def _home(splits: Any, outputs: Any) -> tuple[Array | None, Any]:
    """(an array that a list of sizes goes beside, or None; the module of the arrays of a call)."""
    if isinstance(splits, np.ndarray):
        return None, np
    if not isinstance(splits, (list, tuple)):
        return None, backend.module_of(splits, "splits")
    if isinstance(outputs, (list, tuple)) and outputs:
        return outputs[0], backend.module_of(outputs[0], "outputs[0]")
    return None, backend.default_module()


def _each(strides: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, strides))
    except TypeError as error:
        raise TypeError(f"strides: expected integers, one for each output, got {strides!r} ({error})") from None


def _unchanging(option: Any) -> Any:
    """An option as it can be compared with later: nobody changes it in between."""
    return tuple(option) if isinstance(option, (list, np.ndarray)) else option


# ---- what follows from the options ----
_Options = tuple[tuple[int, ...], Any, Any]


class _Output(NamedTuple):
    stride: int
    lead: bool
    dtype: np.dtype[Any]
    length: int

    @property
    def largest(self) -> int:
        return int(np.iinfo(self.dtype).max)

    def packed(self, at: int) -> bytes:
        """The Output of kernels_cu/moe/offsets.cu."""
        limit = self.largest // self.stride if self.stride else 2**64 - 1
        return _KERNEL.record("Output").pack(to=at, stride=self.stride, limit=limit, wide=int(self.dtype.itemsize == 8),
                                              lead=int(self.lead))


class _Plan:
    """What follows from the number of sizes and the options."""

    def __init__(self, number: int, strides: tuple[int, ...], leads: Any, dtypes: Any) -> None:
        for i, stride in enumerate(strides):
            if not 0 <= stride <= _INT64_MAX:
                raise ValueError(f"strides: expected 0 to 2**63 - 1, got {stride} for output {i}")
        self.outputs = tuple(
            _Output(stride, _lead(lead), _dtype(dtype), number + _lead(lead)) for stride, lead, dtype in zip(
                strides, _one_for_each(leads, len(strides), "include_leading_zero"), _one_for_each(dtypes, len(strides), "dtypes"),
                strict=True))
        #: Of the reference.
        self.options: dict[str, Any] = {"strides": strides, "include_leading_zero": tuple(o.lead for o in self.outputs),
                                        "dtypes": tuple(o.dtype for o in self.outputs)}
        self.tiles = max(1, cdiv(number, _TILE))
        self.by_totals = self.tiles > _ADDED_ANEW

    def empty(self, x: Array, bulk: bool) -> list[Array]:
        """Outputs beside x, uninitialised."""
        if not bulk or not self.outputs:
            return [empty_beside(x, (output.length,), output.dtype) for output in self.outputs]
        starts, end = [], 0
        for output in self.outputs:
            starts.append(round_up(end, _ALIGNED))
            end = starts[-1] + output.length * output.dtype.itemsize
        buffer = empty_beside(x, (end + _ALIGNED - 1,), np.dtype(np.uint8))
        lead = -validate.address(buffer) % _ALIGNED
        return [buffer[lead + start:lead + start + output.length * output.dtype.itemsize].view(output.dtype)
                for start, output in zip(starts, self.outputs, strict=True)]


_cached_plan = functools.lru_cache(maxsize=1024)(_Plan)


def _plan(number: int | None, options: _Options) -> _Plan:
    assert number is not None
    try:
        return _cached_plan(number, *options)
    except TypeError:                                       # an option that is not even hashable: _Plan says which
        return _Plan(number, *options)


def _one_for_each(option: Any, number: int, name: str) -> tuple[Any, ...]:
    if not isinstance(option, tuple):
        return (option,) * number
    if len(option) != number:
        raise ValueError(f"{name}: expected one for all outputs or {number}, one for each stride; got {len(option)}")
    return option


def _lead(value: Any) -> bool:
    if value not in (False, True):
        raise TypeError(f"include_leading_zero: expected True or False, got {value!r}")
    return bool(value)


def _dtype(given: Any) -> np.dtype[Any]:
    try:
        dtype = None if given is None else np.dtype(given)      # NumPy would take None as float64
    except (TypeError, ValueError):
        dtype = None
    if dtype not in DTYPES:
        raise TypeError(f"dtypes: expected {names(DTYPES)}, got {given!r}")
    return dtype


def _check_sizes(sizes: np.ndarray, plan: _Plan) -> None:
    """ValueError unless all sizes are 0 or more, and all offsets are what their dtypes hold."""
    given = sizes.tolist()                                  # Python's integers: sums do not overflow
    refuse_negative(given)
    total = sum(given)
    for i, output in enumerate(plan.outputs):
        if total * output.stride > output.largest:
            raise ValueError(f"splits: output {i} would end with {total} * {output.stride}, more than {output.dtype} holds"
                             f"{'; ask for int64 there' if output.dtype.itemsize == 4 else ''}")


# ---- launches ----
class _Target:
    """Where launches write, and with what members of OffsetsParams. Kept for as long as the outputs live, so that using them again costs
    a few comparisons instead of their validation."""

    def __init__(self, outputs: Sequence[Array], plan: _Plan, groups: Groups, options: _Options, owner: Array | None) -> None:
        """owner: the array that workspace belongs to (see `workspace`)."""
        x = groups.array
        addresses = [validate.address(a) for a in outputs]
        packed = [output.packed(at) for output, at in zip(plan.outputs, addresses, strict=True)]
        #: Runs of memory that are written, and what they are called. All of them lie between `low` and `high`.
        self.written = [(at, a.nbytes, f"outputs[{i}]") for i, (a, at) in enumerate(zip(outputs, addresses, strict=True)) if a.nbytes]
        self.low = min((at for at, _, _ in self.written), default=0)
        self.high = max((at + nbytes for at, nbytes, _ in self.written), default=0)
        #: What calls are like for which this is the target.
        self.type, self.shape, self.dtype, self.options = type(x), x.shape, x.dtype, options
        self.device = None if isinstance(x, np.ndarray) else x.data.device_id
        self.separate_at = groups.at                        # where sizes have been found to overlap no output
        self.variant = _variant()
        self.totals = workspace(owner, x, "offsets", 2 * plan.tiles) if plan.by_totals and packed else None
        members = groups.number, error_word(x), groups.wide, 0 if self.totals is None else validate.address(self.totals), plan.tiles
        #: The blocks of each, and the members of its struct after the address of the sizes.
        self.launches: list[tuple[int, tuple[Any, ...]]] = [] if self.totals is None else [(plan.tiles, (*members, 0, 0, b""))]
        for first in range(0, len(packed), _OUTPUTS):
            some = packed[first:first + _OUTPUTS]
            per_block = len(some) if plan.by_totals else 1
            blocks = grid_size(plan.tiles * cdiv(len(some), per_block), x.shape)
            self.launches.append((blocks, (*members, len(some), per_block, b"".join(some))))

    def fits(self, splits: Any, options: Any) -> bool:
        """Whether these sizes and options need no further look."""
        if type(splits) is not self.type or splits.shape != self.shape or splits.dtype != self.dtype or not splits._c_contiguous:
            return False
        try:
            if options != self.options:
                return False
        except ValueError:                                  # NumPy does not say whether an array is a tuple's equal
            return False
        memory = splits.data
        at = memory.ptr
        return memory.device_id == self.device and (at == self.separate_at or (
            at % splits.dtype.itemsize == 0 and (at >= self.high or at + splits.nbytes <= self.low)))

    def launch(self, x: Array, at: int) -> None:
        for blocks, members in self.launches:
            self.variant.launch(x, blocks, at, *members)


#: Targets of CuPy arrays by the identities of the outputs. Arrays that die take their entry along.
_targets: dict[tuple[int, ...], _Target] = {}
_ends: dict[tuple[int, ...], list[weakref.ref[Any]]] = {}


def _validated(outputs: Sequence[Array], plan: _Plan, groups: Groups, xp: Any, options: _Options) -> _Target:
    """The target of outputs given by the caller, once they have been found to fit."""
    if not isinstance(outputs, (list, tuple)):
        raise TypeError(f"outputs: expected a list of arrays (an earlier result), got {type(outputs).__name__}")
    if len(outputs) != len(plan.outputs):
        raise ValueError(f"outputs: expected {len(plan.outputs)} arrays, one for each stride, got {len(outputs)}")
    for i, (a, output) in enumerate(zip(outputs, plan.outputs, strict=True)):
        validate.writable(a, (output.length,), output.dtype, groups.array, xp, f"outputs[{i}]")
    target = _Target(outputs, plan, groups, options, outputs[0] if outputs else None)
    for at, nbytes, name in target.written:
        validate.separate(at, nbytes, groups.at, groups.nbytes, name, "splits")
    for (at, nbytes, name), (next_at, next_nbytes, next_name) in pairwise(sorted(target.written)):
        validate.separate(next_at, next_nbytes, at, nbytes, next_name, name)
    if outputs and xp is not np:
        ids = tuple(map(id, outputs))
        _targets[ids] = target
        _ends[ids] = [weakref.ref(a, functools.partial(_forget, ids)) for a in outputs]
    return target


def _forget(ids: tuple[int, ...], _: Any) -> None:
    _targets.pop(ids, None)
    _ends.pop(ids, None)


@functools.cache
def _variant() -> Variant:
    return _KERNEL.variant(block=_THREADS)


def variants() -> Iterator[Variant]:
    """Every variant that this op may launch."""
    yield _variant()
