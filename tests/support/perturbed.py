"""Wrong arrays: one argument of a call changed at a time, and the expected outcome."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from declared import Example
from places import Place
from trees import leaves, map_arrays, snapshot, swapped

import cupy_fp8 as fp8
from cupy_fp8 import cases
from cupy_fp8.arrays import bits
from cupy_fp8.cli.selftest import assert_agrees
from cupy_fp8.formats import FORMATS, INPUT_DTYPES
from cupy_fp8.gate import Gate
from cupy_fp8.routing import Routing

#: Dtypes, including some that calls do not support.
DTYPES = (*FORMATS, *(np.dtype(t) for t in ("f8", "i1", "u1", "i4", "i8", "?", "c8", "O", ">f4", ">f2")))


class Tensor:
    """Looks like another library's tensor on a GPU."""

    dtype, shape, ndim, size, device = "float32", (2, 2), 2, 4, "cuda:0"
    __cuda_array_interface__: dict[str, Any] = {}       # noqa: RUF012


def outcome(example: Example) -> str | None:
    """Return the message of the error that a call raises, leaving its memory unchanged; None if it raises
    none."""
    before = snapshot(example.tree)
    message = error_of(example)
    assert message is None or snapshot(example.tree) == before, (
        f"memory was written before the error: {message}"
    )
    return message


def error_of(example: Example) -> str | None:
    try:
        example.call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def refused(example: Example, pattern: str, how: str = "") -> None:
    """Raise AssertionError unless the call raises TypeError or ValueError with this message, and writes
    nothing. how: what is wrong with the call."""
    message = outcome(example)
    assert message is not None, f"{example} {how}: was accepted, but expected {pattern}"
    assert re.search(pattern, message), f"{example} {how}: {message!r}, expected {pattern}"


def named(*names: str) -> str:
    """Return the pattern of a message about one of these arguments, or about a part of it."""
    return rf"^(TypeError|ValueError): ({'|'.join(map(re.escape, names))})[.\w\[\]]*: "


def parameters(example: Example) -> list[str]:
    """Return the names that messages may use: the public function's parameters, and what is declared."""
    public = getattr(fp8, example.op.name, example.op.function)
    also = "columnwise"                         # cast_transpose is quantize_tensor in both directions
    return [*inspect.signature(public).parameters, *(found.name for found in example.declared), also]


def right_or_refused(example: Example, pattern: str, how: str = "") -> bool:
    """Return whether the call was accepted. AssertionError if it was refused for another reason, or wrote
    other bytes than the reference. how: what is wrong with the call."""
    args, kwargs = on_host(example)
    message = outcome(example)
    if message is not None:
        assert re.search(pattern, message), f"{example} {how}: {message!r}, expected {pattern}"
        return False
    compare(example, args, kwargs)
    return True


def on_host(example: Example) -> tuple[Any, Any]:
    """Return the arguments of a call, copied to NumPy arrays."""
    return map_arrays((example.args, example.kwargs), lambda a: fp8.asnumpy(a).copy(order="K"))


def compare(example: Example, args: Any, kwargs: Any) -> None:
    """Raise AssertionError unless a call wrote what the reference computes from these arguments (or what the
    op accepts instead). Both may have updated some."""
    op = example.op
    kwargs = {name: value for name, value in kwargs.items() if name != "noop"}
    want = cases.outputs(op.reference(*args, **kwargs), kwargs, op.updates)
    if example.kwargs.get("amax") is None:              # nobody reads the call's own one
        want.pop("amax", None)
    returned = example.args[:len(op.updates)] if op.updates else example.out
    found = {name: a.reshape(want[name].shape) if a.size == 1 else a
             for name, a in cases.outputs(returned, example.kwargs, op.updates).items()}
    assert_agrees(op, found, want, (args, kwargs))


def bytes_of(a: Any) -> np.ndarray:
    """Return the bytes of an array on any device; a view for NumPy arrays and the stand-in's."""
    on_host = getattr(a, "on_host", a)
    on_host = on_host if isinstance(on_host, np.ndarray) else fp8.asnumpy(a)
    return np.asarray(on_host).reshape(-1).view(np.uint8)


# ---- the arguments of a call ----
def given(example: Example) -> dict[str, Any]:
    """Return the arrays that a call reads or updates, by name. Those of a Routing or a Gate were validated
    when it was built."""
    built = {id(a) for part in _results(example.tree) if isinstance(part, (Routing, Gate))
             for a in leaves(part)}
    results = {id(a) for a in example.result}
    return {name: a for name, a in example.named().items() if id(a) not in built | results}


def results(example: Example) -> dict[str, Any]:
    """Return the arrays that a call writes into, by name."""
    found = {id(a) for a in example.result}
    return {name: a for name, a in example.named().items() if id(a) in found}


def _results(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _results(part)
    else:
        yield tree


def with_array(example: Example, old: Any, new: Any) -> Example:
    """Return the call with a replacement for an array."""
    return example.with_tree(swapped(example.tree, old, new))


# ---- arrays in other memory orders ----
def strided(a: np.ndarray) -> np.ndarray:
    """Every second element along the last axis of a larger array."""
    wide = np.zeros((*a.shape[:-1], 2 * a.shape[-1]), a.dtype) if a.ndim else np.zeros(2, a.dtype)
    view = wide[..., ::2] if a.ndim else wide[0]
    view[...] = a
    return view


def turned(a: np.ndarray) -> np.ndarray:
    """The first axis is the fastest in memory."""
    return np.asfortranarray(a)


def backwards(a: np.ndarray) -> np.ndarray:
    """Reversed in memory."""
    return np.ascontiguousarray(a[::-1])[::-1]


def misaligned(a: np.ndarray) -> np.ndarray:
    """The same array at an address that is no multiple of the element size."""
    return at_address(np.empty(a.nbytes + 64, np.uint8), 1 if a.itemsize > 1 else 0, a)


def read_only(a: np.ndarray) -> np.ndarray:
    copied = a.copy()
    copied.flags.writeable = False
    return copied


def at_address(buffer: np.ndarray, start: int, a: np.ndarray) -> np.ndarray:
    """Return a copy of `a` in a buffer of bytes, from `start` past a multiple of 32 on."""
    start += -buffer.ctypes.data % 32
    view = buffer[start:start + a.nbytes].view(a.dtype).reshape(a.shape)
    bits(view)[...] = bits(a)
    return view


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "strided": strided,
    "turned": turned,
    "backwards": backwards,
    "misaligned": misaligned,
    "read-only": read_only,
}


def layouts(a: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the same elements in other memory orders."""
    for how, change in LAYOUTS.items():
        if (how == "misaligned" and not a.nbytes > a.size) or (how == "backwards" and not a.ndim):
            continue
        changed = change(a)
        if how in ("misaligned", "read-only") or not changed.flags.c_contiguous:
            yield how, changed


def shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield other shapes: an axis more or less, an extent more or less, an empty axis."""
    yield (1, *shape)
    yield (*shape, 2)
    for axis, extent in enumerate(shape):
        rest = shape[:axis], shape[axis + 1:]
        for other in {extent + 1, max(extent - 1, 0), 0} - {extent}:
            yield (*rest[0], other, *rest[1])
        yield (*rest[0], *rest[1])


# ---- repeated calls ----
def change_contents(example: Example, place: Place) -> None:
    """Reorder the elements of every array that is only read, in place. Sizes of groups keep their sum, and
    sometimes all rows are in one group; a Routing is unchanged, since its parts belong together."""
    arrays = given(example)
    for name, a in arrays.items():
        if name not in example.written and name != "noop":
            turn_round(name, a, place)
    if example.kwargs.get("offsets") is None:
        for name, a in arrays.items():
            if name.rpartition(".")[2] == "splits" and name not in example.written:
                _into_one_group(a, place)


def _into_one_group(splits: Any, place: Place) -> None:
    """Give the first group all rows if it has more of them than the last one, but not all."""
    sizes = fp8.asnumpy(splits)
    if len(sizes) > 1 and sizes.sum() > sizes[0] > sizes[-1]:
        sizes = np.concatenate([sizes.sum(keepdims=True, dtype=sizes.dtype), np.zeros_like(sizes[1:])])
        bits(splits)[...] = bits(place.run.array(sizes))


def turn_round(name: str, a: Any, place: Place) -> None:
    """Reverse the elements of an array in place; offsets become those of reversed sizes. The largest numbers
    become 0, so that a stale amax of the call before shows."""
    other = fp8.asnumpy(a).reshape(-1)[::-1].copy()
    if name == "offsets":
        other = other[0] - other
    elif other.size > 1 and other.dtype in INPUT_DTYPES:
        magnitudes = np.nan_to_num(np.abs(other.astype(np.float32)), nan=np.inf)
        other[magnitudes >= magnitudes.max() / 2] = 0
    bits(a)[...] = bits(place.run.array(other.reshape(a.shape)))


def anew(example: Example) -> Any:
    """Repeat the call without a result to write into."""
    options = {name: value for name, value in example.kwargs.items() if name != "noop"}
    return example.op.function(*example.args, **options)
