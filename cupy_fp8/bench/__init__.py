"""Measuring the ops on a GPU: time, GB/s, the share of a device copy's speed, and host time per call."""

from . import aware, blocks, dequantize, group_quantize, groups, layouts, multi, mx, offsets, scale_layouts, specs, swiglu, tokens
from .measure import Measurement, measure
from .specs import Spec

SPECS: tuple[Spec, ...] = (*specs.SPECS, *dequantize.SPECS, *layouts.SPECS, *scale_layouts.SPECS, *mx.SPECS, *blocks.SPECS, *aware.SPECS,
                           *offsets.SPECS, *groups.SPECS, *group_quantize.SPECS, *multi.SPECS, *swiglu.SPECS, *tokens.SPECS)

__all__ = ["SPECS", "Measurement", "Spec", "measure"]
