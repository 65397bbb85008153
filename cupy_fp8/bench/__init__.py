"""Measures the ops on a GPU: time, GB/s, the share of a device copy's speed, and host time per call.

The timed calls are those of the ops' registrations (`cases.Registration.timed`, and `host_calls` for host
times). A module in a family's folder adds what a registration lacks: COMPARE has a function by op that
compares samples of large results, where the reference of a whole one takes too long (see `generic.Compare`),
and `rows` yields the rows of matrix products, which have FLOP counts and are compared with other libraries in
`matmul.compare`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..cases import OPS
from ..cases.registry import family_modules
from .generic import Compare, specs_of
from .measure import Measurement, Spec, measure

__all__ = ["Measurement", "Spec", "measure", "specs"]


def specs() -> Iterator[Spec]:
    """Yield every row of the benchmark, by op."""
    compare = compare_functions()
    written = [spec for module in family_modules(__name__) for spec in getattr(module, "rows", tuple)()]
    for name, op in OPS.items():
        yield from specs_of(op, compare.get(name))
        yield from (spec for spec in written if spec.op == name)


def compare_functions() -> dict[str, Compare]:
    """Return the functions that compare samples, by op."""
    modules = family_modules(__name__)
    return {name: how for module in modules for name, how in getattr(module, "COMPARE", {}).items()}
