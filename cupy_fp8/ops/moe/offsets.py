"""Offsets of groups from their sizes. Kernel: kernels_cu/moe/offsets.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ... import advice, backend, reference
from ...advice import shown, without_rest
from ...arrays import Array, address, check_dimensions, empty_beside, is_contiguous, is_sequence
from ...calls import group_sizes
from ...calls.call import Call, Op, run
from ...calls.descriptions import Description, Written
from ...calls.group_sizes import Groups, check_at_most, check_offsets, none_negative
from ...calls.tables import Records
from ...formats import SIZE_DTYPES, as_dtype, flag, integers, names
from ...kernels import Kernel, Launch, Variant, grid_size
from ...layouts import cdiv, round_up
from ...methods import for_methods
from ...typed_array import TypedArray

_THREADS = 512
_KERNEL = Kernel("moe/offsets", "splits_to_offsets", block=_THREADS)
_TILE = 2 * _THREADS        # sizes per block of threads
#: Most tiles for which each thread block adds up all sizes before its own. With more, another launch finds
#: the totals first.
_ADDED_ANEW = 8
_INT64_MAX = 2**63 - 1
_ALIGNED = 16               # bytes: alignment of outputs in a buffer
_WORD = np.dtype(np.int64)  # the elements of a buffer


@without_rest
def splits_to_offsets(splits: Any, *, strides: Sequence[int] = (1,),
                      include_leading_zero: bool | Sequence[bool] = True, dtypes: Any = np.int64,
                      bulk_allocate: bool = False, out: list[Array] | None = None,
                      check: bool = False, **renamed: NoReturn) -> list[TypedArray]:
    """Find where consecutive groups begin and end, in one unit for each stride, from one read of their sizes.

        output[i] = stride * (splits[0] + ... + splits[i])            for each stride; exact, never wrapped

    With include_leading_zero a 0 comes first: group i then reaches from output[i] to output[i + 1].

    Parameters
    ----------
    splits : sizes of N groups, 0 or more each: an int32 or int64 array [N], or a list (for CuPy outputs it is
        copied to the GPU, which cannot be captured into a CUDA graph; without outputs it means arrays of
        `cupy_fp8.xp`)
    strides : integers of 0 or more, one for each output: what an element of a group counts there (rows: 1;
        elements of a matrix of K columns: K; bytes)
    include_leading_zero : whether an output begins with a 0, and has N + 1 elements instead of N; one for
        all, or one for each
    dtypes : int32 or int64; one for all, or one for each
    bulk_allocate : the outputs are views of one buffer, each beginning at a multiple of 16 bytes
    out : an earlier result (or arrays of these shapes and dtypes), written and returned; needed while a
        CUDA graph is captured
    check : wait for the device and raise ValueError if sizes there are wrong. (NumPy arrays and lists are
        always examined)

    Returns
    -------
    A list of arrays of splits' kind, one for each stride.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Wrong sizes on the device raise nothing,
    but `device_errors` reports them: a negative size counts as 0, and an offset that its dtype cannot hold
    becomes the dtype's largest value.

    One launch for up to 16 outputs, two for more than 8192 groups. Source: TransformerEngine;
    docs/numerics.md section 6. Bytes moved: the sizes (twice for more than 8192) and the outputs once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> ends, elements = fp8.splits_to_offsets(np.array([3, 0, 5]), strides=(1, 256),
    ...                                        include_leading_zero=(False, True), dtypes=("int32", "int64"))
    >>> ends.tolist(), elements.tolist()
    ([3, 3, 8], [0, 768, 768, 2048])
    """
    if renamed:
        raise advice.renamed("splits_to_offsets", renamed, outputs="out")
    beside = None
    if isinstance(splits, (list, tuple)) and isinstance(out, (list, tuple)) and out:
        beside = out[0]
    options = _options(strides, include_leading_zero, dtypes)
    result: list[Array] = run(_OFFSETS, (splits, beside, options, bulk_allocate, check), out)
    return result


@for_methods
def wrap_groups(data: Array, splits: Any,
                offsets: Array | None) -> tuple[Array, Array, tuple[int, int], Array]:
    """Return the fields of a Grouped for `Grouped.wrap`: splits, offsets, shape and the flat data."""
    xp = backend.module_of(data, "data")
    check_dimensions(data.shape, "data", 2, 2)
    if not is_contiguous(data):
        raise ValueError(f"data: expected a C-contiguous array, got strides {data.strides}; members are "
                         "views of it")
    groups = group_sizes.read(splits, data, xp, False)
    rows, columns = data.shape
    if groups.host is not None:
        check_at_most(groups.host, rows)
    if offsets is None:
        offsets = splits_to_offsets(groups.array, strides=(columns,))[0]
    else:
        check_offsets(offsets, groups, data, xp)
        if groups.host is not None and xp is np:
            group_sizes.compare_offsets(offsets, groups.host, columns)
        offsets = _copied(offsets)
    own = _copied(splits) if groups.array is splits else groups.array
    return own, offsets, (rows, columns), data.reshape(-1)


def _copied(a: Array) -> Array:
    """Return a copy on the same device."""
    copy = empty_beside(a, a.shape, a.dtype)
    with nullcontext() if isinstance(a, np.ndarray) else backend.cupy().cuda.Device(a.data.device_id):
        copy[...] = a
    return copy


# ---- options ----
class _Output(NamedTuple):
    stride: int
    lead: bool
    dtype: np.dtype[Any]

    @property
    def largest(self) -> int:
        return int(np.iinfo(self.dtype).max)

    def written(self, i: int, groups: int) -> Written:
        return Written(f"out[{i}]", (groups + self.lead,), self.dtype)

    def packed(self, at: int) -> bytes:
        """Returns the struct Output."""
        limit = self.largest // self.stride if self.stride else 2**64 - 1
        return _KERNEL.record("Output").pack(to=at, stride=self.stride, limit=limit,
                                             wide=int(self.dtype.itemsize == 8), lead=int(self.lead))


class _Options:
    """Validated options. Equal options are one object, so a call is remembered by its identity."""

    def __init__(self, strides: tuple[int, ...], leads: Any, dtypes: Any) -> None:
        for i, stride in enumerate(strides):
            if not 0 <= stride <= _INT64_MAX:
                raise ValueError(f"strides: expected 0 to 2**63 - 1, got {shown(stride)} for output {i}")
        leads = _one_for_each(leads, len(strides), "include_leading_zero")
        dtypes = _one_for_each(dtypes, len(strides), "dtypes")
        self.outputs = tuple(map(_Output, strides, leads, map(_dtype, dtypes)))


_cached_options = functools.lru_cache(maxsize=1024)(_Options)
_INTEGERS = frozenset((int,))


def _options(strides: Any, leads: Any, dtypes: Any) -> _Options:
    # Usual options are looked up directly. Other kinds of numbers can equal these and be wrong, and lists are
    # unhashable.
    usual = (type(strides) is tuple and type(leads) is bool and _INTEGERS.issuperset(map(type, strides))
             and not isinstance(dtypes, (list, np.ndarray)))
    if not usual:
        strides, leads, dtypes = _integers(strides), _leads(leads), _unchanging(dtypes)
    try:
        return _cached_options(strides, leads, dtypes)
    except (TypeError, ValueError):                 # unhashable dtype: _Options says which one
        return _Options(strides, leads, dtypes)


def _integers(strides: Any) -> tuple[int, ...]:
    try:
        if is_sequence(strides):
            return integers(strides)
    except TypeError:
        pass
    raise TypeError(f"strides: expected integers, one for each output, got {shown(strides)}")


def _unchanging(option: Any) -> Any:
    """Return an option's value, or a tuple of its values, immutable for the caller."""
    is_list = option.ndim if isinstance(option, np.ndarray) else isinstance(option, list)
    return tuple(option) if is_list else option


def _leads(option: Any) -> Any:
    """Return include_leading_zero as a bool or a tuple of bools."""
    option = _unchanging(option)
    return tuple(map(_lead, option)) if isinstance(option, tuple) else _lead(option)


def _lead(value: Any) -> bool:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    return flag(value, "include_leading_zero")


def _one_for_each(option: Any, number: int, name: str) -> tuple[Any, ...]:
    if not isinstance(option, tuple):
        return (option,) * number
    if len(option) != number:
        raise ValueError(f"{name}: expected one for all outputs or {number}, one for each stride; got "
                         f"{len(option)}")
    return option


def _dtype(given: Any) -> np.dtype[Any]:
    dtype = as_dtype(given, "dtypes", names(SIZE_DTYPES))
    if dtype not in SIZE_DTYPES:
        raise TypeError(f"dtypes: expected {names(SIZE_DTYPES)}, got {shown(given)}")
    return dtype


def _check_sizes(sizes: np.ndarray, options: _Options) -> None:
    """Raise ValueError unless all sizes are 0 or more, and every offset fits its dtype."""
    given = none_negative(sizes)
    total = sum(given)
    for i, output in enumerate(options.outputs):
        if total * output.stride > output.largest:
            hint = "; ask for int64 there" if output.dtype.itemsize == 4 else ""
            raise ValueError(f"splits: output {i} would end with {total} * {output.stride}, more than "
                             f"{output.dtype} holds{hint}")


# ---- results ----
class _Arrays(Description):
    """Description of a list of arrays, given by users as `out`."""

    def build(self, arrays: Sequence[Array]) -> list[Array]:
        return list(arrays)

    def arrays_of(self, out: Any) -> Sequence[Array]:
        if not isinstance(out, (list, tuple)):
            raise TypeError("out: expected a list of arrays (an earlier result), got "
                            f"{type(out).__name__}")
        if len(out) != len(self.arrays):
            raise ValueError(f"out: expected {len(self.arrays)} arrays, one for each stride, got "
                             f"{len(out)}")
        return out

    def addresses(self, written: Sequence[int]) -> Sequence[int]:
        """Return the address of each output, from those of the allocated or given arrays."""
        return written


class _Buffer(_Arrays):
    """Description of a list of arrays that are views of one buffer, each at a multiple of 16 bytes."""

    def __init__(self, *views: Written) -> None:
        self._views, self._starts, self._parts, end = views, [], [], 0
        for view in views:
            start, itemsize = round_up(end, _ALIGNED), view.dtype.itemsize
            end = start + view.nbytes
            self._starts.append(start)
            self._parts.append((view.dtype, slice(start // itemsize, end // itemsize)))
        super().__init__(Written("out", (cdiv(end + _ALIGNED, _WORD.itemsize),), _WORD))

    def for_out(self, out: Any) -> Description:
        return _Arrays(*self._views)

    def build(self, arrays: Sequence[Array]) -> list[Array]:
        (buffer,) = arrays
        if lead := -address(buffer) % _ALIGNED:
            buffer = buffer[lead // _WORD.itemsize:]
        seen = {_WORD: buffer}
        for dtype, _ in self._parts:
            if dtype not in seen:
                seen[dtype] = buffer.view(dtype)
        return [seen[dtype][part] for dtype, part in self._parts]

    def addresses(self, written: Sequence[int]) -> Sequence[int]:
        return [round_up(written[0], _ALIGNED) + start for start in self._starts]


# ---- the op ----
class _Inputs(NamedTuple):
    groups: Groups
    options: _Options
    result: _Arrays


class _SplitsToOffsets(Op[_Inputs]):
    def arguments(self, call: Call, splits: Any, beside: Any, options: _Options, bulk_allocate: Any,
                  check: Any) -> _Inputs:
        groups = call.splits("splits", splits, check, beside=beside)
        if groups.host is not None:
            _check_sizes(groups.host, options)
        arrays = [output.written(i, len(groups.array)) for i, output in enumerate(options.outputs)]
        kind = _Buffer if flag(bulk_allocate, "bulk_allocate") else _Arrays
        return _Inputs(groups, options, kind(*arrays))

    def reference(self, inputs: _Inputs) -> list[np.ndarray]:
        outputs = inputs.options.outputs
        made = reference.splits_to_offsets(inputs.groups.host, strides=[o.stride for o in outputs],
                                           include_leading_zero=[o.lead for o in outputs],
                                           dtypes=[o.dtype for o in outputs])
        if not isinstance(inputs.result, _Buffer):
            return made
        views = inputs.result.build([np.empty(a.shape, a.dtype) for a in inputs.result.arrays])
        for view, values in zip(views, made, strict=True):
            view[...] = values
        return views

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        groups, options, _ = inputs
        if not options.outputs:
            return
        assert isinstance(call.result, _Arrays)
        addresses = call.result.addresses(written)
        outputs = [output.packed(at) for output, at in zip(options.outputs, addresses, strict=True)]
        words = _KERNEL.record("Output").size // 8          # u64 words, for alignment
        x, tiles = groups.array, max(1, cdiv(len(groups.array), _TILE))
        members: dict[str, Any] = {"splits": groups.members(call.error_word()), "tiles": tiles}
        with_totals = tiles > _ADDED_ANEW
        if with_totals:
            members["totals"] = call.workspace("offsets", 2 * tiles)
            yield _KERNEL.variant().bind(x, tiles, **members)
        at_once = _KERNEL.constant("kOutputs")
        for first in range(0, len(outputs), at_once):
            some = outputs[first:first + at_once]
            per_block = len(some) if with_totals else 1
            blocks = grid_size(tiles * cdiv(len(some), per_block), x.shape)
            yield _KERNEL.variant().bind(x, blocks, **members, outputs=len(some), outputs_per_block=per_block,
                                  output=Records.of(b"".join(some), range(0, words * len(some), words)))


_OFFSETS = _SplitsToOffsets()


def variants() -> Iterator[Variant]:
    """Yields every variant that this op may launch."""
    yield _KERNEL.variant()
