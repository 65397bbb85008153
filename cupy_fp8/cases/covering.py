"""A few cases of an op that together launch every kernel entry point that all its cases launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from ..kernels import Variant, forced_executor
from .base import ALIGNED_MATRIX, Case
from .registry import Op

#: Brings an op's positional and keyword arguments to where its kernels are to run.
Place = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
#: Name of the source file and of the entry point in it.
Entry = tuple[str, str]


class Recorded(NamedTuple):
    """A case and the variants that it launches. raised: the op raised an error; variants may be missing."""

    case: Case
    variants: tuple[Variant, ...]
    raised: bool = False

    @property
    def entries(self) -> set[Entry]:
        return {(variant.kernel.source, variant.kernel.entry) for variant in self.variants}


def covering(op: Op) -> list[Case]:
    """The cases that `covering_of` chooses for kernels on the CPU. Nothing is compiled, and no kernel runs.

    >>> from cupy_fp8.cases import OPS
    >>> [str(case) for case in covering(OPS["compute_amax"])]
    ['compute_amax-bfloat16-130x257-bits-contiguous-nan=ignore']
    """
    return [chosen.case for chosen in covering_of(record(op))]


def covering_of(recorded: Sequence[Recorded]) -> list[Recorded]:
    """A greedy cover of all entry points, in the order of the table, and every case that raised an error.

    Each step takes the case that launches most of the entry points still missing. Of several such cases it
    takes the largest one that is not larger than ALIGNED_MATRIX, which has tails of every tile. An op that
    launches nothing keeps its first case.
    """
    missing = set[Entry]().union(*(one.entries for one in recorded))
    chosen = {i for i, one in enumerate(recorded) if one.raised}
    for i in chosen:
        missing -= recorded[i].entries
    while missing:
        gains = [(len(one.entries & missing), *_preference(one.case)) for one in recorded]
        best = gains.index(max(gains))
        chosen.add(best)
        missing -= recorded[best].entries
    return [recorded[i] for i in sorted(chosen)] or list(recorded[:1])


def served_by(chosen: Sequence[Recorded], recorded: Sequence[Recorded]) -> list[Recorded]:
    """The chosen cases, and all cases that launch no other variants: they need nothing else compiled."""
    compiled = {variant for one in chosen for variant in one.variants}
    return [one for one in recorded if one.raised or compiled.issuperset(one.variants)]


def _preference(case: Case) -> tuple[bool, int]:
    size = math.prod(case.shape)
    return size <= math.prod(ALIGNED_MATRIX), size


def record(op: Op, place: Place | None = None) -> list[Recorded]:
    """What each case launches, found without a launch: on the CPU, or wherever `place` moves the arrays."""
    found = []
    for case in op.cases():
        raised = False
        with forced_executor("host"), recording() as variants:
            try:
                args, kwargs = op.inputs(case)
                if place is not None:
                    args, kwargs = place(args, kwargs)
                op.function(*args, **kwargs)
            except Exception:           # the check of this case raises it again, and reports it
                raised = True
        found.append(Recorded(case, tuple(dict.fromkeys(variants)), raised))
    return found


@contextmanager
def recording() -> Iterator[list[Variant]]:
    """Within it no thread launches a kernel: the list gets the variant of every launch instead."""
    variants: list[Variant] = []
    with mock.patch.object(Variant, "launch", lambda variant, *_, **__: variants.append(variant)):
        yield variants
