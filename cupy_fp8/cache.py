"""Weights that are quantised once and used many times."""

from __future__ import annotations

import functools
import operator
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from . import backend
from .arrays import Array, address, is_array
from .calls.call import Op, run, validate_call
from .calls.keys import identities
from .calls.tensor_lists import checked
from .calls.validate import one_f32
from .directions import check_directions
from .formats import flags
from .ops.quantize.tensor_list import call_of
from .recipes import Recipe, check_recipe
from .results import Quantized

__all__ = ["WeightCache"]

_FLAGS: set[type] = {bool}
_MOST_HITS = 256            # remembered lists of weights
#: Held while a cache changes. Shared by all caches, so that each can be copied. Reentrant, since weights may
#: die meanwhile.
_LOCK = backend.free_in_children(threading.RLock())
#: Key of a weight: its identity; for a NumPy array, whose dtype can be assigned to, identity and dtype; for a
#: view the identity of the owner of its memory, and its place there.
_Key = int | tuple[Any, ...]
#: Key of a call: the identities of the weights, or their keys if some keys are more than that; their shapes
#: (arrays can be reshaped in place); and the directions.
_CallKey = tuple[Any, tuple[Any, ...], bool, bool]


class _Work(NamedTuple):
    """Weights that one call quantises, by their indices among all. outputs: earlier results, to be written in
    place; None: new memory."""

    rowwise: bool
    columnwise: bool
    indices: list[int]
    outputs: list[Quantized] | None

    def call(self, recipe: Recipe, weights: Sequence[Any], scales: Any, amaxes: Any,
             noop: Any) -> tuple[Op[Any], tuple[Any, ...]]:
        """Return the op and its arguments."""
        scales, amaxes = (_chosen(a, self.indices, len(weights)) for a in (scales, amaxes))
        return call_of([weights[i] for i in self.indices], recipe, rowwise=self.rowwise,
                       columnwise=self.columnwise, scales=scales, amaxes=amaxes,
                       noop=None if self.outputs is None else noop)


class _Hit(NamedTuple):
    """The results of a call that found all weights quantised, and the calls that update them."""

    results: list[Quantized]
    updates: list[_Work]


class WeightCache:
    """Keeps quantised weights between calls, so that a training step with several micro-batches quantises its
    weights once.

    recipe : DelayedScaling, CurrentScaling, BlockScaling or MXScaling, for all weights.

    Weights are recognised by identity: the same array objects, call after call, in the same shapes and dtypes
    (one that was reshaped in place, or got another dtype, is new). Views, such as `w.T`, are recognised by
    the array that owns their memory and by address, shape, strides and dtype, so that a new view of the same
    weight is not new. The cache keeps no weight alive, and drops the results of a weight that is gone.
    Threads may share a cache.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> cache = fp8.WeightCache(fp8.CurrentScaling())
    >>> weights = [np.ones((2, 3), np.float32), np.full((4, 2), 7, np.float32)]
    >>> first = cache.quantize(weights)                                # the first micro-batch: quantised
    >>> cache.quantize(weights, update=False)[1] is first[1]           # the others: as they are
    True
    >>> weights[1][:] = 3.5                                            # the optimizer's step
    >>> cache.quantize(weights)[1] is first[1], first[1].scale_inv.tolist()
    (True, [0.0078125])

    Source: TransformerEngine's weight workspaces (is_first_microbatch, skip_fp8_weight_update).
    """

    def __init__(self, recipe: Recipe) -> None:
        check_recipe(recipe)
        self.recipe: Recipe = recipe
        #: the owner of each weight's memory, and the result, by the weight's key
        self._entries: dict[_Key, tuple[weakref.ref[Any], Quantized]] = {}
        # whole calls, and the last one, found by one comparison; dropped whenever an entry goes
        self._hits: dict[_CallKey, _Hit] = {}
        self._last: tuple[_CallKey, _Hit] | None = None
        self._cleared = 0                                               # counts the calls of `clear`

    def quantize(self, weights: Sequence[Array | Quantized], *, rowwise: bool = True,
                 columnwise: bool = False, scales: Any = None, amaxes: Any = None, update: bool = True,
                 noop: Array | None = None) -> list[Quantized]:
        """Quantise the weights, each with these directions, and with those that earlier calls asked for.

        A weight that is new, or lacks a direction, is quantised into new memory, all such weights together by
        `multi_quantize`. With `update` all other weights are quantised again, together and in place, at the
        same addresses. Without it their results are returned unchanged, and if no weight is new nothing is
        launched.

        weights : list of arrays as `multi_quantize` takes; members that are Quantized already are returned as
            they are
        scales, amaxes : as for `multi_quantize`, one for each member of `weights`, used or not
        noop : one-element f32 array on the device; nothing is updated if it holds 1.0. With it the launch
            always happens, `update` or not, and the device decides, so that one CUDA graph serves all
            micro-batches. Weights that get new memory ignore it
        Raises what `multi_quantize` raises, before anything is written: neither results nor amaxes; the cache
        is then as it was.
        """
        checked(weights, "weights")
        if {type(rowwise), type(columnwise), type(update)} != _FLAGS:
            flags(rowwise=rowwise, columnwise=columnwise, update=update)
        if scales is not None or amaxes is not None:
            _check_number("scales", scales, len(weights))
            _check_number("amaxes", amaxes, len(weights))
        call: _CallKey = identities(weights), _shapes(weights), rowwise, columnwise
        hit = self._hit(call)
        keys: list[_Key] = []
        if hit is None:
            # plain identities are those of CuPy arrays that own their memory, and live as long as their
            # entries: never of a view
            keys = [_key(weight) for weight in weights]
            if any(type(key) is tuple for key in keys):
                call = tuple(keys), *call[1:]
                hit = self._hit(call)
        if hit is not None and not update and noop is None:
            return hit.results.copy()
        check_directions((0, 0), rowwise, columnwise)
        if hit is not None:
            self._run(hit.updates, weights, scales, amaxes, noop)
            return hit.results.copy()
        cleared = self._cleared
        results: dict[_Key, Quantized] = {
            key: weight for key, weight in zip(keys, weights, strict=True) if isinstance(weight, Quantized)}
        works = self._works(weights, keys, results, call, update or noop is not None)
        made = self._run(works, weights, scales, amaxes, noop)
        results |= {keys[i]: result for i, result in made.items()}
        found = [results[key] for key in keys]
        with _LOCK:
            if self._cleared == cleared:                    # otherwise another thread has called `clear`
                fresh = [i for work in works if work.outputs is None for i in work.indices]
                self._keep([(keys[i], weights[i], made[i]) for i in fresh])
                works = self._works(weights, keys, {}, call, True)
                if all(work.outputs is not None for work in works):
                    self._keep_call(call, _Hit(found, works))
        return found.copy()

    def _hit(self, call: _CallKey) -> _Hit | None:
        last = self._last
        if last is not None and last[0] == call:
            return last[1]
        hit = self._hits.get(call)
        if hit is not None:
            with _LOCK:
                if self._hits.get(call) is hit:             # otherwise another thread has dropped it
                    self._last = call, hit
        return hit

    def _works(self, weights: Sequence[Any], keys: list[_Key], results: dict[_Key, Quantized],
               call: _CallKey, update: bool) -> list[_Work]:
        """Return the weights to quantise. Those that need new memory come first, since these may be refused.
        `results` gets the results of all others."""
        works: dict[tuple[bool, bool, bool], _Work] = {}
        seen: set[_Key] = set()
        for i, (weight, key) in enumerate(zip(weights, keys, strict=True)):
            if isinstance(weight, Quantized) or key in seen:
                continue
            seen.add(key)
            known = self._known(weight, key, i)
            has = False, False
            if known is not None:
                has = known._row is not None, known._column is not None
            row, column = call[2] or has[0], call[3] or has[1]
            complete = has == (row, column)
            if known is not None and complete:
                results[key] = known
            if not complete or update:
                outputs: list[Quantized] | None = [] if complete else None
                work = works.setdefault((complete, row, column), _Work(row, column, [], outputs))
                work.indices.append(i)
                if known is not None and work.outputs is not None:
                    work.outputs.append(known)
        return [works[kind] for kind in sorted(works)]

    def _run(self, works: list[_Work], weights: Sequence[Any], scales: Any, amaxes: Any,
             noop: Any) -> dict[int, Quantized]:
        """Quantise the weights, and return the results by the weights' indices."""
        for work in works:
            if noop is not None and work.outputs is None:       # this call does not get noop
                weight = weights[work.indices[0]]
                one_f32(noop, weight, backend.module_of(weight), "noop")
        calls = [(work, *work.call(self.recipe, weights, scales, amaxes, noop)) for work in works]
        if len(calls) > 1:                      # no call may be refused after another has written
            for work, op, given in calls:
                with _numbered(work.indices):
                    validate_call(op, given, work.outputs)
        results: dict[int, Quantized] = {}
        for work, op, given in calls:
            with _numbered(work.indices):
                made = run(op, given, work.outputs)
            results.update(zip(work.indices, made, strict=True))
        return results

    def _keep(self, fresh: list[tuple[_Key, Any, Quantized]]) -> None:
        for key, weight, result in fresh:
            forget = functools.partial(_forget, weakref.ref(self), key)
            self._entries[key] = weakref.ref(_owner(weight), forget), result
        if fresh:
            self._forget_calls()

    def _keep_call(self, call: _CallKey, hit: _Hit) -> None:
        if len(self._hits) >= _MOST_HITS:
            self._hits.clear()
        self._hits[call] = hit
        self._last = call, hit

    def _known(self, weight: Array, key: _Key, i: int) -> Quantized | None:
        backend.module_of(weight, f"weights[{i}]")
        entry = self._entries.get(key)
        if entry is None:
            return None
        owner, known = entry[0](), entry[1]
        return known if owner is _owner(weight) and known.shape == weight.shape else None

    def clear(self) -> None:
        """Forget all weights. Results that another thread's `quantize` is making are returned there, and not
        kept."""
        with _LOCK:
            self._cleared += 1
            self._forget_calls()
            self._entries.clear()

    def _forget_calls(self) -> None:
        self._hits.clear()
        self._last = None

    def __getstate__(self) -> tuple[Recipe, list[tuple[_Key, weakref.ref[Any], Quantized]]]:
        return self.recipe, [(key, *entry) for key, entry in self._entries.items()]

    def __setstate__(self, state: tuple[Recipe, list[tuple[_Key, weakref.ref[Any], Quantized]]]) -> None:
        """Restore a copy, which watches the weights itself."""
        WeightCache.__init__(self, state[0])
        self._keep([(key, owner, result) for key, held, result in state[1] if (owner := held()) is not None])

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales held."""
        return sum(result.nbytes for _, result in list(self._entries.values()))

    def __len__(self) -> int:
        """Return the number of weights in the cache."""
        return len(self._entries)

    def __repr__(self) -> str:
        return f"WeightCache({self.recipe!r}: {len(self)} weights, {self.nbytes:,} bytes)"


@contextmanager
def _numbered(indices: list[int]) -> Iterator[None]:
    """Rename the arrays in error messages of `multi_quantize` to the weights that they are."""
    def renamed(match: re.Match[str]) -> str:
        return f"{'weights' if match[1] == 'xs' else match[1]}[{indices[int(match[2])]}]"

    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(re.sub(r"\b(xs|scales|amaxes|out)\[(\d+)\]", renamed, str(error))) from None


def _owner(weight: Any) -> Any:
    """Return the array that owns a weight's memory: the weight itself, if it is not a view of another
    array."""
    base: Any = getattr(weight, "base", None)
    while is_array(base):
        weight, base = base, base.base
    return weight


def _key(weight: Any) -> _Key:
    owner = _owner(weight)
    if owner is weight:
        return (id(weight), weight.dtype) if isinstance(weight, np.ndarray) else id(weight)
    return id(owner), address(weight), weight.shape, weight.strides, weight.dtype


def _shapes(weights: Sequence[Any]) -> tuple[Any, ...]:
    """Return what distinguishes the objects' shapes from their earlier ones: for matrices, whose number of
    elements is fixed, only the numbers of rows. CuPy takes 75 ns for a shape, 20 for these."""
    try:
        if list(map(_DIMENSIONS, weights)).count(2) == len(weights):
            return tuple(map(len, weights))
    except AttributeError:              # a weight is not an array: _known raises the error
        pass
    return tuple(getattr(weight, "shape", None) for weight in weights)


_DIMENSIONS = operator.attrgetter("ndim")


def _check_number(name: str, a: Any, number: int) -> None:
    """Raise TypeError or ValueError unless scales or amaxes are a list or an array of this length, or None.
    The members are checked by the call that gets them."""
    if a is None:
        return
    if not isinstance(a, (list, tuple)):
        backend.module_of(a, name)
        if not a.ndim:
            return
    if len(a) != number:
        raise ValueError(f"{name}: expected {number}, one for each weight, got {len(a)}")


def _forget(cache: weakref.ref[WeightCache], key: _Key, gone: weakref.ref[Any]) -> None:
    found = cache()
    if found is None:
        return
    with _LOCK:
        if key in found._entries and found._entries[key][0] is gone:
            del found._entries[key]
            found._forget_calls()


def _chosen(a: Any, indices: list[int], number: int) -> Any:
    """Return the scales or amaxes of some of the weights."""
    if len(indices) == number:
        return a
    if isinstance(a, (list, tuple)):
        return [a[i] for i in indices]
    return [a[i:i + 1] for i in indices] if is_array(a) and a.ndim else a
