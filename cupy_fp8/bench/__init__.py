"""Measuring the ops on a GPU: time, GB/s, the share of a device copy's speed, and host time per call."""

from .measure import Measurement, measure
from .specs import SPECS, Spec

__all__ = ["SPECS", "Measurement", "Spec", "measure"]
