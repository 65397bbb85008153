"""Weights that are quantised once and used many times."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import backend
from .arrays import Array
from .ops.quantize.tensor_list import Recipe, multi_quantize
from .recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, check_directions
from .results import Quantized


class WeightCache:
    """Quantised weights, kept from call to call: a training step with several micro-batches quantises its weights once.

    recipe : DelayedScaling, CurrentScaling, BlockScaling or MXScaling, for all weights.

    Weights are known by identity: the same array objects, call after call. The cache does not keep them alive, and forgets what
    belongs to a weight that is gone.

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
        if not isinstance(recipe, (DelayedScaling, CurrentScaling, BlockScaling, MXScaling)):
            raise TypeError(f"recipe: expected DelayedScaling, CurrentScaling, BlockScaling or MXScaling, got {type(recipe).__name__}")
        self.recipe: Recipe = recipe
        self._entries: dict[int, tuple[weakref.ref[Any], Quantized]] = {}      # by the identity of the weight
        # Whole calls, and the last one of them, which a comparison finds sooner; forgotten whenever an entry goes.
        self._hits: dict[tuple[bytes, bool, bool], list[Quantized]] = {}
        self._last: tuple[bytes, bool, bool, list[Quantized]] = _NO_CALL

    def quantize(self, weights: Sequence[Array | Quantized], *, rowwise: bool = True, columnwise: bool = False, scales: Any = None,
                 amaxes: Any = None, update: bool = True, noop: Array | None = None) -> list[Quantized]:
        """The weights quantised, each with the directions asked for (or more, where an earlier call asked for more).

        A weight that is new, or lacks a direction: quantised into new memory, all such weights together by `multi_quantize`. Any other:
        with `update` quantised anew, together and in place, at the same addresses; without it returned as it is, and where that is so of
        all nothing is launched.

        weights : list of arrays as `multi_quantize` takes; members that are Quantized already are returned as they are
        scales, amaxes : as for `multi_quantize`, one for each member of `weights`, used or not
        noop : one-element f32 array on the device; where it holds 1.0 nothing is updated. With it the launch always happens and the device
            decides, `update` or not, so that one CUDA graph serves all micro-batches. What is quantised into new memory ignores it
        Raises what `multi_quantize` raises; the cache is then as it was.
        """
        if not isinstance(weights, (list, tuple)):
            raise TypeError(f"weights: expected a list, got {type(weights).__name__}")
        identities = _identities(weights)
        if not update and noop is None:
            last, last_row, last_column, found = self._last
            if last_row is rowwise and last_column is columnwise and last == identities:
                return found.copy()
            hit = self._hits.get((identities, rowwise, columnwise))
            if hit is not None:
                self._last = identities, rowwise, columnwise, hit
                return hit.copy()
        check_directions((0, 0), rowwise, columnwise)
        for name, given in (("scales", scales), ("amaxes", amaxes)):
            if given is not None and hasattr(given, "__len__") and len(given) != len(weights):
                raise ValueError(f"{name}: expected {len(weights)}, one for each weight, got {len(given)}")
        # Places of weights by what has to be done: the directions, and whether it is done in place.
        work: dict[tuple[bool, bool, bool], list[int]] = {}
        seen: set[int] = set()
        for i, weight in enumerate(weights):
            if isinstance(weight, Quantized):
                continue
            if id(weight) in seen:
                continue
            seen.add(id(weight))
            known = self._known(weight, i)
            row = bool(rowwise) or (known is not None and known.rowwise is not None)
            column = bool(columnwise) or (known is not None and known.columnwise is not None)
            complete = known is not None and row == (known.rowwise is not None) and column == (known.columnwise is not None)
            if not complete or update or noop is not None:
                work.setdefault((row, column, complete), []).append(i)
        fresh: list[tuple[Array, Quantized]] = []
        for (row, column, in_place), places in sorted(work.items(), key=lambda item: item[0][2]):      # new memory may be refused: first
            chosen = [weights[i] for i in places]
            outputs = [self._entries[id(weight)][1] for weight in chosen] if in_place else None
            results = multi_quantize(chosen, self.recipe, rowwise=row, columnwise=column, scales=_chosen(scales, places, len(weights)),
                                     amaxes=_chosen(amaxes, places, len(weights)), noop=noop if in_place else None, outputs=outputs)
            if not in_place:
                fresh += zip(chosen, results, strict=True)
        for weight, result in fresh:
            key = id(weight)
            self._entries[key] = weakref.ref(weight, functools.partial(_forget, weakref.ref(self), key)), result
        if fresh:
            self._forget_calls()
        found = [weight if isinstance(weight, Quantized) else self._entries[id(weight)][1] for weight in weights]
        if len(self._hits) >= _MOST_HITS:
            self._hits.clear()
        self._hits[identities, rowwise, columnwise] = found
        self._last = identities, rowwise, columnwise, found
        return found.copy()

    def _known(self, weight: Array, i: int) -> Quantized | None:
        backend.module_of(weight, f"weights[{i}]")
        entry = self._entries.get(id(weight))
        if entry is None:
            return None
        held, known = entry[0](), entry[1]
        return known if held is weight and known.shape == held.shape else None

    def clear(self) -> None:
        """Forgets all weights."""
        self._forget_calls()
        self._entries.clear()

    def _forget_calls(self) -> None:
        self._hits.clear()
        self._last = _NO_CALL

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales held."""
        return sum(result.nbytes for _, result in self._entries.values())

    def __len__(self) -> int:
        """How many weights are known."""
        return len(self._entries)

    def __repr__(self) -> str:
        return f"WeightCache({self.recipe!r}: {len(self)} weights, {self.nbytes:,} bytes)"


_MOST_HITS = 256            # different lists of weights, of which one is short
_NO_CALL: Any = (None, None, None, None)


def _identities(objects: Sequence[Any]) -> bytes:
    """Their addresses, which `id` tells too, in less than half the time: no integers are made, and comparing takes no loop."""
    return np.fromiter(objects, object, len(objects)).tobytes()


def _forget(cache: weakref.ref[WeightCache], key: int, gone: weakref.ref[Any]) -> None:
    found = cache()
    if found is not None and key in found._entries and found._entries[key][0] is gone:
        del found._entries[key]
        found._forget_calls()


def _chosen(a: Any, places: list[int], number: int) -> Any:
    """The scales or amaxes of some of the weights."""
    if a is None or len(places) == number:
        return a
    return [a[i] for i in places] if isinstance(a, (list, tuple)) else [a[i:i + 1] for i in places]
