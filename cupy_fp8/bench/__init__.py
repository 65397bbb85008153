"""Measuring the ops on a GPU: time, GB/s, the share of a device copy's speed, and host time per call.

A module in a family's folder can have rows in SPECS. An op without such rows is timed with the calls of its
registration (`cases.Registration.timed`).
"""

from __future__ import annotations

from ..cases import OPS
from ..cases.registry import family_modules
from .generic import specs_of
from .measure import Measurement, Spec, measure

__all__ = ["Measurement", "Spec", "measure", "specs"]


def specs() -> list[Spec]:
    """Every row of the benchmark."""
    written = [spec for module in family_modules(__name__) for spec in getattr(module, "SPECS", ())]
    has_rows = {spec.op for spec in written}
    return written + [spec for name, op in OPS.items() if name not in has_rows for spec in specs_of(op)]
