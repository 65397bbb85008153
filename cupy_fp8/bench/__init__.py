"""Measuring the ops on a GPU: time, GB/s, the share of a device copy's speed, and host time per call."""

from .convert import dequantize, scaling_aware
from .measure import Measurement, measure
from .moe import offsets, pad, tokens
from .quantize import blocks, grouped, mx, swiglu, tensor, tensor_list
from .quantize.tensor import Spec
from .scales import convert, swizzle

SPECS: tuple[Spec, ...] = (*tensor.SPECS, *dequantize.SPECS, *swizzle.SPECS, *convert.SPECS, *mx.SPECS, *blocks.SPECS, *scaling_aware.SPECS,
                           *offsets.SPECS, *pad.SPECS, *grouped.SPECS, *tensor_list.SPECS, *swiglu.SPECS, *tokens.SPECS)

__all__ = ["SPECS", "Measurement", "Spec", "measure"]
