"""Few cases of the ops that together launch every kernel and use every option: those of the quick tier."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from cupy_fp8.cases import OPS, Case
from cupy_fp8.cases.covering import Features, Recorded, cover, record

__all__ = ["cover", "entry_cases", "launched_entries", "observe", "observed", "quick_cases"]


@functools.cache
def observed() -> tuple[Recorded, ...]:
    """Every case of every op, and what it launches."""
    return tuple(one for op in OPS.values() for one in record(op))


def observe(cases: Iterable[Case]) -> list[Recorded]:
    """What some cases of any ops launch."""
    return [one for case in cases for one in record(OPS[case.op], cases=[case])]


def launched_entries(one: Recorded) -> frozenset[tuple[str, str]]:
    """The entry points that it launches on something."""
    return one.entries if one.size else frozenset()


def features(one: Recorded) -> Features:
    """The quick tier has a case of each of these, op by op: every entry point with the type that it reads,
    and every dtype, layout, kind of values, kind of shape and value of an option."""
    case = one.case
    reads = {(v.kernel.entry, dict(v.defines).get("IN")) for v in one.variants if one.size}
    options = {(name, str(value)) for name, value in case.options.items()}
    shape = len(case.shape), one.size > 0
    return Features({*reads, *options, *one.errors, case.dtype, case.layout, case.values, shape})


@functools.cache
def quick_cases() -> tuple[Recorded, ...]:
    """The cases of the quick tier, op by op."""
    return tuple(chosen for name in OPS
                 for chosen in cover([one for one in observed() if one.case.op == name], features))


@functools.cache
def entry_cases() -> tuple[Recorded, ...]:
    """Few cases that together launch every entry point, whatever the op. They have about 10,000 elements,
    which are several blocks of most kernels, and not too many threads for a sanitizer."""
    by_size = sorted(observed(), key=lambda one: abs(one.size - 10_000))
    return tuple(cover(by_size, launched_entries))
