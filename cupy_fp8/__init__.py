"""FP8 kernels on CuPy arrays, without a framework. Each equals a NumPy reference byte for byte; matrix
products are within a bound of it.

>>> import cupy_fp8 as fp8                 # needs no GPU; fp8.xp is CuPy where there is one, else NumPy
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import advice as _advice
from . import backend as _backend
from . import diagnostics, distributed, io, moe, plot
from .arrays import asarray, asnumpy, bytes_equal, concatenate, empty, empty_like, full, zeros
from .backend import DeviceError
from .cache import WeightCache
from .dlpack import from_dlpack, to_dlpack
from .formats import bfloat16, finfo, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16, float32
from .gate import Gate
from .grouped import Grouped
from .io import load, save
from .kernels import device_errors
from .ops.convert.astype import astype, transpose
from .ops.convert.dequantize import dequantize
from .ops.convert.rebase import rebase_scales
from .ops.convert.scaling_aware import scaling_aware_transpose
from .ops.matmul.dense import matmul_nt
from .ops.matmul.grouped import grouped_matmul_nt
from .ops.moe.gate import topk_gate, topk_gate_backward
from .ops.moe.gate_losses import load_balance_loss, z_loss
from .ops.moe.group_sums import group_sums
from .ops.moe.offsets import splits_to_offsets
from .ops.moe.pad import pad_groups, sort_chunks, unpad_groups
from .ops.moe.permute import permute, permute_backward, unpermute, unpermute_backward
from .ops.moe.permute_transpose import permute_transpose
from .ops.moe.quantize_permute import quantize_permute
from .ops.moe.route import route
from .ops.quantize.activation import activation_backward_quantize, activation_quantize
from .ops.quantize.blocks import quantize_block
from .ops.quantize.grouped import group_quantize
from .ops.quantize.mx import quantize_mx
from .ops.quantize.norm import norm_backward_quantize, norm_quantize
from .ops.quantize.swiglu import swiglu_backward_quantize, swiglu_quantize
from .ops.quantize.tensor import cast_transpose, quantize_tensor
from .ops.quantize.tensor_list import multi_cast_transpose, multi_quantize
from .ops.scales.amax import compute_amax
from .ops.scales.convert import convert_scales
from .ops.scales.scale import compute_scale, update_delayed_scaling
from .ops.scales.swizzle import swizzle_scales, unswizzle_scales
from .recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, quantize
from .results import Quantized, Scaled
from .routing import Routing
from .state import DelayedScalingState

__version__ = "0.1.0"

__all__ = [
    "BlockScaling", "CurrentScaling", "DelayedScaling", "DelayedScalingState", "DeviceError", "Gate",
    "Grouped", "MXScaling", "Quantized", "Routing", "Scaled", "WeightCache",
    "asarray", "asnumpy", "bytes_equal", "concatenate", "device_errors", "empty", "empty_like",
    "from_dlpack", "full", "load", "quantize", "save", "to_dlpack", "zeros",
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float16", "float32", "finfo",
    "diagnostics", "distributed", "io", "moe", "plot",
]  # fmt: skip
# The ops. `python -m cupy_fp8 list --write` writes this list and their imports.
__all__ += [
    "activation_backward_quantize", "activation_quantize", "astype", "cast_transpose", "compute_amax",
    "compute_scale", "convert_scales", "dequantize", "group_quantize", "group_sums", "grouped_matmul_nt",
    "load_balance_loss", "matmul_nt", "multi_cast_transpose", "multi_quantize", "norm_backward_quantize",
    "norm_quantize", "pad_groups", "permute", "permute_backward", "permute_transpose", "quantize_block",
    "quantize_mx", "quantize_permute", "quantize_tensor", "rebase_scales", "route", "scaling_aware_transpose",
    "sort_chunks", "splits_to_offsets", "swiglu_backward_quantize", "swiglu_quantize", "swizzle_scales",
    "topk_gate", "topk_gate_backward", "transpose", "unpad_groups", "unpermute", "unpermute_backward",
    "unswizzle_scales", "update_delayed_scaling", "z_loss",
]


if TYPE_CHECKING:                           # a `__getattr__` would hide misspelt names from type checkers
    from . import reference as reference
    from . import testing as testing

    xp: Any
else:
    def __getattr__(name: str) -> Any:
        if name == "xp":
            return _backend.default_module()
        if name == "testing":
            return import_module(".testing", __name__)
        inside = (f"{module.__name__.rpartition('.')[2]}.{public}"
                  for module in (diagnostics, distributed, io, moe, plot) for public in module.__all__)
        raise _advice.no_attribute("module 'cupy_fp8'", name, [*__all__, "xp", "testing", *inside])


def __dir__() -> list[str]:
    return [*__all__, "xp", "testing", "reference", *(name for name in globals() if name.startswith("__"))]
