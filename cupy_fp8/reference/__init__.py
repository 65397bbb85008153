"""The definition of every op in NumPy, under the op's own name, written to read like docs/numerics.md.

Each takes those arguments of the op that affect the result, returns fresh arrays and validates nothing.
"""

from .convert.astype import astype, transpose
from .convert.dequantize import dequantize
from .convert.rebase import rebase_scales
from .convert.scaling_aware import scaling_aware_transpose
from .matmul.dense import matmul_nt
from .matmul.grouped import grouped_matmul_nt
from .moe.gate import load_balance_loss, topk_gate, topk_gate_backward, z_loss
from .moe.group_sums import group_sums
from .moe.offsets import splits_to_offsets
from .moe.pad import pad_groups, sort_chunks, unpad_groups
from .moe.permute import permute, permute_backward, unpermute, unpermute_backward
from .moe.permute_transpose import permute_transpose
from .moe.quantize_permute import quantize_permute
from .moe.route import route
from .quantize.activation import activation_backward_quantize, activation_quantize
from .quantize.blocks import quantize_block
from .quantize.grouped import group_quantize
from .quantize.mx import quantize_mx
from .quantize.norm import norm_backward_quantize, norm_quantize
from .quantize.swiglu import swiglu_backward_quantize, swiglu_quantize
from .quantize.tensor import cast_transpose, quantize_tensor
from .quantize.tensor_list import multi_cast_transpose, multi_quantize
from .scales.amax import compute_amax
from .scales.convert import convert_scales
from .scales.scale import compute_scale, update_delayed_scaling
from .scales.swizzle import swizzle_scales, unswizzle_scales

# `python -m cupy_fp8 list --write` writes this list and the imports.
__all__ = [
    "activation_backward_quantize", "activation_quantize", "astype", "cast_transpose", "compute_amax",
    "compute_scale", "convert_scales", "dequantize", "group_quantize", "group_sums", "grouped_matmul_nt",
    "load_balance_loss", "matmul_nt", "multi_cast_transpose", "multi_quantize", "norm_backward_quantize",
    "norm_quantize", "pad_groups", "permute", "permute_backward", "permute_transpose", "quantize_block",
    "quantize_mx", "quantize_permute", "quantize_tensor", "rebase_scales", "route", "scaling_aware_transpose",
    "sort_chunks", "splits_to_offsets", "swiglu_backward_quantize", "swiglu_quantize", "swizzle_scales",
    "topk_gate", "topk_gate_backward", "transpose", "unpad_groups", "unpermute", "unpermute_backward",
    "unswizzle_scales", "update_delayed_scaling", "z_loss",
]
