"""The definition of every op in NumPy, under the op's own name. Reads like docs/numerics.md; speed is not a goal.

Each takes the op's arguments that bear on the result, returns fresh arrays and validates nothing.
"""

from .amax import compute_amax
from .aware import scaling_aware_transpose
from .blocks import quantize_block
from .cast import cast_transpose, quantize_tensor
from .convert import astype, transpose
from .dequantize import dequantize
from .group_quantize import group_quantize
from .groups import pad_groups, sort_chunks, unpad_groups
from .layouts import swizzle_scales, unswizzle_scales
from .multi import multi_cast_transpose, multi_quantize
from .mx import quantize_mx
from .offsets import splits_to_offsets
from .permute import permute, permute_backward, unpermute, unpermute_backward
from .route import route
from .scale import compute_scale, update_delayed_scaling
from .scale_layouts import convert_scales
from .swiglu import swiglu_backward_quantize, swiglu_quantize

__all__ = ["astype", "cast_transpose", "compute_amax", "compute_scale", "convert_scales", "dequantize", "group_quantize",
           "multi_cast_transpose", "multi_quantize", "pad_groups", "permute", "permute_backward",
           "quantize_block", "quantize_mx", "quantize_tensor", "route", "sort_chunks", "transpose", "unpad_groups",
           "unpermute", "unpermute_backward",
           "scaling_aware_transpose", "splits_to_offsets", "swiglu_backward_quantize",
           "swiglu_quantize", "swizzle_scales", "unswizzle_scales", "update_delayed_scaling"]
