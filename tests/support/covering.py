"""Few cases of the ops that together launch every kernel and use every option: those of the quick tier.

`cupy_fp8.cases.covering` records what a case launches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from cupy_fp8.cases import OPS, Case, all_cases
from cupy_fp8.cases.covering import record
from cupy_fp8.cases.programs import Program

Facts = frozenset[Hashable]


class Observed(NamedTuple):
    """A case, and the programs that it launches."""

    case: Case
    launched: frozenset[Program]
    raised: bool                                # The op raised an error, which the case's test is to show.

    @property
    def size(self) -> int:
        """How many elements its first array has."""
        return math.prod(self.case.shape)

    @property
    def entries(self) -> Facts:
        """The entry points that it launches, on something."""
        return frozenset((program.source, program.entry) for program in self.launched if self.size)

    @property
    def facts(self) -> Facts:
        """The quick tier has a case of each of these, op by op: every entry point with the type that it reads,
        and every dtype, layout, kind of values, kind of shape and value of an option."""
        case = self.case
        reads = {(program.entry, dict(program.defines).get("IN")) for program in self.launched if self.size}
        options = {(name, str(value)) for name, value in case.options.items()}
        error = {str(case)} if self.raised else set()
        return frozenset({*reads, *options, *error, case.dtype, case.layout, case.values,
                          (len(case.shape), self.size > 0)})


@functools.cache
def observed() -> tuple[Observed, ...]:
    """Every case of the table."""
    return tuple(observe(all_cases()))


def observe(table: Iterable[Case]) -> list[Observed]:
    """What cases launch, op by op."""
    by_op: dict[str, list[Case]] = {}
    for case in table:
        by_op.setdefault(case.op, []).append(case)
    return [Observed(one.case, frozenset(map(Program.of, one.variants)), one.raised)
            for name, own in by_op.items()
            for one in record(dataclasses.replace(OPS[name], cases=functools.partial(iter, own)))]


def cover(candidates: Sequence[Observed], facts: Callable[[Observed], Facts]) -> list[Observed]:
    """Few candidates that together show every fact. Each step takes the first of those that show most of the
    missing facts."""
    shown = [(candidate, facts(candidate)) for candidate in candidates]
    missing = frozenset[Hashable]().union(*(found for _, found in shown))
    chosen = []
    while missing:
        best, found = max(shown, key=lambda pair: len(pair[1] & missing))
        chosen.append(best)
        missing -= found
    return chosen


@functools.cache
def quick_cases() -> tuple[Observed, ...]:
    """The cases of the quick tier, op by op."""
    return tuple(chosen for name in OPS
                 for chosen in cover([one for one in observed() if one.case.op == name],
                                     lambda one: one.facts))


@functools.cache
def entry_cases() -> tuple[Observed, ...]:
    """Few cases that together launch every entry point, whatever the op. They have about 10,000 elements,
    which are several blocks of most kernels, and not too many threads for a sanitizer."""
    by_size = sorted(observed(), key=lambda one: abs(one.size - 10_000))
    return tuple(cover(by_size, lambda one: one.entries))
