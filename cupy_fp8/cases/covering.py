"""Chooses a few cases that together cover as much as many: every kernel entry point, or other features."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..kernels import Variant, forced_executor, recording
from .base import ALIGNED_MATRIX, Case, values_made_by, zeros
from .registry import Arguments, Registration

#: moves an op's positional and keyword arguments to where its kernels are to run
Place = Callable[[tuple[Any, ...], dict[str, Any]], Arguments]
Features = frozenset[Any]


class Recorded(NamedTuple):
    """A case and the variants that it launches. raised: the op raised an error; variants may be missing."""

    case: Case
    variants: tuple[Variant, ...]
    raised: bool = False

    @property
    def size(self) -> int:
        """Number of elements of the case's first array."""
        return math.prod(self.case.shape)

    @property
    def entries(self) -> frozenset[tuple[str, str]]:
        """Source and name of the entry points that it launches."""
        return frozenset((variant.kernel.source, variant.kernel.entry) for variant in self.variants)

    @property
    def errors(self) -> Features:
        """A feature that no other case has, if the op raised an error."""
        return frozenset({str(self.case)} if self.raised else ())


def covering_of(recorded: Sequence[Recorded]) -> list[Recorded]:
    """Return a cover of all entry points, and every case that raised an error.

    Of several cases that cover as much, it takes the largest one not larger than ALIGNED_MATRIX, which has
    tails of every tile. An op that launches nothing keeps its first case.
    """
    most = math.prod(ALIGNED_MATRIX)
    chosen = cover(recorded, lambda one: one.entries | one.errors, lambda one: (one.size <= most, one.size))
    return chosen or list(recorded[:1])


def cover(candidates: Sequence[Recorded], features: Callable[[Recorded], Features],
          preference: Callable[[Recorded], Any] = lambda _: 0) -> list[Recorded]:
    """Return few candidates that together show every feature, in their order.

    Each step takes a candidate with the most missing features: the preferred one of several, or the first."""
    shown = [(features(one), preference(one)) for one in candidates]
    missing = Features().union(*(found for found, _ in shown))
    chosen: set[int] = set()
    while missing:
        gains = [(len(found & missing), preferred) for found, preferred in shown]
        best = gains.index(max(gains))
        chosen.add(best)
        missing -= shown[best][0]
    return [candidates[i] for i in sorted(chosen)]


def served_by(chosen: Sequence[Recorded], recorded: Sequence[Recorded]) -> list[Recorded]:
    """Return the chosen cases, and all cases that launch no other variants: these need no further
    compilation."""
    compiled = {variant for one in chosen for variant in one.variants}
    return [one for one in recorded if one.raised or compiled.issuperset(one.variants)]


def spread(chosen: Sequence[Recorded], candidates: Sequence[Recorded], most: int) -> list[Recorded]:
    """Return the chosen ones of the candidates, and about `most` others, evenly spread."""
    wanted, step = set(map(id, chosen)), max(1, math.ceil(len(candidates) / most))
    return [one for i, one in enumerate(candidates) if i % step == 0 or id(one) in wanted]


def record(op: Registration, place: Place | None = None,
           cases: Iterable[Case] | None = None) -> list[Recorded]:
    """Record what an op's cases (None: all of them) launch on the CPU, or wherever `place` moves the arrays.
    No kernel runs, and arrays are zeros, since launches do not depend on values."""
    found = []
    for case in op.cases() if cases is None else cases:
        raised = False
        with forced_executor("host"), values_made_by(zeros), recording() as variants:
            try:
                args, kwargs = op.inputs(case)
                if place is not None:
                    args, kwargs = place(args, kwargs)
                op.function(*args, **kwargs)
            except Exception:           # the check of this case raises and reports it again
                raised = True
        found.append(Recorded(case, tuple(dict.fromkeys(variants)), raised))
    return found
