"""The cases of the quick tier: few cases of the ops that together launch every kernel and use every
option."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from cupy_fp8.cases import OPS, Case
from cupy_fp8.cases.covering import Features, Recorded, cover, record

__all__ = ["cover", "entry_cases", "launched_entries", "observe", "observed", "quick_cases"]


@functools.cache
def observed() -> tuple[Recorded, ...]:
    """Return every case of every op, and what it launches."""
    return tuple(one for op in OPS.values() for one in record(op))


def observe(cases: Iterable[Case]) -> list[Recorded]:
    """Return what some cases of any ops launch."""
    return [one for case in cases for one in record(OPS[case.op], cases=[case])]


def launched_entries(one: Recorded) -> frozenset[tuple[str, str]]:
    """Return the entry points that it launches on non-empty arrays."""
    return one.entries if one.size else frozenset()


def features(one: Recorded) -> Features:
    """Return what the quick tier covers for each op: every entry point with its input type, and every dtype,
    layout, kind of values, kind of shape and value of an option."""
    case = one.case
    reads = {(v.kernel.entry, dict(v.defines).get("IN")) for v in one.variants if one.size}
    options = {(name, str(value)) for name, value in case.options.items()}
    shape = len(case.shape), one.size > 0
    return Features({*reads, *options, *one.errors, case.dtype, case.layout, case.values, shape})


@functools.cache
def quick_cases() -> tuple[Recorded, ...]:
    """Return the cases of the quick tier, op by op."""
    return tuple(chosen for name in OPS
                 for chosen in cover([one for one in observed() if one.case.op == name], features))


@functools.cache
def entry_cases() -> tuple[Recorded, ...]:
    """Return few cases that together launch every entry point, whatever the op. They have about 10,000
    elements: several blocks of most kernels, and not too many threads for a sanitizer."""
    by_size = sorted(observed(), key=lambda one: abs(one.size - 10_000))
    return tuple(cover(by_size, launched_entries))
